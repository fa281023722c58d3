"""The integers of a dispatch, made once a forward pass and used again backward.

Shape letters: T tokens, K choices a token, N = T * K assignments, M of them kept, E experts.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fmoe.routing import Routing


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Assignments in the order of their experts, those of one expert in token order, dropped ones at the tail.

    The plan is of fixed size N whatever was dropped, so that making it needs no look at values from the host.

    Attributes:
        order_N: the assignment (token * K + choice) at each place.
        place_TK: the place of each assignment; the inverse of ``order_N``.
        kept_TK: whether the assignment was kept.
        count_E: rows of each expert.
    """

    order_N: Tensor
    place_TK: Tensor
    kept_TK: Tensor
    count_E: Tensor

    @classmethod
    @torch.no_grad()
    def from_routing(cls, routing: Routing, num_experts: int) -> "DispatchPlan":
        expert_TK = routing.expert_TK
        kept_TK = expert_TK >= 0
        queue_N = torch.where(kept_TK, expert_TK, num_experts).reshape(-1)
        sorted_N, order_N = queue_N.sort(stable=True)
        place_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
        # Where each expert begins among the sorted: no atomics, no host sync (torch.bincount on CUDA has both).
        begin_E1 = torch.searchsorted(sorted_N, torch.arange(num_experts + 1, device=sorted_N.device))
        return cls(order_N, place_N.view_as(expert_TK), kept_TK, begin_E1.diff())

    @property
    def top_k(self) -> int:
        """K."""
        return self.place_TK.shape[1]

    @cached_property
    def counts(self) -> list[int]:
        """``count_E`` on the host: one device-to-host copy."""
        return self.count_E.tolist()
