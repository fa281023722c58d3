"""16-bit matrices of dense layers multiplied in float32, on processors that have no instructions for bf16.

There torch's bf16 products take three to six times as long as float32 ones, conversions included. Weights, activations
and gradients stay 16-bit; a product is rounded once, when it is done, and never between.

Marked weights alone are multiplied so (`widen`), megatron-core's own experts are not: whoever compares layers with them
should meet them as they are. Nor are those under sequence parallelism, whose gathering is in the middle.

Shape letters: M rows, I input width, O output width.
"""

import functools
import platform
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import Tensor, nn

_MARK = "is_multiplied_in_float32"
_PART = 1 << 20  # elements of rows and of results that are there in float32 at a time: few enough for a cache


@functools.cache
def is_wanted() -> bool:
    """Whether this machine multiplies bf16 matrices much slower than float32 ones: x86 with neither AVX512-BF16 nor
    AMX, and no GPU."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return is_x86 and not has_bf16 and not torch.cuda.is_available()


def widen(model: nn.Module) -> None:
    """Marks the bf16 matrices of dense layers and embeddings, but for those of megatron-core's experts."""
    for module in model.modules():
        is_dense = isinstance(module, ColumnParallelLinear | RowParallelLinear) and not module.is_expert
        is_dense |= isinstance(module, VocabParallelEmbedding)  # whose weight an output layer may have
        weight = getattr(module, "weight", None) if is_dense else None
        if weight is not None and weight.dtype == torch.bfloat16:
            setattr(weight, _MARK, True)


def product(a_MI: Tensor, b_IO: Tensor) -> Tensor:
    """``a @ b`` of bf16 matrices, summed in float32 and rounded once: bf16 [M, O]."""
    b_IO = b_IO.float()
    (rows, inner), width = a_MI.shape, b_IO.shape[1]
    out_MO = a_MI.new_empty(rows, width)
    parts = max(-(-rows * max(inner, width) // _PART), 1)
    each = max(-(-rows // parts), 1)
    wide_MO = b_IO.new_empty(min(each, rows), width)
    for a, out in zip(a_MI.split(each), out_MO.split(each), strict=True):
        out.copy_(torch.mm(a.float(), b_IO, out=wide_MO[: len(a)]))
    return out_MO


def forward_in_float32(forward: Callable) -> staticmethod:
    """``LinearWithGradAccumulationAndAsyncCommunication.forward``, that of marked weights otherwise."""

    @functools.wraps(forward)
    def wrapped(ctx, input, weight, bias, fusion, allreduce_dgrad, sequence_parallel, buffer, limit, group):
        ctx.is_wide = (
            getattr(weight, _MARK, False) and input.dtype == torch.bfloat16 and not (fusion or sequence_parallel)
        ) and buffer is None
        if not ctx.is_wide:
            return forward(ctx, input, weight, bias, fusion, allreduce_dgrad, sequence_parallel, buffer, limit, group)
        ctx.save_for_backward(input, weight)
        ctx.group, ctx.has_bias = group if allreduce_dgrad else None, bias is not None
        out = product(input.flatten(0, -2), weight.t()).view(*input.shape[:-1], len(weight))
        return out if bias is None else out + bias

    return staticmethod(wrapped)


def backward_in_float32(backward: Callable) -> staticmethod:
    """The same of its backward pass."""

    @functools.wraps(backward)
    def wrapped(ctx, grad):
        if not ctx.is_wide:
            return backward(ctx, grad)
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        grad_MO = grad.flatten(0, -2)
        d_input, waiting = None, None
        if needs_input:
            d_input = product(grad_MO, weight).view(input.shape)
            if ctx.group is not None:
                waiting = dist.all_reduce(d_input, group=ctx.group, async_op=True)
        d_weight = product(grad_MO.t(), input.flatten(0, -2)) if needs_weight else None
        d_bias = grad_MO.sum(0) if ctx.has_bias else None
        if waiting is not None:
            waiting.wait()
        return d_input, d_weight, d_bias, *[None] * 6

    return staticmethod(wrapped)
