"""The integers of a dispatch, made once a forward pass and used again backward.

Shape letters: T tokens, K choices a token, N = T * K assignments, M of them kept, E experts, C chunks.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fmoe import kernels
from fmoe.kernels.cuda import calls
from fmoe.kernels.cuda import rows as cuda_rows
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
        end_E, num_kept: where the rows of each end, int32, and of all of them, int64 [1]; None where nobody has counted
            them yet (`offsets`).
    """

    order_N: Tensor
    place_TK: Tensor
    kept_TK: Tensor
    count_E: Tensor
    end_E: Tensor | None = None
    num_kept: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def from_routing(cls, routing: Routing, num_experts: int) -> "DispatchPlan":
        expert_TK = routing.expert_TK
        if calls.takes(expert_TK) and num_experts <= calls.MOST_EXPERTS:
            return cls(*cuda_rows.place(expert_TK, num_experts))
        kept_TK = expert_TK >= 0
        queue_N = torch.where(kept_TK, expert_TK, num_experts).reshape(-1)
        sorted_N, order_N = queue_N.sort(stable=True)
        place_N = torch.empty_like(order_N).scatter_(
            0, order_N, torch.arange(len(order_N), device=order_N.device, dtype=torch.int64)
        )
        # Where each expert begins among the sorted: no atomics, no host sync (torch.bincount on CUDA has both).
        begin_E1 = torch.searchsorted(
            sorted_N, torch.arange(num_experts + 1, device=sorted_N.device, dtype=torch.int64)
        )
        return cls(order_N, place_N.view_as(expert_TK), kept_TK, begin_E1.diff())

    @property
    def top_k(self) -> int:
        """K."""
        return self.place_TK.shape[1]

    @cached_property
    def counts(self) -> list[int]:
        """``count_E`` on the host: one device-to-host copy."""
        return self.count_E.tolist()

    @property
    def offsets(self) -> tuple[Tensor, Tensor]:
        """``end_E`` and ``num_kept``, on the device."""
        if self.end_E is not None and self.num_kept is not None:
            return self.end_E, self.num_kept
        end_E = self.count_E.cumsum(0)
        return end_E.int(), end_E[-1:]

    def permute(self, x_TD: Tensor, num_rows: int) -> Tensor:
        """A row for every assignment kept, in this order: [M, D]. ``num_rows`` is M."""
        return kernels.permute(x_TD, self, num_rows)

    def combine(self, rows_MD: Tensor, weight_TK: Tensor) -> Tensor:
        """``y_t = sum_k weight_tk * row of (t, k)``: [T, D]."""
        return kernels.combine(rows_MD, weight_TK, self)

    @torch.no_grad()
    def arranged(
        self, num_chunks: int = 1, expert_order: Iterable[int] | None = None, last: Sequence[int] = ()
    ) -> "DispatchPlan":
        """The same assignments in the order (chunk, expert, token): chunk c has the c-th part of each expert's.

        Args:
            num_chunks: C; `chunk_counts` tells how many of an expert's rows a chunk has, to anyone who knows their
                number.
            expert_order: all experts in the order wanted; None for the order of their ids.
            last: experts that are in no chunk but come after all of them, in this order.
        """
        if num_chunks == 1 and expert_order is None and not last:
            return self
        device = self.count_E.device
        num_experts = self.count_E.shape[0]
        end_E = self.count_E.cumsum(0)
        place_N = torch.arange(len(self.order_N), device=device, dtype=torch.int64)
        expert_N = torch.searchsorted(end_E, place_N, right=True)  # E at the dropped tail
        known_N = expert_N.clamp(max=num_experts - 1)
        position_N = place_N - (end_E - self.count_E)[known_N]
        chunk_N = position_N * num_chunks // self.count_E[known_N].clamp(min=1)
        rank_E = torch.arange(num_experts, device=device, dtype=torch.int64)
        if expert_order is not None:
            rank_E = torch.tensor(list(expert_order), device=device, dtype=torch.int64).argsort()
        key_N = chunk_N * num_experts + rank_E[known_N]
        for rank, expert in enumerate(last):
            key_N = torch.where(expert_N == expert, num_chunks * num_experts + rank, key_N)
        key_N = torch.where(expert_N == num_experts, (num_chunks + 1) * num_experts, key_N)
        order_N = self.order_N[key_N.argsort(stable=True)]
        inverse_N = torch.empty_like(order_N)
        inverse_N[order_N] = place_N
        return DispatchPlan(order_N, inverse_N.view_as(self.place_TK), self.kept_TK, self.count_E)


def chunk_counts(count: int, num_chunks: int) -> list[int]:
    """How many of an expert's ``count`` rows are in each chunk of `DispatchPlan.arranged`."""
    ends = [-(-count * c // num_chunks) for c in range(num_chunks + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]
