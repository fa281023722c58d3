"""The gate in which experts choose tokens."""

from typing import Any

import torch
from torch import Tensor

from fmoe.errors import UserError
from fmoe.gates.capacity import capacity, limits
from fmoe.gates.router import Choice, Scores, TopKRouter
from fmoe.routing import RoutingGroups


class ExpertChoiceRouter(TopKRouter):
    """Gate in which experts choose tokens (Expert Choice, arXiv 2202.09368).

    In a routing group of S tokens (`fmoe.routing.RoutingGroups`), each expert takes the ``C = ceil(c * S / E)`` tokens
    with the highest probability for it, weighted by that probability. Every expert is exactly full. A token gets c
    experts on average (more if C is rounded up), and may get none.

    The experts of a token depend on the later tokens of its group. A causal language model would see the future.

    In the returned `Routing`, a token's row lists its experts, best first, padded with -1. The rows are as long as the
    largest number of experts of any token, at least 1. While torch.compile traces, their length is E.

    Args:
        top_k: the default of ``capacity_factor``.
        capacity_factor: c as in the paper, the average number of experts per token; None for ``top_k``.
        eval_capacity_factor: c in evaluation; None for ``capacity_factor``.

    Raises:
        UserError: as in `TopKRouter`, or a capacity factor exceeds E.
    """

    routes_by_logits = True

    common_losses = ("z",)
    capacity_factor: float
    eval_capacity_factor: float

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
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
        self.capacity_factor = float(self.top_k) if capacity_factor is None else capacity_factor
        self.eval_capacity_factor = self.capacity_factor if eval_capacity_factor is None else eval_capacity_factor
        for name in ("capacity_factor", "eval_capacity_factor"):
            if getattr(self, name) > num_experts:
                raise UserError(f"{name}={getattr(self, name)} exceeds num_experts={num_experts}")

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        probs_TE = scores.probs_TE
        with torch.no_grad():
            chosen_TE = self.chosen(probs_TE.detach(), groups)
            columns = self.num_experts
            if not torch.compiler.is_compiling():
                columns = max(int(chosen_TE.sum(1).max()), 1) if len(chosen_TE) else 1
            ranked_TK, expert_TK = torch.where(chosen_TE, probs_TE, -1).topk(columns, dim=-1)
        return Choice(torch.where(ranked_TK >= 0, expert_TK, -1), probs_TE.gather(-1, expert_TK))

    @property
    def factor(self) -> float:
        return self.capacity_factor if self.training else self.eval_capacity_factor

    def chosen(self, probs_TE: Tensor, groups: RoutingGroups) -> Tensor:
        """Return a bool [T, E], True where an expert takes a token; ties go to the first token."""
        limit_G = limits(groups, 1, self.num_experts, self.factor, probs_TE.device)
        probs_GSE = groups.split(probs_TE)
        valid_GS = groups.valid_or_none(probs_TE.device)
        if valid_GS is not None:
            probs_GSE = torch.where(valid_GS.unsqueeze(-1), probs_GSE, -1)
        probs_GES = probs_GSE.transpose(1, 2).contiguous()
        order_GES = probs_GES.sort(dim=-1, descending=True, stable=True).indices
        rank_S = torch.arange(groups.size, device=probs_TE.device, dtype=torch.int64)
        rank_GES = torch.empty_like(order_GES).scatter_(2, order_GES, rank_S.expand_as(order_GES))
        taken_GES = (rank_GES < limit_G.view(-1, 1, 1)) & (probs_GES >= 0)
        return groups.join(taken_GES.transpose(1, 2))

    def drop(self, expert_TK: Tensor, groups: RoutingGroups) -> Tensor:
        return expert_TK

    def max_load(self, groups: RoutingGroups) -> int | None:
        return sum(capacity(self.factor, size, self.num_experts) for size in groups.sizes())
