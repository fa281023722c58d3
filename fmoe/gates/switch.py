"""The gate of the Switch Transformer."""

from typing import Any

from torch import Tensor

from fmoe.errors import UserError
from fmoe.gates.router import Choice, Scores, TopKRouter
from fmoe.routing import RoutingGroups

JITTER = "switch jitter"  # purpose of the noise (`RoutingGroups.local_uniform16`)


class SwitchRouter(TopKRouter):
    """Top-1 routing weighted by the router's probability (Switch Transformer, arXiv 2101.03961, equations 1-2).

    In training, the router's input is multiplied by uniform noise in [1 - jitter, 1 + jitter] (appendix C). The noise
    does not reach the experts. ``top_k`` may be larger than 1; the weights are not renormalized.

    Args:
        jitter: half width of the multiplicative noise.
        capacity_factor, eval_capacity_factor: see `Router`. The defaults are the paper's.
    """

    default_top_k = 1
    routes_by_logits = True

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        jitter: float = 0.01,
        capacity_factor: float | None = 1.25,
        eval_capacity_factor: float | None = 2.0,
        **options: Any,
    ):
        super().__init__(
            d_model,
            num_experts,
            top_k,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            **options,
        )
        if not 0 <= jitter < 1:
            raise UserError(f"jitter={jitter} is not in [0, 1)")
        self.jitter = jitter

    def router_input(self, x_TD: Tensor, groups: RoutingGroups) -> Tensor:
        if not self.training or not self.jitter:
            return x_TD
        noise_TD = groups.local_uniform16(x_TD.shape[1], JITTER, x_TD.device).to(x_TD.dtype)
        return x_TD * noise_TD.mul_(2 * self.jitter).add_(1 - self.jitter)

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        weight_TK, expert_TK = scores.probs_TE.topk(self.top_k, dim=-1)
        return Choice(expert_TK, weight_TK)
