"""Dispatch of tokens to a fixed number of slots per expert, some of which may be empty.

As in `fmoe.kernels.rows`, forward and backward passes gather rows.

Shape letters: T tokens, K experts per token, D width, N = T * K assignments, E experts, S slots per expert, P = E * S,
C chunks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe.kernels import memory
from fmoe.kernels.rows import DispatchPlan, gather_sum, row_dots


class PaddedPlan:
    """Like `DispatchPlan`, but with the same number of rows for every expert: S slots, some of them empty.

    Each expert's slots are split into C equal chunks. Rows are in the order (chunk, expert, slot).

    Args:
        plan: the assignments, sorted by expert, with at most ``slots`` rows per expert.
        slots: S, the number of slots per expert; a multiple of ``num_chunks``.
        num_chunks: C, the number of chunks per expert.
    """

    @torch.no_grad()
    def __init__(self, plan: DispatchPlan, slots: int, num_chunks: int):
        count_E = plan.count_E
        device = plan.count_E.device
        num_experts = count_E.shape[0]
        num_assignments = plan.perm_N.shape[0]
        begin_E = count_E.cumsum(0) - count_E
        part = slots // num_chunks
        position_CES = (
            torch.arange(slots, device=device, dtype=torch.int64).view(num_chunks, 1, part).expand(-1, num_experts, -1)
        )
        valid_CES = position_CES < count_E.view(1, -1, 1)
        self.valid_P = valid_CES.reshape(-1)
        place_P = (begin_E.view(1, -1, 1) + position_CES).reshape(-1).clamp(max=max(num_assignments - 1, 0))
        self.assignment_P = plan.perm_N[place_P] if num_assignments else place_P
        self.slots = slots
        self.top_k = plan.inverse_TK.shape[1]
        self.kept_TK = plan.kept_TK
        # The inverse: the slot of assignment (t, k).
        sorted_N = torch.arange(num_assignments, device=device, dtype=torch.int64)
        expert_N = torch.searchsorted(count_E.cumsum(0), sorted_N, right=True).clamp(max=num_experts - 1)
        position_N = sorted_N - begin_E[expert_N]
        place_N = (position_N // part * num_experts + expert_N) * part + position_N % part
        place_N = place_N.clamp(max=self.valid_P.shape[0] - 1)  # for dropped assignments, whose slot is not read
        self.inverse_TK = place_N[plan.inverse_TK]

    def permute(self, x_TD: Tensor, num_rows: int) -> Tensor:
        """Return the token of each slot, zero in empty slots: [T, D] -> [num_rows, D], a row per slot."""
        return _PermuteSlots.apply(x_TD, self)

    def combine(self, rows_PD: Tensor, weight_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's rows: [P, D] -> [T, D], for P slots in all."""
        return _CombineSlots.apply(rows_PD, weight_TK, self)

    def sum_rows(self, rows_PD: Tensor, weight_TK: Tensor) -> Tensor:
        """Return the result of `combine`. Not differentiable: call it in a `torch.autograd.Function`."""
        return gather_sum(rows_PD, weight_TK, self.inverse_TK, self.kept_TK)

    def weights(self, weight_TK: Tensor, num_rows: int) -> Tensor:
        """Return the combine weight of each slot, zero in empty slots: [num_rows], one per slot."""
        if not weight_TK.numel():
            return F.pad(weight_TK.reshape(-1), (0, num_rows))  # in the graph: the gate gets zeros as its gradient
        return torch.where(self.valid_P, weight_TK.reshape(-1).index_select(0, self.assignment_P), 0)

    def rows_of(self, x_TD: Tensor, weight_TK: Tensor | None = None) -> Tensor:
        """Return the token of each of the P slots times its combine weight, zero in empty slots: [T, D] -> [P, D].

        Args:
            weight_TK: combine weights; None for weights of 1.
        """
        if not x_TD.shape[0]:
            return x_TD.new_zeros(self.valid_P.shape[0], *x_TD.shape[1:])
        rows = memory.gather(x_TD, self.assignment_P // self.top_k)
        if weight_TK is not None:
            rows = rows * weight_TK.reshape(-1)[self.assignment_P].unsqueeze(1)
        return rows.masked_fill_(~self.valid_P.unsqueeze(1), 0)


class _PermuteSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: PaddedPlan) -> Tensor:
        ctx.plan = plan
        return plan.rows_of(x_TD)

    @staticmethod
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None]:
        return gather_sum(grad_PD, None, ctx.plan.inverse_TK, ctx.plan.kept_TK), None


class _CombineSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, weight_TK: Tensor, plan: PaddedPlan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(rows_PD, weight_TK)
        return plan.sum_rows(rows_PD, weight_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows_PD, weight_TK = ctx.saved_tensors
        plan = ctx.plan
        grad_weight_TK = None
        if ctx.needs_input_grad[1]:
            dtype = torch.promote_types(weight_TK.dtype, rows_PD.dtype)
            dot_P = row_dots(plan.rows_of(grad_TD).to(dtype), rows_PD.to(dtype))
            grad_weight_TK = torch.where(plan.kept_TK, dot_P[plan.inverse_TK], 0).to(weight_TK.dtype)
        return plan.rows_of(grad_TD, weight_TK).to(rows_PD.dtype), grad_weight_TK, None
