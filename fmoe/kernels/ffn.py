"""Experts in plain torch: linear maps of rows grouped by expert, and feed-forward networks of two such maps.

Experts run one after the other. With GELU, SiLU, ReLU or `SwiGLUOAI`, the result of the activation is kept for only one
expert at a time. The backward pass recomputes it from the pre-activations, which are saved. Any other activation may be
random or have parameters. It is called once for all rows, and autograd records the call.

Shape letters: M rows, n of them of one expert, L experts, I input width, O output width, D width, H hidden width, P
output width of the first map (2 H if gated, else H).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe.kernels import memory, reference
from fmoe.kernels.glu import Activation, SwiGLUOAI, gate
from fmoe.runtime.deferral import deferrable

Kernels = tuple[Callable[..., Tensor], Callable[..., Tensor]]  # forward(x, out=), backward(upstream, x, grad_input=)

_aten = torch.ops.aten


def grouped_linear(rows_MI: Tensor, weight_LOI: Tensor, bias_LO: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Return ``rows @ weight[e].T + bias[e]`` for the ``counts[e]`` rows of each expert e: [M, I] -> [M, O].

    Rows are sorted by expert. An expert without rows gets zero gradients, not None.
    """
    return _GroupedLinear.apply(rows_MI, weight_LOI, bias_LO, counts)


def segments(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with the slice of its rows."""
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(begin, begin + count)
        begin += count


def expert_ffn(
    rows_MD: Tensor,
    w_in_LPD: Tensor,
    b_in_LP: Tensor | None,
    w_out_LDH: Tensor,
    b_out_LD: Tensor | None,
    counts: Sequence[int],
    activation: Activation,
    gated: bool = False,
) -> Tensor:
    """Apply the feed-forward network of each expert to its rows: [M, D] -> [M, D].

    For expert e it is ``activation(rows @ w_in[e].T + b_in[e]) @ w_out[e].T + b_out[e]``. Rows are sorted by expert. An
    expert without rows gets zero gradients, not None.

    Args:
        counts: number of rows of each expert.
        activation: any differentiable function [n, H] -> [n, H].
        gated: whether the first map has 2 H outputs, from which `gate` computes H. It must be True for `SwiGLUOAI`.
    """
    if isinstance(activation, SwiGLUOAI) or _kernels(activation) is not None:
        return _ExpertFFN.apply(rows_MD, w_in_LPD, b_in_LP, w_out_LDH, b_out_LD, counts, activation, gated)
    hidden_MP = grouped_linear(rows_MD, w_in_LPD, b_in_LP, counts)
    active_MH = gate(activation, hidden_MP) if gated else activation(hidden_MP)
    return grouped_linear(active_MH, w_out_LDH, b_out_LD, counts)


class _GroupedLinear(torch.autograd.Function):
    # Autograd through `weight[e]` would make a gradient of the full stack for each expert: O(L^2), 32 to 83 times the
    # time of the GEMMs. Here every expert's gradient is written once, into its slice.

    @staticmethod
    def forward(ctx: Any, rows_MI: Tensor, weight_LOI: Tensor, bias_LO: Tensor | None, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(rows_MI, weight_LOI, bias_LO)
        ctx.is_deferrable = True
        ctx.counts = counts
        out_MO = rows_MI.new_empty(rows_MI.shape[0], weight_LOI.shape[1])
        weights_OI = weight_LOI.unbind(0)
        biases_O = _unbound(bias_LO, len(weights_OI))
        for expert, rows in segments(counts):
            _linear(rows_MI[rows], weights_OI[expert], biases_O[expert], out_MO[rows])
        return out_MO

    @staticmethod
    @deferrable
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor | None, ...]:
        rows_MI, weight_LOI, bias_LO = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradients will be differentiated again
            plain = functools.partial(reference.grouped_linear, counts=ctx.counts)
            inputs = (rows_MI, weight_LOI, bias_LO)
            return *reference.gradients(plain, inputs, ctx.needs_input_grad[:3], grad_MO), None
        needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_MO = grad_MO.contiguous()
        grad_rows_MI = torch.empty_like(rows_MI) if needs_rows else None
        grad_weight_LOI = memory.empty_gradient(weight_LOI) if needs_weight else None
        grad_bias_LO = grad_MO.new_empty(weight_LOI.shape[:2]) if needs_bias else None
        _zero_unused(ctx.counts, grad_weight_LOI, grad_bias_LO)
        weights_OI = weight_LOI.unbind(0)
        for expert, rows in segments(ctx.counts):
            if grad_rows_MI is not None:
                torch.mm(grad_MO[rows], weights_OI[expert], out=grad_rows_MI[rows])
            if grad_weight_LOI is not None:
                torch.mm(grad_MO[rows].t(), rows_MI[rows], out=grad_weight_LOI[expert])
            if grad_bias_LO is not None:
                torch.sum(grad_MO[rows], 0, out=grad_bias_LO[expert])
        return grad_rows_MI, grad_weight_LOI, grad_bias_LO, None


def _kernels(activation: Activation) -> Kernels | None:
    """Return the forward and backward kernels of GELU, SiLU or ReLU; None for any other function."""
    if isinstance(activation, functools.partial) and activation.func is F.gelu and not activation.args:
        return (
            functools.partial(_aten.gelu.out, **activation.keywords),
            functools.partial(_aten.gelu_backward.grad_input, **activation.keywords),
        )
    if activation is F.gelu:
        return _aten.gelu.out, _aten.gelu_backward.grad_input
    if activation is F.silu:
        return _aten.silu.out, _aten.silu_backward.grad_input
    if activation is F.relu:
        return _aten.relu.out, _relu_backward
    return None


def _relu_backward(upstream: Tensor, x: Tensor, *, grad_input: Tensor) -> Tensor:
    return _aten.threshold_backward.grad_input(upstream, x, 0, grad_input=grad_input)


class _Between:
    """Forward and backward pass of an activation. Each call overwrites the results of previous ones.

    Args:
        kernels: the activation's kernels.
        gated: compute ``activation(first half) * second half``.
        most_rows: largest number of rows of a call.
        like: all rows of pre-activations, [M, P].
    """

    def __init__(self, kernels: Kernels, gated: bool, most_rows: int, like: Tensor):
        self._forward, self._backward = kernels
        self._gated = gated
        self._most_rows = most_rows
        self._like = like
        self._active = self._buffer(like.shape[1] // (1 + gated))
        self._d_hidden: Tensor | None = None  # allocated by the first `backward`, as the next one
        self._d_active: Tensor | None = None

    def _buffer(self, width: int) -> Tensor:
        return memory.empty((self._most_rows, width), self._like)

    def forward(self, hidden_nP: Tensor) -> Tensor:
        if not self._gated:
            return self._forward(hidden_nP, out=self._active[: hidden_nP.shape[0]])
        gates, values = hidden_nP.chunk(2, dim=1)
        return self._forward(gates, out=self._active[: hidden_nP.shape[0]]).mul_(values)

    def backward(self, hidden_nP: Tensor, upstream_nH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `forward`, and the gradient of ``hidden_nP``."""
        num_rows = hidden_nP.shape[0]
        if self._d_hidden is None:
            self._d_hidden = self._buffer(hidden_nP.shape[1])
        d_hidden = self._d_hidden[:num_rows]
        if not self._gated:
            return self.forward(hidden_nP), self._backward(upstream_nH, hidden_nP, grad_input=d_hidden)
        if self._d_active is None:
            self._d_active = self._buffer(upstream_nH.shape[1])
        gates, values = hidden_nP.chunk(2, dim=1)
        d_gates, d_values = d_hidden.chunk(2, dim=1)
        active = self._forward(gates, out=self._active[:num_rows])
        torch.mul(upstream_nH, active, out=d_values)
        upstream = torch.mul(upstream_nH, values, out=self._d_active[:num_rows])
        self._backward(upstream, gates, grad_input=d_gates)
        return active.mul_(values), d_hidden


class _ClampedBetween:
    """`_Between` for `SwiGLUOAI`, computed at least in float32."""

    def __init__(self, activation: SwiGLUOAI, like: Tensor):
        self._activation = activation
        self._dtype = torch.promote_types(like.dtype, torch.float32)

    def forward(self, hidden_nP: Tensor) -> Tensor:
        return gate(self._activation, hidden_nP)

    def backward(self, hidden_nP: Tensor, upstream_nH: Tensor) -> tuple[Tensor, Tensor]:
        gates, values = hidden_nP.to(self._dtype).chunk(2, dim=1)
        first = self._activation(gates)
        second = self._activation.second(values)
        first_slope, second_slope = self._activation.slopes(gates, values)
        upstream = upstream_nH.to(self._dtype)
        d_hidden = torch.cat([upstream * second * first_slope, upstream * first * second_slope], dim=1)
        return (first * second).to(hidden_nP.dtype), d_hidden.to(hidden_nP.dtype)


def _between(activation: Activation, gated: bool, most_rows: int, like: Tensor) -> _Between | _ClampedBetween:
    if isinstance(activation, SwiGLUOAI):
        return _ClampedBetween(activation, like)
    kernels = _kernels(activation)
    assert kernels is not None, activation
    return _Between(kernels, gated, most_rows, like)


def _zero_unused(counts: Sequence[int], *gradients: Tensor | None) -> None:
    """Set the gradients of experts without rows to zero."""
    for expert, count in enumerate(counts):
        for gradient in gradients:
            if not count and gradient is not None:
                gradient[expert].zero_()


def _unbound(biases: Tensor | None, num_experts: int) -> Sequence[Tensor | None]:
    return [None] * num_experts if biases is None else biases.unbind(0)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


class _ExpertFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_MD: Tensor,
        w_in: Tensor,
        b_in: Tensor | None,
        w_out: Tensor,
        b_out: Tensor | None,
        counts: Sequence[int],
        activation: Activation,
        gated: bool,
    ) -> Tensor:
        num_rows = rows_MD.shape[0]
        out_MD = memory.empty((num_rows, w_out.shape[1]), rows_MD)
        hidden_MP = memory.empty((num_rows, w_in.shape[1]), rows_MD)
        w_ins = w_in.unbind(0)
        w_outs = w_out.unbind(0)
        b_ins = _unbound(b_in, len(w_ins))
        b_outs = _unbound(b_out, len(w_outs))
        middle = _between(activation, gated, max(counts, default=0), hidden_MP)
        for expert, rows in segments(counts):
            hidden = _linear(rows_MD[rows], w_ins[expert], b_ins[expert], out=hidden_MP[rows])
            _linear(middle.forward(hidden), w_outs[expert], b_outs[expert], out=out_MD[rows])
        ctx.save_for_backward(rows_MD, w_in, b_in, w_out, b_out, hidden_MP)
        ctx.is_deferrable = True
        ctx.counts = counts
        ctx.activation = activation
        ctx.gated = gated
        return out_MD

    @staticmethod
    @deferrable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, w_in, b_in, w_out, b_out, hidden_MP = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradients will be differentiated again
            plain = functools.partial(
                reference.expert_ffn, counts=ctx.counts, activation=ctx.activation, gated=ctx.gated
            )
            inputs = (rows_MD, w_in, b_in, w_out, b_out)
            return *reference.gradients(plain, inputs, ctx.needs_input_grad[:5], grad_MD), None, None, None
        needs_rows, needs_w_in, needs_b_in, needs_w_out, needs_b_out, *_ = ctx.needs_input_grad
        grad_MD = grad_MD.contiguous()
        d_rows = memory.empty(tuple(rows_MD.shape), rows_MD) if needs_rows else None
        most_rows = max(ctx.counts, default=0)
        d_active = memory.empty((most_rows, w_out.shape[2]), rows_MD)
        middle = _between(ctx.activation, ctx.gated, most_rows, hidden_MP)
        d_w_in = memory.empty_gradient(w_in) if needs_w_in else None
        d_w_out = memory.empty_gradient(w_out) if needs_w_out else None
        d_b_in = w_in.new_empty(w_in.shape[:2]) if needs_b_in else None
        d_b_out = w_out.new_empty(w_out.shape[:2]) if needs_b_out else None
        _zero_unused(ctx.counts, d_w_in, d_w_out, d_b_in, d_b_out)
        w_ins = w_in.unbind(0)
        w_outs = w_out.unbind(0)
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
