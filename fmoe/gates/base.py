"""What the gates that pick each token's best experts have in common.

Shape letters: T tokens, D width, E experts, K choices, G routing groups, S places of a group.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe.errors import UserError
from fmoe.gates.capacity import count_by_group, drop_over_capacity
from fmoe.losses import load_balancing_loss, router_z_loss
from fmoe.routing import Routing, RoutingGroups, RoutingStats


@dataclass(frozen=True)
class Scores:
    """What a router thinks of its tokens, at least float32.

    Attributes:
        x_TD: the router's input.
        logits_TE: its output.
        probs_TE: softmax of the logits.
        logsumexp_T: of the logits.
    """

    x_TD: Tensor
    logits_TE: Tensor
    probs_TE: Tensor
    logsumexp_T: Tensor


@dataclass(frozen=True)
class Choice:
    """What a gate makes of the scores.

    Attributes:
        expert_TK: best first; -1 for a choice that is not made.
        weight_TK: combine weights, differentiable.
        losses: of this gate alone, by name; scalars.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)


class TopKRouter(nn.Module):
    """Linear router -> K choices a token -> capacity -> losses. A gate overrides `choose`, and what else differs.

    Args:
        d_model: D.
        num_experts: E, in all.
        top_k: K; None for the gate's own default.
        capacity_factor: an expert takes at most ``ceil(factor * K * tokens of the group / E)`` assignments of a
            routing group in training; None for no limit (dropless).
        eval_capacity_factor: the same in evaluation.
        balance_group: counts the load of the balance loss over this process group as well as over the rank's own
            routing groups ("global batch" balance, arXiv 2501.11873); None counts within each routing group.
        bias: whether the router's linear map has one.
        init_method: fills the router's weight in place; None for U(-1/sqrt(D), 1/sqrt(D)), torch's for a Linear.

    Raises:
        UserError: ``top_k`` not in 1..E, a capacity factor that is not positive.
    """

    default_top_k = 2
    has_balance_loss = True

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
        balance_group: dist.ProcessGroup | None = None,
        bias: bool = False,
        init_method: Callable[[Tensor], object] | None = None,
    ):
        super().__init__()
        top_k = min(self.default_top_k, num_experts) if top_k is None else top_k
        if not 1 <= top_k <= num_experts:
            raise UserError(f"top_k={top_k} is not between 1 and num_experts={num_experts}")
        for name, factor in (("capacity_factor", capacity_factor), ("eval_capacity_factor", eval_capacity_factor)):
            if factor is not None and not (factor > 0 and math.isfinite(factor)):
                raise UserError(f"{name}={factor} is not positive and finite; None means no limit")
        self.d_model, self.num_experts, self.top_k = d_model, num_experts, top_k
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.balance_group = balance_group
        self.init_method = init_method
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the router's parameters anew from torch's default generator; on the CPU, whose keys hold."""
        if self.weight.is_meta:
            return
        value = torch.empty(self.weight.shape, device="cpu")
        with torch.no_grad():
            if self.init_method is None:
                nn.init.kaiming_uniform_(value, a=math.sqrt(5))
            else:
                self.init_method(value)
            self.weight.copy_(value)
            if self.bias is not None:
                self.bias.zero_()

    def router_input(self, x_TD: Tensor, groups: RoutingGroups) -> Tensor:
        """What the router looks at; in the router's precision."""
        return x_TD

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        """Experts and weights of each token."""
        raise NotImplementedError

    def balance_choices(self, expert_TK: Tensor) -> Tensor:
        """The choices that the load balancing loss counts: all K, unless the gate's paper says otherwise."""
        return expert_TK

    def balance_probs(self, scores: Scores) -> Tensor:
        """The probabilities that the load balancing loss sees; rows sum to one."""
        return scores.probs_TE

    def scores(self, x_TD: Tensor, groups: RoutingGroups) -> Scores:
        """The router's view of the tokens."""
        x_TD = self.router_input(x_TD, groups)
        bias = None if self.bias is None else self.bias.to(x_TD.dtype)
        logits_TE = F.linear(x_TD, self.weight.to(x_TD.dtype), bias)
        logsumexp_T = logits_TE.logsumexp(-1)
        return Scores(x_TD, logits_TE, (logits_TE - logsumexp_T.unsqueeze(-1)).exp(), logsumexp_T)

    def forward(self, x_TD: Tensor, groups: RoutingGroups) -> Routing:
        # The router alone runs in float32 in a 16-bit model ("selective precision", Switch section 2.4): softmax
        # turns the rounding of a logit into a relative error of the weight.
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            scores = self.scores(x_TD.to(dtype), groups)
            choice = self.choose(scores, groups)
        expert_TK = choice.expert_TK
        if groups.mask_T is not None:
            expert_TK = torch.where(groups.mask_T.unsqueeze(-1), expert_TK, -1)
        losses = {**self._losses(scores, expert_TK, groups), **choice.losses} if self.training else {}
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        kept_TK = expert_TK if factor is None else drop_over_capacity(expert_TK, groups, self.num_experts, factor)
        return Routing(kept_TK, choice.weight_TK, losses, routing_stats(expert_TK, kept_TK, scores, groups))

    def _losses(self, scores: Scores, expert_TK: Tensor, groups: RoutingGroups) -> dict[str, Tensor]:
        losses = {"z": router_z_loss(scores.logsumexp_T, groups.mask_T)}
        if self.has_balance_loss:
            load_GE = count_by_group(self.balance_choices(expert_TK), groups, self.num_experts).to(
                scores.probs_TE.dtype
            )
            if self.balance_group is not None:
                total_E = load_GE.sum(0)
                dist.all_reduce(total_E, group=self.balance_group)
                load_GE = total_E.expand_as(load_GE)
            valid_GS = groups.valid(load_GE.device) if groups.is_ragged else None
            losses["balance"] = load_balancing_loss(groups.split(self.balance_probs(scores)), load_GE, valid_GS)
        return losses

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, capacity_factor={self.capacity_factor}"


@torch.no_grad()
def routing_stats(expert_TK: Tensor, kept_TK: Tensor, scores: Scores, groups: RoutingGroups) -> RoutingStats:
    """Sums over the tokens of a routing: made choices ``expert_TK``, of which ``kept_TK`` are left after capacity."""
    log_probs_TE = scores.logits_TE - scores.logsumexp_T.unsqueeze(-1)
    entropy_T = -(scores.probs_TE * log_probs_TE).sum(-1)
    num_experts = scores.logits_TE.shape[1]
    tokens = torch.full((), float(groups.num_tokens), device=entropy_T.device)
    if groups.mask_T is not None:
        entropy_T = entropy_T * groups.mask_T
        tokens = groups.mask_T.sum().float()
    slot_N = kept_TK.flatten() + 1
    load_E = torch.zeros(num_experts + 1, device=slot_N.device)
    load_E = load_E.scatter_add_(0, slot_N, torch.ones_like(slot_N, dtype=torch.float32))
    dropped = tokens.new_zeros(())
    if kept_TK is not expert_TK:
        dropped = ((expert_TK >= 0).sum() - (kept_TK >= 0).sum()).float()
    return RoutingStats(load_E[1:], dropped, entropy_T.sum().float(), tokens)


def limit_to_groups(scores_TE: Tensor, num_groups: int, num_kept: int, *, best_of: int = 1) -> Tensor:
    """Group-limited routing: scores outside each token's best ``num_kept`` of ``num_groups`` groups of experts become
    -inf. A group's score is the sum of its ``best_of`` best experts: 1 in DeepSeek-V2 (arXiv 2405.04434 section 2.1.2),
    2 in DeepSeek-V3 (arXiv 2412.19437 section 2.1.2).
    """
    grouped_TGE = scores_TE.unflatten(-1, (num_groups, -1))
    group_TG = grouped_TGE.topk(min(best_of, grouped_TGE.shape[-1]), dim=-1).values.sum(-1)
    kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
    kept_TG = kept_TG.scatter(-1, group_TG.topk(num_kept, dim=-1).indices, True)
    return grouped_TGE.masked_fill(~kept_TG.unsqueeze(-1), -torch.inf).flatten(-2)


def check_groups(num_experts: int, top_k: int, num_groups: int, num_kept: int) -> None:
    """Raises UserError where group-limited routing cannot be."""
    if num_groups < 1 or num_experts % num_groups:
        raise UserError(f"expert_groups={num_groups} does not divide num_experts={num_experts}")
    if not 1 <= num_kept <= num_groups:
        raise UserError(f"kept_groups={num_kept} is not between 1 and expert_groups={num_groups}")
    if num_kept * (num_experts // num_groups) < top_k:
        raise UserError(f"kept_groups={num_kept} hold {num_kept * (num_experts // num_groups)} experts, top_k={top_k}")
