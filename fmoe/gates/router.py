"""Base classes of gates.

Shape letters: T tokens, D width, E experts, K choices, G routing groups, S positions of a group.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import type_before_parametrizations as type_of

from fmoe.errors import UserError
from fmoe.exchange.collectives import all_reduce
from fmoe.gates.capacity import capacity, count_by_group, drop_over_capacity
from fmoe.losses import load_balancing_loss, router_z_loss
from fmoe.routing import Routing, RoutingGroups, RoutingStats
from fmoe.runtime.adapters import adapted


@dataclass(frozen=True)
class Scores:
    """Logits and probabilities of a router, at least float32.

    Attributes:
        x_TD: the router's input. With `Router.routes_by_logits`, it has this rank's tokens only, and may be 16-bit.
        logits_TE: the router's output.
        probs_TE: softmax of the logits, or other scores that sum to one.
        logsumexp_T: logsumexp of each token's logits.
    """

    x_TD: Tensor
    logits_TE: Tensor
    probs_TE: Tensor
    logsumexp_T: Tensor


@dataclass(frozen=True)
class Choice:
    """Experts and combine weights that a gate chose.

    Attributes:
        expert_TK: expert ids, best first; -1 for a choice that is not made.
        weight_TK: combine weights, differentiable.
        losses: further scalar losses by name, besides `TopKRouter.losses`.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)


class Router(nn.Module):
    """Base class of gates. It applies the capacity limit and collects statistics.

    Args:
        d_model: D, the width of tokens.
        num_experts: E, the number of experts on all ranks.
        top_k: K, experts per token; None for the gate's own default.
        capacity_factor: in training, an expert takes at most ``ceil(factor * K * tokens of the group / E)`` assignments
            of a routing group (`fmoe.routing.RoutingGroups`); None for no limit (dropless).
        eval_capacity_factor: the same in evaluation; None for no limit, even if ``capacity_factor`` is set.

    Raises:
        UserError: ``top_k`` is not in 1..E, or a capacity factor is not positive and finite.
    """

    default_top_k = 2
    # True if the K experts of a token differ.
    has_distinct_choices = False
    # True if `choose` depends on logits only. If ranks hold parts of the sequences, logits (E per token) are then
    # gathered instead of the gate's input (D). `choose` must use no parameters, and a token's weights must depend on
    # its own logits only. Each class must set it for itself: the value of a base class is ignored.
    routes_by_logits = False

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
    ):
        super().__init__()
        top_k = min(self.default_top_k, num_experts) if top_k is None else top_k
        if not 1 <= top_k <= num_experts:
            raise UserError(f"top_k={top_k} is not between 1 and num_experts={num_experts}")
        for name, factor in (("capacity_factor", capacity_factor), ("eval_capacity_factor", eval_capacity_factor)):
            if factor is not None and not (factor > 0 and math.isfinite(factor)):
                raise UserError(f"{name}={factor} is not positive and finite")
        self.d_model = d_model
        self.num_experts = num_experts
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor

    def reset_parameters(self) -> None:
        """Draw the gate's parameters again, as the constructor did; a gate without parameters does nothing."""

    def finish(self, choice: Choice, entropy_T: Tensor, groups: RoutingGroups) -> Routing:
        """Apply the capacity limit to a choice, and return the routing with its statistics.

        Args:
            choice: experts and weights, with -1 for padding.
            entropy_T: entropy of each token's probabilities, in nats.
        """
        expert_TK = self.drop(choice.expert_TK, groups)
        stats = routing_stats(choice.expert_TK, expert_TK, entropy_T, groups, self.num_experts)
        return Routing(expert_TK, choice.weight_TK, choice.losses, stats, self.max_load(groups))

    @property
    def factor(self) -> float | None:
        """Capacity factor of the current mode, training or evaluation; None for no limit."""
        return self.capacity_factor if self.training else self.eval_capacity_factor

    def drop(self, expert_TK: Tensor, groups: RoutingGroups) -> Tensor:
        """Return ``expert_TK`` with -1 for choices beyond an expert's capacity."""
        factor = self.factor
        return expert_TK if factor is None else drop_over_capacity(expert_TK, groups, self.num_experts, factor)

    def max_load(self, groups: RoutingGroups) -> int | None:
        """Return an upper bound on the assignments of any expert; None if no bound is better than T * K."""
        bound = groups.num_tokens if self.has_distinct_choices else None
        if (factor := self.factor) is None:
            return bound
        total = sum(capacity(factor, n * self.top_k, self.num_experts) for n in groups.sizes())
        return total if bound is None else min(total, bound)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, capacity_factor={self.capacity_factor}"


class FixedRouter(Router):
    """Base class of gates without parameters that ignore the tokens' values. Every choice weighs 1 / K."""

    def choose(self, groups: RoutingGroups, device: torch.device) -> Tensor:
        """Return the experts of each token, int64 [T, K]."""
        raise NotImplementedError

    def entropy(self) -> float:
        """Return the entropy, in nats, of the distribution from which a token's expert is drawn."""
        return 0.0

    def forward(self, x_TD: Tensor, groups: RoutingGroups) -> Routing:
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        weight_TK = torch.full((groups.num_tokens, self.top_k), 1 / self.top_k, dtype=dtype, device=x_TD.device)
        expert_TK = leave_out_padding(self.choose(groups, x_TD.device), groups)
        entropy_T = torch.full((groups.num_tokens,), self.entropy(), device=x_TD.device, dtype=torch.float32)
        return self.finish(Choice(expert_TK, weight_TK), entropy_T, groups)


class TopKRouter(Router):
    """Base class of gates with a linear router, K choices per token, and losses. Subclasses override `choose`.

    Args:
        d_model, num_experts, top_k, capacity_factor, eval_capacity_factor: see `Router`.
        balance_group: process group. The balance loss counts the loads of all routing groups on its ranks together
            ("global batch" balance, arXiv 2501.11873). None counts them within each routing group.
        bias: add a bias to the router's linear map.
        init_method: fills the router's weight in place; None for U(-1/sqrt(D), 1/sqrt(D)), as in torch's Linear.

    Raises:
        UserError: see `Router`; or ``balance_group`` is given for a gate without the balance loss.
    """

    common_losses: tuple[str, ...] = ("balance", "z")
    has_distinct_choices = True
    # "softmax", or "sigmoid" if the probabilities are the sigmoids of the logits, divided by their sum.
    score = "softmax"

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
        super().__init__(
            d_model,
            num_experts,
            top_k,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
        )
        if balance_group is not None and "balance" not in self.common_losses:
            raise UserError(
                f"balance_group is given, but {type(self).__name__} has no balance loss: omit balance_group"
            )
        self.balance_group = balance_group
        self.runs_collectives = balance_group is not None
        self.init_method = init_method
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from torch's default CPU generator, and zero the bias. On the meta device, do nothing."""
        if self.weight.is_meta:
            return
        value = torch.empty(self.weight.shape, device="cpu", dtype=torch.float32)
        with torch.no_grad():
            if self.init_method is None:
                nn.init.kaiming_uniform_(value, a=math.sqrt(5))
            else:
                self.init_method(value)
            self.weight.copy_(value)
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, x_TD: Tensor, groups: RoutingGroups) -> Routing:
        with torch.autocast(x_TD.device.type, enabled=False):
            x_TD = self.router_input(self.widened(x_TD), groups)
            scores = self.scores(x_TD, self.logits(x_TD, groups))
            choice = self.choose(scores, groups)
            expert_TK = leave_out_padding(choice.expert_TK, groups)
            losses = {**self.losses(scores, expert_TK, groups), **choice.losses} if self.training else {}
            probs_TE = scores.probs_TE.detach()
            # torch.special.entr and xlogy are slower: not vectorized on CPUs.
            entropy_T = -(probs_TE * probs_TE.clamp_min(torch.finfo(probs_TE.dtype).tiny).log()).sum(-1)
        return self.finish(Choice(expert_TK, choice.weight_TK, losses), entropy_T, groups)

    def widened(self, x_TD: Tensor) -> Tensor:
        """Return the tokens in at least float32, or unchanged if only `logits` reads them, which takes 16 bits."""
        is_read_by_logits = type(self).router_input is TopKRouter.router_input and routes_by_logits(self)
        if x_TD.element_size() == 2 and is_read_by_logits:
            return x_TD
        return x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))

    def router_input(self, x_TD: Tensor, groups: RoutingGroups) -> Tensor:
        """Return the input of the router's linear map, by default the tokens ``x_TD`` themselves.

        An override, which may add noise for example, gets ``x_TD`` in at least float32.
        """
        return x_TD

    def logits(self, x_TD: Tensor, groups: RoutingGroups) -> Tensor:
        """Return the logits of the router's input, at least float32 [T, E].

        If several ranks route their tokens together, the logits are gathered over these ranks.
        """
        is_16 = x_TD.element_size() == 2
        logits_TE = _Linear16.apply(x_TD, self.weight) if is_16 else F.linear(x_TD, self.weight.to(x_TD.dtype))
        return groups.gather(logits_TE if self.bias is None else logits_TE + self.bias)

    def scores(self, x_TD: Tensor, logits_TE: Tensor) -> Scores:
        """Return the router's input and output with the probabilities of the experts, for each token."""
        logsumexp_T = logits_TE.logsumexp(-1)
        if self.score == "sigmoid":
            return Scores(x_TD, logits_TE, normalize_scores(logits_TE.sigmoid()), logsumexp_T)
        return Scores(x_TD, logits_TE, (logits_TE - logsumexp_T.unsqueeze(-1)).exp(), logsumexp_T)

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        """Return the experts of each token, best first, and their combine weights."""
        raise NotImplementedError

    def balance_choices(self, expert_TK: Tensor) -> Tensor:
        """Return the choices in ``expert_TK`` that the load balancing loss counts, by default all."""
        return expert_TK

    def losses(self, scores: Scores, expert_TK: Tensor, groups: RoutingGroups) -> dict[str, Tensor]:
        """Return the losses of ``common_losses``, for choices with -1 for padding."""
        losses = {}
        if "z" in self.common_losses:
            losses["z"] = router_z_loss(scores.logsumexp_T, groups.mask_T)
        if "balance" in self.common_losses:
            load_GE = count_by_group(self.balance_choices(expert_TK), groups, self.num_experts)
            if self.balance_group is not None:
                total_E = load_GE.sum(0)
                all_reduce(self.balance_group, total_E, what="sum of loads").wait()
                load_GE = total_E.expand_as(load_GE)
            valid_GS = groups.valid_or_none(load_GE.device)
            losses["balance"] = load_balancing_loss(groups.split(scores.probs_TE), load_GE, valid_GS)
        return losses


class _Linear16(torch.autograd.Function):
    """``x @ weight.T`` in float32, [T, E], from 16-bit tokens; keeps no float32 copy of them for the backward pass."""

    # In a 16-bit model only the router runs in float32 ("selective precision", Switch section 2.4), because softmax
    # turns the rounding error of a logit into a relative error of the weight.

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        if x_TD.is_cuda and x_TD.dtype == weight_ED.dtype:  # float32 sums of exact products
            return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)
        return F.linear(x_TD.float(), weight_ED.float())

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        grad_x = (grad_TE @ weight_ED.float()).to(x_TD.dtype) if needs_x else None
        grad_weight = (grad_TE.t() @ x_TD.float()).to(weight_ED.dtype) if needs_weight else None
        return grad_x, grad_weight


def routes_by_logits(gate: Any) -> bool:
    """Return whether a gate's own class, not a base class, sets `Router.routes_by_logits` to True."""
    return vars(type_of(gate if isinstance(gate, Router) else adapted(gate))).get("routes_by_logits", False)


def normalize_scores(score_TX: Tensor) -> Tensor:
    """Return the scores divided by each token's sum."""
    return score_TX / score_TX.sum(-1, keepdim=True).clamp(min=1e-20)


def leave_out_padding(expert_TK: Tensor, groups: RoutingGroups) -> Tensor:
    """Return ``expert_TK`` with -1 for padding tokens."""
    return expert_TK if groups.mask_T is None else torch.where(groups.mask_T.unsqueeze(-1), expert_TK, -1)


@torch.no_grad()
def routing_stats(
    expert_TK: Tensor, kept_TK: Tensor, entropy_T: Tensor, groups: RoutingGroups, num_experts: int
) -> RoutingStats:
    """Return the statistics of a routing: load of each expert, dropped choices, entropy and number of tokens.

    Args:
        expert_TK, kept_TK: the choices before and after the capacity limit; -1 for no expert.
        entropy_T: entropy of each token's probabilities, in nats.
    """
    tokens = torch.full((), float(groups.num_tokens), dtype=torch.float32, device=entropy_T.device)
    if groups.mask_T is not None:
        entropy_T = entropy_T * groups.mask_T
        tokens = groups.mask_T.sum().float()
    slot_N = kept_TK.flatten() + 1
    load_E = slot_N.new_zeros(num_experts + 1).scatter_add_(0, slot_N, torch.ones_like(slot_N)).float()
    dropped = tokens.new_zeros(())
    if kept_TK is not expert_TK:
        dropped = ((expert_TK >= 0).sum() - (kept_TK >= 0).sum()).float()
    return RoutingStats(load_E[1:], dropped, entropy_T.sum().float(), tokens)
