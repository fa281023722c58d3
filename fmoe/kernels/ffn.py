"""Two linear maps with an activation between them, over rows grouped by expert, one expert after the other.

Done expert by expert, what lies between the maps is small enough to stay in the cache and to come from malloc's own
lists; done for all rows at once, each step clears fresh pages for a buffer of all rows. The backward pass computes a
known activation again, so that only the pre-activations are kept in between.

Shape letters: M rows, L experts, D width, H hidden width, P height of the first map (H, twice that where it is gated).
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fmoe.kernels import memory, reference
from fmoe.kernels.activations import between, gate, is_known
from fmoe.kernels.grouped import grouped_linear, segments


def expert_ffn(
    rows_MD: Tensor,
    w_in_LPD: Tensor,
    b_in_LP: Tensor | None,
    w_out_LDH: Tensor,
    b_out_LD: Tensor | None,
    counts: Sequence[int],
    activation: Callable[[Tensor], Tensor],
    gated: bool = False,
) -> Tensor:
    """``activation(rows @ w_in[e].T + b_in[e]) @ w_out[e].T + b_out[e]`` for the rows of each expert e: [M, D].

    Args:
        activation: [n, H] -> [n, H], any differentiable function. One that is not known (`fmoe.kernels.activations`) is
            autograd's business, since it may be random or learn.
        gated: ``activation(first half) * second half`` of a first map of height 2 H instead.

    An expert without rows gets zero gradients, not None.
    """
    if is_known(activation):
        return _ExpertFFN.apply(rows_MD, w_in_LPD, b_in_LP, w_out_LDH, b_out_LD, counts, activation, gated)
    hidden_MP = grouped_linear(rows_MD, w_in_LPD, b_in_LP, counts)
    active_MH = gate(activation, hidden_MP) if gated else activation(hidden_MP)
    return grouped_linear(active_MH, w_out_LDH, b_out_LD, counts)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


class _ExpertFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_MD, w_in, b_in, w_out, b_out, counts, activation, gated):
        num_rows = rows_MD.shape[0]
        out_MD = memory.empty((num_rows, w_out.shape[1]), rows_MD)
        hidden_MP = memory.empty((num_rows, w_in.shape[1]), rows_MD)
        w_ins, w_outs = w_in.unbind(0), w_out.unbind(0)
        b_ins = [None] * len(w_ins) if b_in is None else b_in.unbind(0)
        b_outs = [None] * len(w_outs) if b_out is None else b_out.unbind(0)
        middle = between(activation, gated, max(counts, default=0), hidden_MP)
        for expert, rows in segments(counts):
            hidden = _linear(rows_MD[rows], w_ins[expert], b_ins[expert], out=hidden_MP[rows])
            _linear(middle.forward(hidden), w_outs[expert], b_outs[expert], out=out_MD[rows])
        ctx.save_for_backward(rows_MD, w_in, b_in, w_out, b_out, hidden_MP)
        ctx.counts, ctx.between = counts, (activation, gated)
        return out_MD

    @staticmethod
    def backward(ctx, grad_MD):
        rows_MD, w_in, b_in, w_out, b_out, hidden_MP = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradients are to be differentiated again
            plain = functools.partial(
                reference.expert_ffn, counts=ctx.counts, activation=ctx.between[0], gated=ctx.between[1]
            )
            inputs = (rows_MD, w_in, b_in, w_out, b_out)
            return *reference.gradients(plain, inputs, ctx.needs_input_grad[:5], grad_MD), None, None, None
        needs_rows, needs_w_in, needs_b_in, needs_w_out, needs_b_out, _, _, _ = ctx.needs_input_grad
        grad_MD = grad_MD.contiguous()
        d_rows = memory.empty(tuple(rows_MD.shape), rows_MD) if needs_rows else None
        most_rows = max(ctx.counts, default=0)
        d_active = memory.empty((most_rows, w_out.shape[2]), rows_MD)
        middle = between(*ctx.between, most_rows, hidden_MP)
        d_w_in = memory.empty_gradient(w_in) if needs_w_in else None
        d_w_out = memory.empty_gradient(w_out) if needs_w_out else None
        d_b_in = w_in.new_empty(w_in.shape[:2]) if needs_b_in else None
        d_b_out = w_out.new_empty(w_out.shape[:2]) if needs_b_out else None
        for expert, count in enumerate(ctx.counts):
            if not count:
                for gradient in (d_w_in, d_w_out, d_b_in, d_b_out):
                    if gradient is not None:
                        gradient[expert].zero_()
        w_ins, w_outs = w_in.unbind(0), w_out.unbind(0)
        for expert, rows in segments(ctx.counts):
            grad = grad_MD[rows]
            upstream = torch.mm(grad, w_outs[expert], out=d_active[: grad.shape[0]])
            active, d_hidden = middle.backward(hidden_MP[rows], upstream)
            if d_w_out is not None:
                torch.mm(grad.t(), active, out=d_w_out[expert])
            if d_b_out is not None:
                torch.sum(grad, 0, out=d_b_out[expert])
            if d_w_in is not None:
                torch.mm(d_hidden.t(), rows_MD[rows], out=d_w_in[expert])
            if d_b_in is not None:
                torch.sum(d_hidden, 0, out=d_b_in[expert])
            if d_rows is not None:
                torch.mm(d_hidden, w_ins[expert], out=d_rows[rows])
        return d_rows, d_w_in, d_b_in, d_w_out, d_b_out, None, None, None
