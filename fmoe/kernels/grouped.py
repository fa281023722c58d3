"""Linear layers over rows grouped by expert.

Shape letters: M rows, L experts, I input width, O output width.
"""

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fmoe.kernels import reference
from fmoe.kernels.memory import empty_gradient


def grouped_linear(rows_MI: Tensor, weight_LOI: Tensor, bias_LO: Tensor | None, counts: Sequence[int]) -> Tensor:
    """``rows @ weight[e].T + bias[e]`` where the rows of expert e are the ``counts[e]`` after those of e - 1: [M, O].

    An expert without rows gets zero gradients, not None.
    """
    return _GroupedLinear.apply(rows_MI, weight_LOI, bias_LO, counts)


def segments(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, each with the place of its rows."""
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(begin, begin + count)
        begin += count


class _GroupedLinear(torch.autograd.Function):
    # Autograd through `weight[e]` would make a gradient of the full stack for each expert: O(L^2) (DESIGN: 32 to
    # 83 times the time of the GEMMs). Here every expert's gradient is written once, into its slice.

    @staticmethod
    def forward(ctx, rows_MI, weight_LOI, bias_LO, counts):
        ctx.save_for_backward(rows_MI, weight_LOI, bias_LO)
        ctx.counts = counts
        out_MO = rows_MI.new_empty(rows_MI.shape[0], weight_LOI.shape[1])
        weights_OI = weight_LOI.unbind(0)
        biases_O = None if bias_LO is None else bias_LO.unbind(0)
        for expert, rows in segments(counts):
            if biases_O is None:
                torch.mm(rows_MI[rows], weights_OI[expert].t(), out=out_MO[rows])
            else:
                torch.addmm(biases_O[expert], rows_MI[rows], weights_OI[expert].t(), out=out_MO[rows])
        return out_MO

    @staticmethod
    def backward(ctx, grad_MO):
        rows_MI, weight_LOI, bias_LO = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradients are to be differentiated again
            plain = functools.partial(reference.grouped_linear, counts=ctx.counts)
            inputs = (rows_MI, weight_LOI, bias_LO)
            return *reference.gradients(plain, inputs, ctx.needs_input_grad[:3], grad_MO), None
        needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_MO = grad_MO.contiguous()
        grad_rows_MI = torch.empty_like(rows_MI) if needs_rows else None
        grad_weight_LOI = empty_gradient(weight_LOI) if needs_weight else None
        grad_bias_LO = grad_MO.new_empty(weight_LOI.shape[:2]) if needs_bias else None
        empty = [expert for expert, count in enumerate(ctx.counts) if not count]
        for grad in (grad_weight_LOI, grad_bias_LO):
            if grad is not None:
                for expert in empty:
                    grad[expert].zero_()
        weights_OI = weight_LOI.unbind(0)
        for expert, rows in segments(ctx.counts):
            if needs_rows:
                torch.mm(grad_MO[rows], weights_OI[expert], out=grad_rows_MI[rows])
            if needs_weight:
                torch.mm(grad_MO[rows].t(), rows_MI[rows], out=grad_weight_LOI[expert])
            if grad_bias_LO is not None:
                torch.sum(grad_MO[rows], 0, out=grad_bias_LO[expert])
        return grad_rows_MI, grad_weight_LOI, grad_bias_LO, None
