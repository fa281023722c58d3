"""The operations of `fmoe.kernels.rows` as differentiable CUDA kernels, for eager mode and torch.compile.

Shape letters: T tokens, D width, K experts per token, N = T * K assignments, M rows, E experts.
"""

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
    return _combine(rows_MD.contiguous(), inverse_TK, weight_TK.float().contiguous())


def _operation(name: str, schema: str):
    """Return a decorator that makes a function the operation ``fmoe_cuda::name``, without in-place changes."""
    return torch.library.custom_op(f"fmoe_cuda::{name}", mutates_args=(), schema=schema)


@_operation("permute", "(Tensor x, Tensor perm, Tensor inverse, SymInt num_rows) -> Tensor")
def _permute(x, perm, inverse, num_rows):
    return calls.gather(x, perm, inverse.shape[1], num_rows)


@_permute.register_fake
def _(x, _perm, _inverse, num_rows):
    return x.new_empty(num_rows, x.shape[1])


def _keep_permute(ctx, inputs, output):
    ctx.save_for_backward(inputs[2])


def _permute_backward(ctx, grad):
    return _combine(grad.contiguous(), *ctx.saved_tensors, None), None, None, None


_permute.register_autograd(_permute_backward, setup_context=_keep_permute)


@_operation("combine", "(Tensor rows, Tensor inverse, Tensor? weight) -> Tensor")
def _combine(rows, inverse, weight):
    return calls.combine(rows, inverse, weight)


@_combine.register_fake
def _(rows, inverse, _weight):
    return rows.new_empty(inverse.shape[0], rows.shape[1])


@_operation("combine_backward", "(Tensor grad, Tensor rows, Tensor inverse, Tensor? weight, bool[] needs) -> Tensor[]")
def _combine_backward(grad, rows, inverse, weight, needs):
    gradients = calls.combine_backward(grad, rows, inverse, weight, needs_rows=needs[0], needs_weight=needs[1])
    return [rows.new_empty(0) if gradient is None else gradient for gradient in gradients]


@_combine_backward.register_fake
def _(_grad, rows, _inverse, weight, needs):
    tensors = (rows, weight)
    return [torch.empty_like(t) if needed else rows.new_empty(0) for t, needed in zip(tensors, needs, strict=True)]


def _keep_combine(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward_of_combine(ctx, grad):
    needs_rows, _, needs_weight = ctx.needs_input_grad
    gradients = _combine_backward(grad.contiguous(), *ctx.saved_tensors, [needs_rows, needs_weight])
    return gradients[0] if needs_rows else None, None, gradients[1] if needs_weight else None


_combine.register_autograd(_backward_of_combine, setup_context=_keep_combine)


@_operation("gather", "(Tensor rows, Tensor index, ScalarType dtype) -> Tensor")
def gather(rows: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``rows[index]`` in ``dtype``. Not differentiable."""
    return calls.gather(rows.contiguous(), index.contiguous(), 1, index.shape[0], dtype=dtype)


@gather.register_fake
def _(rows, index, dtype):
    return rows.new_empty(index.shape[0], rows.shape[1], dtype=dtype)


@_operation(
    "place",
    "(Tensor expert_TK, SymInt num_experts, Tensor? tile_count=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def place(
    expert_TK: Tensor, num_experts: int, tile_count: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sort assignments by expert, stably, with dropped ones (-1) last.

    Args:
        tile_count: number of assignments by tile and expert (`fmoe.kernels.cuda.calls.place`); None to count them.

    Returns:
        The fields of a `fmoe.kernels.rows.DispatchPlan`: (perm_N, inverse_TK, kept_TK, count_E, end_E, num_kept).
    """
    expert_N = expert_TK.contiguous().view(-1)
    perm_N, inverse_N, kept_N, count_E, end_E, num_kept = calls.place(expert_N, num_experts, tile_count)
    return perm_N, inverse_N.view_as(expert_TK), kept_N.view_as(expert_TK), count_E, end_E, num_kept


@place.register_fake
def _(expert_TK, num_experts, _tile_count=None):
    new = expert_TK.new_empty
    return (
        new(expert_TK.numel()),
        torch.empty_like(expert_TK),
        torch.empty_like(expert_TK, dtype=torch.bool),
        new(num_experts),
        new(num_experts, dtype=torch.int32),
        new(1),
    )


@_operation(
    "drop_over_capacity",
    "(Tensor expert_TK, Tensor? mask_T, SymInt num_experts, SymInt group_size, SymInt sequences, "
    "SymInt sequence_length, float factor) -> Tensor",
)
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
    expert_TK = expert_TK.contiguous()
    mask_T = None if mask_T is None else mask_T.contiguous()
    tiles = calls.TokenTiles(expert_TK.shape[0], group_size, sequences, sequence_length)
    counted = calls.count_choices(expert_TK, mask_T, num_experts, tiles)
    queued = calls.queue(counted, expert_TK.shape[1], factor)
    return calls.drop_over_capacity(expert_TK, counted, queued)[0]


@drop_over_capacity.register_fake
def _(expert_TK, *_others):
    return torch.empty_like(expert_TK)
