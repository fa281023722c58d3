"""The gate of GShard."""

from typing import Any

import torch
from torch import Tensor

from fmoe.gates.router import Choice, Scores, TopKRouter
from fmoe.routing import RoutingGroups


class GShardRouter(TopKRouter):
    """Top-2 routing with a random second expert, local groups and capacity (GShard, arXiv 2006.16668, algorithm 1).

    The probabilities of the chosen experts are normalized to sum to one. In training, a token goes to its second expert
    with probability ``min(1, 2 g2)``, where g2 is the weight of that expert. The same rule applies to later choices of
    ``top_k > 2``. An expert serves first choices before second ones. The balance loss counts first choices only.

    Args:
        random_routing: False keeps all choices in training, as evaluation does.
        capacity_factor: see `Router`. The default 1.0 is the paper's: ``2 * tokens of the group / E`` for top-2.
        eval_capacity_factor: the capacity factor in evaluation.
    """

    routes_by_logits = True

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        random_routing: bool = True,
        capacity_factor: float | None = 1.0,
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
        self.random_routing = random_routing

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        prob_TK, expert_TK = scores.probs_TE.topk(self.top_k, dim=-1)
        weight_TK = prob_TK / prob_TK.sum(-1, keepdim=True)
        return Choice(self.leave_out(expert_TK, weight_TK, groups), weight_TK)

    def leave_out(self, expert_TK: Tensor, weight_TK: Tensor, groups: RoutingGroups) -> Tensor:
        """Return the choices with -1 for those that are left out at random."""
        if not (self.training and self.random_routing and self.top_k > 1):
            return expert_TK
        noise_TK = groups.uniform(self.top_k - 1, "gshard second expert", weight_TK.device)
        is_kept_TK = 2 * weight_TK[:, 1:] > noise_TK
        return torch.cat([expert_TK[:, :1], torch.where(is_kept_TK, expert_TK[:, 1:], -1)], 1)

    def balance_choices(self, expert_TK: Tensor) -> Tensor:
        return expert_TK[:, :1]
