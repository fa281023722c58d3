"""What the gates that pick each token's best experts have in common.

Shape letters: T tokens, D width, E experts, K choices, G routing groups, S places of a group.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe.errors import UserError
from fmoe.gates.capacity import count_by_group, drop_over_capacity
from fmoe.losses import load_balancing_loss, router_z_loss
from fmoe.routing import Routing, RoutingGroups, RoutingStats


class TopKGate(nn.Module):
    """Linear router -> K choices a token -> capacity -> losses. A gate overrides `router_input` and `choose`.

    Args:
        d_model: D.
        num_experts: E, in all.
        top_k: K; None for the gate's own default.
        capacity_factor: an expert takes at most ``ceil(factor * K * tokens of the group / E)`` assignments of a
            routing group in training; None for no limit (dropless).
        eval_capacity_factor: the same in evaluation.
        init_method: fills the router's weight in place; None for U(-1/sqrt(D), 1/sqrt(D)), torch's for a Linear.

    Raises:
        UserError: ``top_k`` not in 1..E, a capacity factor that is not positive.
    """

    default_top_k = 2

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
        init_method: Callable[[Tensor], object] | None = None,
    ):
        super().__init__()
        top_k = min(self.default_top_k, num_experts) if top_k is None else top_k
        if not 1 <= top_k <= num_experts:
            raise UserError(f"top_k={top_k} is not between 1 and num_experts={num_experts}")
        for name, factor in (("capacity_factor", capacity_factor), ("eval_capacity_factor", eval_capacity_factor)):
            if factor is not None and not (factor > 0 and math.isfinite(factor)):
                raise UserError(f"{name}={factor} is not positive and finite; None means no limit")
        self.num_experts, self.top_k = num_experts, top_k
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.init_method = init_method
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the router's weight anew from torch's default generator."""
        with torch.no_grad():
            if self.init_method is None:
                nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
            else:
                self.init_method(self.weight)

    def router_input(self, x_TD: Tensor, groups: RoutingGroups) -> Tensor:
        """What the router looks at; in the router's precision."""
        return x_TD

    def choose(self, logits_TE: Tensor, probs_TE: Tensor, groups: RoutingGroups) -> tuple[Tensor, Tensor]:
        """Choices ``expert_TK`` (best first; -1 for a choice not made) and their combine weights ``weight_TK``."""
        raise NotImplementedError

    def balance_choices(self, expert_TK: Tensor) -> Tensor:
        """The choices that the load balancing loss counts: all K, unless the gate's paper says otherwise."""
        return expert_TK

    def forward(self, x_TD: Tensor, groups: RoutingGroups) -> Routing:
        # The router alone runs in float32 in a 16-bit model ("selective precision", Switch section 2.4): softmax
        # turns the rounding of a logit into a relative error of the weight.
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(self.router_input(x_TD.to(dtype), groups), self.weight.to(dtype))
            logsumexp_T = logits_TE.logsumexp(-1)
            log_probs_TE = logits_TE - logsumexp_T.unsqueeze(-1)
            probs_TE = log_probs_TE.exp()
            expert_TK, weight_TK = self.choose(logits_TE, probs_TE, groups)
        if groups.mask_T is not None:
            expert_TK = torch.where(groups.mask_T.unsqueeze(-1), expert_TK, -1)
        losses = {}
        if self.training:
            load_GE = count_by_group(self.balance_choices(expert_TK), groups, self.num_experts).to(dtype)
            valid_GS = groups.valid(x_TD.device) if groups.is_ragged else None
            losses["balance"] = load_balancing_loss(groups.split(probs_TE), load_GE, valid_GS)
            losses["z"] = router_z_loss(logsumexp_T, groups.mask_T)
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        kept_TK = expert_TK if factor is None else drop_over_capacity(expert_TK, groups, self.num_experts, factor)
        return Routing(kept_TK, weight_TK, losses, self._stats(expert_TK, kept_TK, log_probs_TE, probs_TE, groups))

    @torch.no_grad()
    def _stats(self, expert_TK, kept_TK, log_probs_TE, probs_TE, groups) -> RoutingStats:
        entropy_T = -(probs_TE * log_probs_TE).sum(-1)
        tokens = torch.full((), float(groups.num_tokens), device=entropy_T.device)
        if groups.mask_T is not None:
            entropy_T = entropy_T * groups.mask_T
            tokens = groups.mask_T.sum().float()
        dropped = ((expert_TK >= 0).sum() - (kept_TK >= 0).sum()) if kept_TK is not expert_TK else tokens.new_zeros(())
        load_E = torch.bincount(kept_TK.flatten() + 1, minlength=self.num_experts + 1)[1:]
        return RoutingStats(load_E.float(), dropped.float(), entropy_T.sum().float(), tokens)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, capacity_factor={self.capacity_factor}"
