"""Megatron-core's linear layers with gradients of input and weight in separate passes (`fmoe.runtime.deferral`).

Their Function otherwise computes both gradients in every backward pass.
"""

import functools
from collections.abc import Callable

import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

from fmoe.runtime.deferral import deferrable


def mark_forward(forward: Callable) -> staticmethod:
    """Wrap ``LinearWithGradAccumulationAndAsyncCommunication.forward`` to mark the layer as deferrable."""

    @functools.wraps(forward)
    def wrapped(ctx, *inputs):
        output = forward(ctx, *inputs)
        # Other layers accumulate, defer or gather weights in their own ways.
        is_plain = not ctx.gradient_accumulation_fusion and ctx.grad_output_buffer is None
        ctx.is_deferrable = is_plain and getattr(ctx, "gtp_remat_size", 1) == 1
        return output

    return staticmethod(wrapped)


def split_backward(backward: Callable) -> staticmethod:
    """Wrap ``LinearWithGradAccumulationAndAsyncCommunication.backward`` to compute only gradients that are needed."""

    @functools.wraps(backward)
    def wrapped(ctx, grad):
        needs_input, needs_weight, needs_bias, *others = ctx.needs_input_grad
        if not ctx.is_deferrable or (needs_input and needs_weight):
            return backward(ctx, grad)
        x, weight = ctx.saved_tensors
        d_x = d_weight = None
        if needs_input:
            d_x = grad.matmul(weight)
            if ctx.sequence_parallel:
                d_x = mappings._reduce_scatter_along_first_dim(d_x, ctx.tp_group)
            elif ctx.allreduce_dgrad:
                dist.all_reduce(d_x, group=ctx.tp_group)
        grad = grad.flatten(0, -2)
        if needs_weight:
            rows = mappings._gather_along_first_dim(x, ctx.tp_group) if ctx.sequence_parallel else x
            d_weight = grad.t() @ rows.flatten(0, -2)
        return d_x, d_weight, grad.sum(0) if needs_bias else None, *[None] * len(others)

    return staticmethod(deferrable(wrapped))
