"""Dispatch of tokens to rows in expert order, and back, by the indices of a `DispatchPlan`.

A row is the vector of one assignment, which is a token and one of its K experts. Forward and backward passes gather
rows. Autograd of ``index_select`` would add rows with ``index_add``. This needs a zero-filled buffer and, on CUDA,
atomics in an order that changes from run to run.

Shape letters: T tokens, D width, K experts per token, N = T * K assignments, M of them kept, E experts, C chunks, R
rows that this rank's experts compute, S segments of received rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe.kernels import backends, memory
from fmoe.kernels.cuda import calls
from fmoe.kernels.cuda import rows as cuda_rows
from fmoe.routing import Routing


@dataclass(frozen=True, eq=False, kw_only=True)
class CountedRouting(Routing):
    """`Routing` of a CUDA kernel that has counted its assignments, which `DispatchPlan.from_routing` need not repeat.

    Attributes:
        tile_count: number of assignments in ``expert_TK`` by tile and expert (`fmoe.kernels.cuda.rows.place`); None if
            they are not counted.
    """

    tile_count: Tensor | None


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Order of the experts' rows: by default, assignments sorted by expert and then by token, dropped ones last.

    An assignment is a token and one of its K experts; M of the N = T * K assignments are kept. Dropped assignments have
    rows too, so that the host need not wait for M. `kept_only` removes these rows.

    Attributes:
        perm_N: the assignment (token * K + choice) of each row.
        inverse_TK: the row of each assignment, the inverse of ``perm_N``. Dropped assignments have the rows from M on.
        kept_TK: whether each assignment is kept.
        count_E: number of rows of each expert.
        end_E: end of each expert's rows, int32; None unless a CUDA kernel made the plan.
        num_kept: M, int64 [1]; None unless a CUDA kernel made the plan.
        known_counts: ``count_E`` on the host; None if `counts` has to read it.
    """

    perm_N: Tensor
    inverse_TK: Tensor
    kept_TK: Tensor
    count_E: Tensor
    end_E: Tensor | None = None
    num_kept: Tensor | None = None
    known_counts: list[int] | None = None

    @classmethod
    @torch.no_grad()
    def from_routing(cls, routing: Routing, num_experts: int) -> "DispatchPlan":
        """Return the plan that sorts the assignments of a routing by expert."""
        expert_TK = routing.expert_TK
        if backends.cuda_takes_choices(expert_TK, num_experts):
            tile_count = routing.tile_count if isinstance(routing, CountedRouting) else None
            return cls(*cuda_rows.place(expert_TK, num_experts, tile_count))
        kept_TK = expert_TK >= 0
        queue_N = torch.where(kept_TK, expert_TK, num_experts).reshape(-1)
        sorted_N, perm_N = queue_N.sort(stable=True)
        # First sorted assignment of each expert. torch.bincount on CUDA would use atomics and synchronize the host.
        expert_E1 = torch.arange(num_experts + 1, device=sorted_N.device, dtype=torch.int64)
        begin_E1 = torch.searchsorted(sorted_N, expert_E1)
        return cls(perm_N, _inverted(perm_N).view_as(expert_TK), kept_TK, begin_E1.diff())

    @cached_property
    def counts(self) -> list[int]:
        """``count_E`` as a list on the host. The first use waits for the device, unless ``known_counts`` is set."""
        return self.count_E.tolist() if self.known_counts is None else self.known_counts

    def permute(self, x_TD: Tensor, num_rows: int) -> Tensor:
        """Return the token of each row: [T, D] -> [M, D] (the function `fmoe.kernels.permute`)."""
        return permute(x_TD, self.perm_N, self.inverse_TK, num_rows)

    def combine(self, rows_MD: Tensor, weight_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's rows: [M, D] -> [T, D] (the function `fmoe.kernels.combine`)."""
        return combine(rows_MD, weight_TK, self.inverse_TK)

    def sum_rows(self, rows_MD: Tensor, weight_TK: Tensor) -> Tensor:
        """Return the result of `combine`. Not differentiable: call it in a `torch.autograd.Function`."""
        if backends.cuda_takes_rows(rows_MD, weight_TK):
            return cuda_rows.combine(rows_MD, weight_TK, self.inverse_TK)
        return gather_sum(rows_MD, weight_TK, self.inverse_TK)

    def weights(self, weight_TK: Tensor, num_rows: int) -> Tensor:
        """Return the combine weight of each row: [M]. ``num_rows`` is M."""
        return weight_TK.reshape(-1).index_select(0, self.perm_N[:num_rows])

    def kept_only(self, counts: list[int]) -> "DispatchPlan":
        """Return the plan without the rows of dropped assignments. ``counts`` is ``count_E`` on the host."""
        return replace(self, perm_N=self.perm_N[: sum(counts)], known_counts=counts)

    def fused_arguments(self, weight_TK: Tensor) -> dict[str, Any]:
        """Return keyword arguments for a backend's `expert_ffn` that make it gather tokens and combine outputs, too."""
        offsets = (self.end_E, self.num_kept)
        return {"perm_N": self.perm_N, "inverse_TK": self.inverse_TK, "weight_TK": weight_TK, "offsets": offsets}

    @torch.no_grad()
    def arranged(
        self, num_chunks: int = 1, expert_order: Iterable[int] | None = None, last: Sequence[int] = ()
    ) -> "DispatchPlan":
        """Return a plan of the same assignments in the order (chunk, expert, token).

        The rows of each expert that is not in ``last`` are split into C chunks of nearly equal size
        (`fmoe.exchange.hops.chunk_of`).

        Args:
            num_chunks: C.
            expert_order: ids of all experts in the order of their rows within a chunk; None for ascending ids.
            last: experts whose rows are in no chunk, but follow all chunks in the order of this argument.
        """
        if num_chunks == 1 and expert_order is None and not last:
            return self
        device = self.count_E.device
        num_experts = self.count_E.shape[0]
        end_E = self.count_E.cumsum(0)
        row_N = torch.arange(len(self.perm_N), device=device, dtype=torch.int64)
        expert_N = torch.searchsorted(end_E, row_N, right=True)  # E for dropped assignments
        known_N = expert_N.clamp(max=num_experts - 1)
        position_N = row_N - (end_E - self.count_E)[known_N]
        chunk_N = position_N * num_chunks // self.count_E[known_N].clamp(min=1)
        rank_E = torch.arange(num_experts, device=device, dtype=torch.int64)
        if expert_order is not None:
            rank_E = torch.tensor(list(expert_order), device=device, dtype=torch.int64).argsort()
        key_N = chunk_N * num_experts + rank_E[known_N]
        for rank, expert in enumerate(last):
            key_N = torch.where(expert_N == expert, num_chunks * num_experts + rank, key_N)
        key_N = torch.where(expert_N == num_experts, (num_chunks + 1) * num_experts, key_N)
        perm_N = self.perm_N[key_N.argsort(stable=True)]
        return DispatchPlan(perm_N, _inverted(perm_N).view_as(self.inverse_TK), self.kept_TK, self.count_E)


def permute(x_TD: Tensor, perm_N: Tensor, inverse_TK: Tensor, num_rows: int) -> Tensor:
    """Return the token of each kept assignment, in the order of ``perm_N``: [T, D] -> [M, D].

    Args:
        perm_N, inverse_TK: fields of a `DispatchPlan`.
        num_rows: M, the number of kept assignments.
    """
    if backends.cuda_takes_rows(x_TD):
        return cuda_rows.permute(x_TD, perm_N, inverse_TK, num_rows)
    return _Permute.apply(x_TD, perm_N, inverse_TK, num_rows)


def combine(rows_MD: Tensor, weight_TK: Tensor, inverse_TK: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows, ``sum_k weight[t, k] * rows[inverse[t, k]]``: [M, D] -> [T, D].

    The result has the dtype of the rows. The sum is computed in that dtype or, if it has 16 bits, in float32.

    Args:
        inverse_TK: row of each assignment, from a `DispatchPlan`. Terms with a row of M or above are left out.
    """
    if backends.cuda_takes_rows(rows_MD, weight_TK):
        return cuda_rows.combine(rows_MD, weight_TK, inverse_TK)
    return _Combine.apply(rows_MD, weight_TK, inverse_TK)


def gather(rows: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``rows[index]`` in ``dtype``, in one pass. Not differentiable: call it in a `torch.autograd.Function`."""
    if backends.cuda_takes_rows(rows, dtype=dtype):
        return cuda_rows.gather(rows, index, dtype)
    return memory.gather(rows, index).to(dtype)


def segment_order(receive_PX: Tensor, key_PX: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation that sorts received segments by key, and its inverse.

    Rows arrive in segments: P senders each send X adjacent groups of rows, such as those of one expert. Segments with
    equal keys keep the order of arrival.

    Args:
        receive_PX: number of rows of each segment.
        key_PX: sort key of each segment.
        num_rows: sum of ``receive_PX``.
    """
    receive_S = receive_PX.reshape(-1)
    order_S = key_PX.reshape(-1).argsort(stable=True)
    if backends.cuda_takes_segments(receive_S):
        return calls.segment_order(receive_S.contiguous(), order_S, num_rows)
    sorted_S = receive_S[order_S]
    shift_S = (receive_S.cumsum(0) - receive_S)[order_S] - (sorted_S.cumsum(0) - sorted_S)
    row_R = torch.arange(num_rows, device=receive_S.device, dtype=torch.int64)
    order_R = row_R + shift_S.repeat_interleave(sorted_S, output_size=num_rows)
    return order_R, row_R - shift_S[order_S.argsort()].repeat_interleave(receive_S, output_size=num_rows)


def _inverted(perm_N: Tensor) -> Tensor:
    index_N = torch.arange(len(perm_N), device=perm_N.device, dtype=torch.int64)
    return torch.empty_like(perm_N).scatter_(0, perm_N, index_N)


def gather_sum(rows_MD: Tensor, weight_TK: Tensor | None, inverse_TK: Tensor, kept_TK: Tensor | None = None) -> Tensor:
    """Return ``sum_k weight_tk * rows[inverse_tk]`` for each token: [M, D] -> [T, D].

    Args:
        weight_TK: weights; None for weights of 1.
        kept_TK: bool, True for assignments to sum over; None for those with a row, ``inverse_TK < M``.
    """
    num_rows = rows_MD.shape[0]
    if kept_TK is None and num_rows < inverse_TK.numel():
        if 2 * num_rows < inverse_TK.numel() and rows_MD.device.type == "cpu":
            return _scatter_sum(rows_MD, weight_TK, inverse_TK)
        kept_TK = inverse_TK < num_rows
    if num_rows == 0:
        return rows_MD.new_zeros(inverse_TK.shape[0], rows_MD.shape[1])
    is_float = rows_MD.dtype == torch.float32 and (weight_TK is None or weight_TK.dtype == torch.float32)
    # embedding_bag rounds 16-bit sums at each step, and is slow in float64.
    if not is_float or torch.is_grad_enabled() or not memory.is_plain(rows_MD):
        return _sum_choices(rows_MD, weight_TK, inverse_TK, kept_TK)
    if kept_TK is None:
        return F.embedding_bag(inverse_TK, rows_MD, mode="sum", per_sample_weights=weight_TK)
    begin_T = kept_TK.sum(1).cumsum(0) - kept_TK.sum(1)
    weight_M = None if weight_TK is None else weight_TK[kept_TK]
    return F.embedding_bag(inverse_TK[kept_TK], rows_MD, begin_T, mode="sum", per_sample_weights=weight_M)


def _sum_choices(rows_MD: Tensor, weight_TK: Tensor | None, inverse_TK: Tensor, kept_TK: Tensor | None) -> Tensor:
    """Compute `gather_sum` one choice at a time."""
    # A dropped assignment has no row: it gathers another row, whose values, possibly NaN, are replaced by zeros.
    if kept_TK is not None:
        inverse_TK = inverse_TK.clamp(max=rows_MD.shape[0] - 1)
        weight_TK = None if weight_TK is None else torch.where(kept_TK, weight_TK, 0)
    dtype = torch.promote_types(rows_MD.dtype, torch.float32)
    total_TD = rows_MD.new_zeros(0)
    for k in range(inverse_TK.shape[1]):
        row_TD = rows_MD.index_select(0, inverse_TK[:, k]).to(dtype)
        if kept_TK is not None:
            row_TD = row_TD.masked_fill(~kept_TK[:, k : k + 1], 0)
        if weight_TK is None:
            total_TD = total_TD.add_(row_TD) if k else row_TD
        else:
            weight_T1 = weight_TK[:, k : k + 1].to(dtype)
            total_TD = total_TD.addcmul_(row_TD, weight_T1) if k else row_TD.mul_(weight_T1)
    return total_TD.to(rows_MD.dtype)


def row_dots(a_MD: Tensor, b_MD: Tensor) -> Tensor:
    """Return the dot product of each row of ``a_MD`` with the same row of ``b_MD``: [M]."""
    if a_MD.device.type == "cpu":  # vecdot would store the products of all elements first
        return torch.bmm(a_MD.unsqueeze(1), b_MD.unsqueeze(2)).view(-1)
    return torch.linalg.vecdot(a_MD, b_MD)


def _scatter_sum(rows_MD: Tensor, weight_TK: Tensor | None, inverse_TK: Tensor) -> Tensor:
    """Compute `gather_sum` on the CPU for few rows and many assignments."""
    # On the CPU, index_add_ adds in a fixed order.
    perm_M = _inverted(inverse_TK.reshape(-1))[: rows_MD.shape[0]]
    num_tokens, top_k = inverse_TK.shape
    dtype = torch.promote_types(rows_MD.dtype, torch.float32)
    wide_MD = rows_MD.to(dtype)
    if weight_TK is not None:
        wide_MD = wide_MD * weight_TK.reshape(-1).index_select(0, perm_M).unsqueeze(1).to(dtype)
    total_TD = wide_MD.new_zeros(num_tokens, rows_MD.shape[1])
    return total_TD.index_add_(0, perm_M // top_k, wide_MD).to(rows_MD.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, perm_N: Tensor, inverse_TK: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(inverse_TK)
        return memory.gather(x_TD, perm_N[:num_rows] // inverse_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_TK,) = ctx.saved_tensors
        return gather_sum(grad_MD, None, inverse_TK), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, weight_TK: Tensor, inverse_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_MD, weight_TK, inverse_TK)
        return gather_sum(rows_MD, weight_TK, inverse_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows_MD, weight_TK, inverse_TK = ctx.saved_tensors
        perm_M = _inverted(inverse_TK.reshape(-1))[: rows_MD.shape[0]]
        grad_MD = memory.gather(grad_TD, perm_M // inverse_TK.shape[1])
        grad_weight_TK = None
        if ctx.needs_input_grad[1]:
            dtype = torch.promote_types(weight_TK.dtype, rows_MD.dtype)
            dot_M = row_dots(grad_MD.to(dtype), rows_MD.to(dtype))
            grad_weight_TK = torch.zeros(weight_TK.shape, dtype=weight_TK.dtype, device=weight_TK.device)
            grad_weight_TK.view(-1)[perm_M] = dot_M.to(weight_TK.dtype)
        weight_M1 = weight_TK.reshape(-1).index_select(0, perm_M).unsqueeze(1)
        is_ours = not torch.is_grad_enabled() and grad_MD.dtype == torch.promote_types(grad_MD.dtype, weight_TK.dtype)
        grad_MD = grad_MD.mul_(weight_M1) if is_ours else grad_MD * weight_M1
        return grad_MD.to(rows_MD.dtype), grad_weight_TK, None


def combine_unsaved(rows_MD: Tensor, weight_TK: Tensor, plan: Any) -> Tensor:
    """Return ``plan.combine(rows_MD, weight_TK)``, without saving the rows for the backward pass.

    Use it only together with `weigh_gradient`: their two backward passes together are the derivative of `combine`. The
    backward pass of this function returns each row's gradient, not yet multiplied by the row's weight, and no gradient
    of the weights. `weigh_gradient` runs on the rank that computes the row. It multiplies the gradient by the weight,
    and computes the weight's gradient.

    Args:
        plan: a `DispatchPlan` or a `fmoe.kernels.padded.PaddedPlan`.
    """
    return _CombineUnsaved.apply(rows_MD, weight_TK, plan)


def weigh_gradient(out_RD: Tensor, weight_R: Tensor) -> Tensor:
    """Return ``out_RD`` unchanged; in the backward pass, multiply each row's gradient by the row's weight.

    The backward pass also computes the gradient of each weight: the dot product of the row and its incoming gradient.
    ``out_RD`` is saved for this. See `combine_unsaved`.
    """
    return _WeighGradient.apply(out_RD, weight_R)


class _CombineUnsaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, weight_TK: Tensor, plan: Any) -> Tensor:
        ctx.plan = plan
        ctx.num_rows = rows_MD.shape[0]
        ctx.save_for_backward(plan.inverse_TK)
        return plan.sum_rows(rows_MD, weight_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        _ = ctx.saved_tensors  # a checkpoint recomputes its exchanges here, before gradients are sent
        return ctx.plan.permute(grad_TD, ctx.num_rows), None, None


class _WeighGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, weight_R: Tensor) -> Tensor:
        ctx.save_for_backward(out_RD, weight_R)
        return out_RD.view_as(out_RD)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, Tensor]:
        out_RD, weight_R = ctx.saved_tensors
        dtype = torch.promote_types(weight_R.dtype, out_RD.dtype)
        dot_R = row_dots(grad_RD.to(dtype), out_RD.to(dtype)).to(weight_R.dtype)
        return (grad_RD * weight_R.unsqueeze(1)).to(out_RD.dtype), dot_R
