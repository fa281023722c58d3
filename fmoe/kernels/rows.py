"""Moving rows between token order and expert order, without atomics: forward and backward only gather.

Autograd of plain indexing would add rows with ``index_add`` in the backward pass: a zero-filled buffer and, on CUDA,
atomics in an order that changes from run to run. Here a token's K rows are gathered and summed in the order of K.

Shape letters: T tokens, D width, K choices, N = T * K assignments, M of them kept.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fmoe.kernels import memory
from fmoe.kernels.cuda import rows as cuda_rows

if TYPE_CHECKING:  # the plan is made of values that these operations take; it imports nothing from here
    from fmoe.kernels.plan import DispatchPlan


def permute(x_TD: Tensor, plan: "DispatchPlan", num_rows: int) -> Tensor:
    """A row for every assignment kept, in the plan's order: [M, D]. ``num_rows`` is M."""
    if cuda_rows.takes(x_TD):
        return cuda_rows.permute(x_TD, plan.order_N, plan.place_TK, num_rows)
    return _Permute.apply(x_TD, plan, num_rows)


def combine(rows_MD: Tensor, weight_TK: Tensor, plan: "DispatchPlan") -> Tensor:
    """``y_t = sum_k weight_tk * row of (t, k)`` over the assignments kept: [T, D] in the dtype of the rows.

    The sum runs in the wider of the two dtypes, and at least float32.
    """
    if cuda_rows.takes(rows_MD, weight_TK):
        return cuda_rows.combine(rows_MD, weight_TK, plan.place_TK)
    return _Combine.apply(rows_MD, weight_TK, plan)


def reorder(rows: Tensor, index: Tensor, inverse: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``rows[index]`` for a permutation, whose backward is a gather by ``inverse``.

    Args:
        dtype: of the result; None for that of the rows. Gradients come back in the rows' own.
    """
    dtype = rows.dtype if dtype is None else dtype
    if cuda_rows.takes(rows) and cuda_rows.converts(dtype):
        return cuda_rows.reorder(rows, index, inverse, dtype)
    return _Reorder.apply(rows, index, inverse, dtype)


def _gather_sum(rows_MD: Tensor, weight_TK: Tensor | None, plan: "DispatchPlan") -> Tensor:
    """``sum_k weight_tk * rows[place_tk]``, dropped assignments left out; weight None is one."""
    num_rows = rows_MD.shape[0]
    if 2 * num_rows < plan.place_TK.numel() and rows_MD.device.type == "cpu":
        return _scatter_sum(rows_MD, weight_TK, plan)
    # Where some were dropped, their places lie past the end.
    return gather_sum(rows_MD, weight_TK, plan.place_TK, plan.kept_TK if num_rows < plan.place_TK.numel() else None)


def gather_sum(rows_MD: Tensor, weight_TK: Tensor | None, place_TK: Tensor, kept_TK: Tensor | None) -> Tensor:
    """``sum_k weight_tk * rows[place_tk]`` over what is kept (None: all); weight None is one."""
    num_rows = rows_MD.shape[0]
    num_tokens, top_k = place_TK.shape
    if num_rows == 0:
        return rows_MD.new_zeros(num_tokens, rows_MD.shape[1])
    if kept_TK is not None:
        place_TK = place_TK.clamp(max=num_rows - 1)
        weight_TK = kept_TK.to(rows_MD.dtype) if weight_TK is None else torch.where(kept_TK, weight_TK, 0)
    if _is_bag(rows_MD, weight_TK):
        return torch.nn.functional.embedding_bag(place_TK, rows_MD, mode="sum", per_sample_weights=weight_TK)
    dtype = torch.promote_types(rows_MD.dtype, torch.float32)
    total_TD = None
    for k in range(top_k):
        row_TD = rows_MD.index_select(0, place_TK[:, k]).to(dtype)
        if weight_TK is None:
            total_TD = row_TD if total_TD is None else total_TD.add_(row_TD)
        else:
            weight_T1 = weight_TK[:, k : k + 1].to(dtype)
            total_TD = row_TD.mul_(weight_T1) if total_TD is None else total_TD.addcmul_(row_TD, weight_T1)
    return total_TD.to(rows_MD.dtype)


def _is_bag(rows_MD: Tensor, weight_TK: Tensor | None) -> bool:
    """Whether torch sums them in one pass. In 16 bits it would round the sum at each step, in float64 it has no kernel
    for it, and autograd through it would scatter."""
    return (
        rows_MD.dtype == torch.float32
        and (weight_TK is None or weight_TK.dtype == torch.float32)
        and memory.is_plain(rows_MD)
        and not torch.is_grad_enabled()
    )


def row_dots(a_MD: Tensor, b_MD: Tensor) -> Tensor:
    """The dot product of each row with the same row of the other: [M]."""
    if a_MD.device.type == "cpu":  # where vecdot makes the product of all first
        return torch.bmm(a_MD.unsqueeze(1), b_MD.unsqueeze(2)).view(-1)
    return torch.linalg.vecdot(a_MD, b_MD)


def _scatter_sum(rows_MD: Tensor, weight_TK: Tensor | None, plan: "DispatchPlan") -> Tensor:
    """`_gather_sum` of few rows for many places (expert choice). On the CPU, where rows are added one by one."""
    order_M = plan.order_N[: rows_MD.shape[0]]
    dtype = torch.promote_types(rows_MD.dtype, torch.float32)
    wide_MD = rows_MD.to(dtype)
    if weight_TK is not None:
        wide_MD = wide_MD * weight_TK.reshape(-1).index_select(0, order_M).unsqueeze(1).to(dtype)
    total_TD = wide_MD.new_zeros(plan.place_TK.shape[0], rows_MD.shape[1])
    return total_TD.index_add_(0, order_M // plan.top_k, wide_MD).to(rows_MD.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, plan, num_rows):
        ctx.plan = plan
        return memory.gather(x_TD, plan.order_N[:num_rows] // plan.top_k)

    @staticmethod
    def backward(ctx, grad_MD):
        return _gather_sum(grad_MD, None, ctx.plan), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_MD, weight_TK, plan):
        ctx.plan = plan
        ctx.save_for_backward(rows_MD, weight_TK)
        return _gather_sum(rows_MD, weight_TK, plan)

    @staticmethod
    def backward(ctx, grad_TD):
        rows_MD, weight_TK = ctx.saved_tensors
        order_M = ctx.plan.order_N[: rows_MD.shape[0]]
        grad_MD = memory.gather(grad_TD, order_M // ctx.plan.top_k)
        grad_weight_TK = None
        if ctx.needs_input_grad[1]:
            dtype = torch.promote_types(weight_TK.dtype, rows_MD.dtype)
            dot_M = row_dots(grad_MD.to(dtype), rows_MD.to(dtype))
            grad_weight_TK = torch.zeros(weight_TK.shape, dtype=weight_TK.dtype, device=weight_TK.device)
            grad_weight_TK.view(-1)[order_M] = dot_M.to(weight_TK.dtype)
        weight_M1 = weight_TK.reshape(-1).index_select(0, order_M).unsqueeze(1)
        is_ours = not torch.is_grad_enabled() and grad_MD.dtype == torch.promote_types(grad_MD.dtype, weight_TK.dtype)
        grad_MD = grad_MD.mul_(weight_M1) if is_ours else grad_MD * weight_M1
        return grad_MD.to(rows_MD.dtype), grad_weight_TK, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, index, inverse, dtype):
        ctx.save_for_backward(index, inverse)
        ctx.dtype = rows.dtype
        return memory.gather(rows, index).to(dtype)

    @staticmethod
    def backward(ctx, grad):
        index, inverse = ctx.saved_tensors
        return _Reorder.apply(grad, inverse, index, ctx.dtype), None, None, None
