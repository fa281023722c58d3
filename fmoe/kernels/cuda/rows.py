"""The operations of `fmoe.kernels.rows` as differentiable CUDA kernels, for eager mode and torch.compile.

Shape letters: T tokens, D width, K experts per token, N = T * K assignments, M rows, E experts.
"""

from typing import List, Optional, Tuple  # noqa: UP035  torch infers operator schemas from these

import torch
from torch import Tensor

from fmoe.kernels.cuda import calls


def permute(x_TD: Tensor, perm_N: Tensor, inverse_TK: Tensor, num_rows: int) -> Tensor:
    """Return the token of each of the first ``num_rows`` rows, ``x_TD[perm_N[:num_rows] // K]``: [T, D] -> [M, D]."""
    return _permute(x_TD.contiguous(), perm_N, inverse_TK, num_rows)


def combine(rows_MD: Tensor, weight_TK: Tensor, inverse_TK: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows, ``sum_k weight[t, k] * rows[inverse[t, k]]``: [M, D] -> [T, D].

    The sum is computed in float32. Terms with an index of M or above are left out.
    """
    return _combine(rows_MD.contiguous(), weight_TK.float().contiguous(), inverse_TK)


def reorder(rows: Tensor, index: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``rows[index]`` in ``dtype``. The backward pass uses ``inverse``, the inverse permutation of ``index``."""
    return _reorder(rows.contiguous(), index.contiguous(), inverse.contiguous(), dtype)


@torch.library.custom_op("fmoe_cuda::permute", mutates_args=())
def _permute(x: Tensor, perm: Tensor, inverse: Tensor, num_rows: int) -> Tensor:
    return calls.gather(x, perm, inverse.shape[1], num_rows)


@_permute.register_fake
def _(x, perm, inverse, num_rows):
    return x.new_empty(num_rows, x.shape[1])


@torch.library.custom_op("fmoe_cuda::gather_sum", mutates_args=())
def _gather_sum(rows: Tensor, inverse: Tensor) -> Tensor:
    return calls.combine(rows, inverse)


@_gather_sum.register_fake
def _(rows, inverse):
    return rows.new_empty(inverse.shape[0], rows.shape[1])


def _keep_permute(ctx, inputs, output):
    ctx.save_for_backward(inputs[2])


def _permute_backward(ctx, grad):
    (inverse,) = ctx.saved_tensors
    return _gather_sum(grad.contiguous(), inverse), None, None, None


_permute.register_autograd(_permute_backward, setup_context=_keep_permute)


@torch.library.custom_op("fmoe_cuda::combine", mutates_args=())
def _combine(rows: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    return calls.combine(rows, inverse, weight)


@_combine.register_fake
def _(rows, weight, inverse):
    return rows.new_empty(inverse.shape[0], rows.shape[1])


@torch.library.custom_op("fmoe_cuda::combine_backward", mutates_args=())
def _combine_backward(grad: Tensor, rows: Tensor, weight: Tensor, inverse: Tensor, needs: List[bool]) -> List[Tensor]:  # noqa: UP006
    found = calls.combine_backward(grad, rows, inverse, weight, needs_rows=needs[0], needs_weight=needs[1])
    return [rows.new_empty(0) if gradient is None else gradient for gradient in found]


@_combine_backward.register_fake
def _(grad, rows, weight, inverse, needs):
    return [
        torch.empty_like(t) if needed else rows.new_empty(0) for t, needed in zip((rows, weight), needs, strict=True)
    ]


def _keep_combine(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward_of_combine(ctx, grad):
    needs = list(ctx.needs_input_grad[:2])
    found = _combine_backward(grad.contiguous(), *ctx.saved_tensors, needs)
    return (*(gradient if needed else None for gradient, needed in zip(found, needs, strict=True)), None)


_combine.register_autograd(_backward_of_combine, setup_context=_keep_combine)


@torch.library.custom_op("fmoe_cuda::reorder", mutates_args=())
def _reorder(rows: Tensor, index: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    return calls.gather(rows, index, 1, index.shape[0], dtype=dtype)


@_reorder.register_fake
def _(rows, index, inverse, dtype):
    return torch.empty_like(rows, dtype=dtype)


def _keep_reorder(ctx, inputs, output):
    rows, index, inverse, _ = inputs
    ctx.save_for_backward(index, inverse)
    ctx.dtype = rows.dtype


def _backward_of_reorder(ctx, grad):
    index, inverse = ctx.saved_tensors
    return _reorder(grad.contiguous(), inverse, index, ctx.dtype), None, None, None


_reorder.register_autograd(_backward_of_reorder, setup_context=_keep_reorder)


@torch.library.custom_op("fmoe_cuda::place", mutates_args=())
def place(
    expert_TK: Tensor,
    num_experts: int,
    tile_count: Optional[Tensor] = None,  # noqa: UP045
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # noqa: UP006
    """Sort assignments by expert, stably, with dropped ones (-1) last.

    Args:
        tile_count: number of assignments by tile and expert (`fmoe.kernels.cuda.calls.place`); None to count them.

    Returns:
        The fields of a `fmoe.kernels.rows.DispatchPlan`: (perm_N, inverse_TK, kept_TK, count_E, end_E, num_kept).
    """
    perm_N, places, kept, count_E, end_E, num_kept = calls.place(
        expert_TK.contiguous().view(-1), num_experts, tile_count
    )
    return perm_N, places.view_as(expert_TK), kept.view_as(expert_TK), count_E, end_E, num_kept


@place.register_fake
def _(expert_TK, num_experts, tile_count=None):
    new = expert_TK.new_empty
    return (
        new(expert_TK.numel()),
        torch.empty_like(expert_TK),
        torch.empty_like(expert_TK, dtype=torch.bool),
        new(num_experts),
        new(num_experts, dtype=torch.int32),
        new(1),
    )


@torch.library.custom_op("fmoe_cuda::drop_over_capacity", mutates_args=())
def _drop_over_capacity(
    expert_TK: Tensor,
    mask_T: Optional[Tensor],  # noqa: UP045
    num_experts: int,
    group_size: int,
    sequences: int,
    sequence_length: int,
    factor: float,
) -> Tensor:
    tiles = calls.TokenTiles(expert_TK.shape[0], group_size, sequences, sequence_length)
    counted = calls.count_choices(expert_TK, mask_T, num_experts, tiles)
    queued = calls.queue(counted, expert_TK.shape[1], factor)
    return calls.drop_over_capacity(expert_TK, counted, queued)[0]


@_drop_over_capacity.register_fake
def _(expert_TK, mask_T, num_experts, group_size, sequences, sequence_length, factor):
    return torch.empty_like(expert_TK)


def drop_over_capacity(
    expert_TK: Tensor,
    mask_T: Tensor | None,
    num_experts: int,
    group_size: int,
    sequences: int,
    sequence_length: int,
    factor: float,
) -> Tensor:
    """Return ``expert_TK`` with -1 for assignments over capacity, as `fmoe.gates.capacity.drop_over_capacity` does.

    Args:
        mask_T: bool; False for tokens that are not routed.
        group_size: number of tokens per routing group.
        sequences, sequence_length: memory layout of the tokens, as in `fmoe.kernels.gates.memory_shape`.
        factor: capacity factor.
    """
    mask_T = None if mask_T is None else mask_T.contiguous()
    sizes = (num_experts, group_size, sequences, sequence_length, factor)
    return _drop_over_capacity(expert_TK.contiguous(), mask_T, *sizes)
