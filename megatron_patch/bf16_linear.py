"""bf16 matrix products of dense layers in float32, for processors without bf16 instructions.

On these processors, torch's bf16 products take three to six times as long as conversions plus products in float32.
Weights, activations and gradients stay bf16. A product is rounded once, at the end.

Only marked weights are multiplied this way (`mark_weights`). Megatron-core's own experts are not marked, so that
benchmarks measure them unchanged. Under sequence parallelism, layers that gather their input use torch's products.

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
_CHUNK = 1 << 20  # float32 elements of input or output rows at a time, few enough for a CPU cache


@functools.cache
def is_needed() -> bool:
    """Return whether bf16 products are slow on this machine: x86 with no AVX512-BF16, AMX or GPU."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return is_x86 and not has_bf16 and not torch.cuda.is_available()


def mark_weights(model: nn.Module) -> None:
    """Mark the bf16 weights that `forward_in_float32` and `backward_in_float32` multiply in float32.

    These are the weights of embeddings and of linear layers outside experts.
    """
    for module in model.modules():
        is_dense = isinstance(module, ColumnParallelLinear | RowParallelLinear) and not module.is_expert
        is_dense |= isinstance(module, VocabParallelEmbedding)  # whose weight the output layer may share
        weight = getattr(module, "weight", None) if is_dense else None
        if weight is not None and weight.dtype == torch.bfloat16:
            setattr(weight, _MARK, True)


def product(a_MI: Tensor, b_IO: Tensor) -> Tensor:
    """Return ``a @ b`` of two bf16 matrices as bf16 [M, O], summed in float32 and rounded once."""
    b_IO = b_IO.float()
    rows, inner = a_MI.shape
    width = b_IO.shape[1]
    out_MO = a_MI.new_empty(rows, width)
    chunks = max(-(-rows * max(inner, width) // _CHUNK), 1)
    each = max(-(-rows // chunks), 1)
    float_MO = b_IO.new_empty(min(each, rows), width)
    for a, out in zip(a_MI.split(each), out_MO.split(each), strict=True):
        out.copy_(torch.mm(a.float(), b_IO, out=float_MO[: len(a)]))
    return out_MO


def forward_in_float32(forward: Callable) -> staticmethod:
    """Wrap ``LinearWithGradAccumulationAndAsyncCommunication.forward`` so that it multiplies in float32.

    This applies to the weights that `mark_weights` has marked.
    """

    @functools.wraps(forward)
    def wrapped(ctx, input, weight, bias, *settings):
        # from 0.19 on: gtp_remat_size; then also output_dtype
        fusion, allreduce_dgrad, sequence_parallel, buffer, _, group, *others = settings
        ctx.is_float32 = (
            getattr(weight, _MARK, False) and input.dtype == torch.bfloat16 and not (fusion or sequence_parallel)
        ) and (buffer is None and others in ([], [1], [1, None]))
        if not ctx.is_float32:
            return forward(ctx, input, weight, bias, *settings)
        ctx.num_settings = len(settings)
        ctx.save_for_backward(input, weight)
        ctx.group = group if allreduce_dgrad else None
        ctx.has_bias = bias is not None
        out = product(input.flatten(0, -2), weight.t()).view(*input.shape[:-1], len(weight))
        return out if bias is None else out + bias

    return staticmethod(wrapped)


def backward_in_float32(backward: Callable) -> staticmethod:
    """Wrap ``LinearWithGradAccumulationAndAsyncCommunication.backward`` so that it multiplies in float32.

    This applies to the weights that `mark_weights` has marked.
    """

    @functools.wraps(backward)
    def wrapped(ctx, grad):
        if not ctx.is_float32:
            return backward(ctx, grad)
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        grad_MO = grad.flatten(0, -2)
        d_input = handle = None
        if needs_input:
            d_input = product(grad_MO, weight).view(input.shape)
            if ctx.group is not None:
                handle = dist.all_reduce(d_input, group=ctx.group, async_op=True)
        d_weight = product(grad_MO.t(), input.flatten(0, -2)) if needs_weight else None
        d_bias = grad_MO.sum(0) if ctx.has_bias else None
        if handle is not None:
            handle.wait()
        return d_input, d_weight, d_bias, *[None] * ctx.num_settings

    return staticmethod(wrapped)
