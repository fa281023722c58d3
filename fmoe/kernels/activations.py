"""What lies between the two linear maps of an expert, for the rows of one expert at a time, into memory of the caller.

Known are the activations that the field uses: pure functions of each number, whose derivative is one kernel. Any other
function may be random or have parameters, which only autograd's own graph of its one call has right.

Shape letters: n rows, H hidden width, P height of the first map (H, twice that where it is gated).
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fmoe.kernels import memory

_aten = torch.ops.aten


class Between(Protocol):
    def forward(self, hidden_nP: Tensor) -> Tensor:
        """[n, H], valid until the next call."""

    def backward(self, hidden_nP: Tensor, upstream_nH: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` returns and the gradient of ``hidden_nP``, both valid until the next call."""


def between(activation: Callable[[Tensor], Tensor], gated: bool, most_rows: int, like: Tensor) -> Between:
    """``activation(hidden)``, gated ``activation(first half) * second half``, for up to ``most_rows`` rows of the
    width, dtype and device of ``like``, [*, P]. The activation is a known one."""
    return (_Gated if gated else _Plain)(*_kernels(activation), most_rows, like)


def is_known(activation: Callable[[Tensor], Tensor]) -> bool:
    """Return whether the backward pass can compute the activation again, by kernels."""
    return _kernels(activation) is not None


def gate(activation: Callable[[Tensor], Tensor], hidden_nP: Tensor) -> Tensor:
    """GLU variants, arXiv 2002.05202: [n, 2 H] -> [n, H]."""
    gates, values = hidden_nP.unsafe_chunk(2, dim=-1)  # which an activation may change in place
    return activation(gates) * values


def _kernels(activation: Callable) -> tuple[Callable, Callable] | None:
    """forward(x, out=) and backward(upstream, x, grad_input=) of a known activation."""
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


class _Plain:
    def __init__(self, forward: Callable, backward: Callable, most_rows: int, like: Tensor):
        self._forward, self._backward, self._most_rows, self._like = forward, backward, most_rows, like
        self._active = self._buffer(like.shape[1])
        self._d_hidden: Tensor | None = None  # made by the first `backward`

    def _buffer(self, width: int) -> Tensor:
        return memory.empty((self._most_rows, width), self._like)

    def forward(self, hidden_nP: Tensor) -> Tensor:
        return self._forward(hidden_nP, out=self._active[: hidden_nP.shape[0]])

    def backward(self, hidden_nP: Tensor, upstream_nH: Tensor) -> tuple[Tensor, Tensor]:
        if self._d_hidden is None:
            self._d_hidden = self._buffer(hidden_nP.shape[1])
        d_hidden = self._d_hidden[: hidden_nP.shape[0]]
        return self.forward(hidden_nP), self._backward(upstream_nH, hidden_nP, grad_input=d_hidden)


class _Gated(_Plain):
    def __init__(self, forward: Callable, backward: Callable, most_rows: int, like: Tensor):
        super().__init__(forward, backward, most_rows, like[:, : like.shape[1] // 2])
        self._d_active: Tensor | None = None

    def forward(self, hidden_nP: Tensor) -> Tensor:
        gates, values = hidden_nP.chunk(2, dim=1)
        return super().forward(gates).mul_(values)

    def backward(self, hidden_nP: Tensor, upstream_nH: Tensor) -> tuple[Tensor, Tensor]:
        if self._d_hidden is None:
            self._d_hidden = self._buffer(hidden_nP.shape[1])
            self._d_active = self._buffer(upstream_nH.shape[1])
        num_rows = hidden_nP.shape[0]
        gates, values = hidden_nP.chunk(2, dim=1)
        d_hidden = self._d_hidden[:num_rows]
        d_gates, d_values = d_hidden.chunk(2, dim=1)
        active = super().forward(gates)
        torch.mul(upstream_nH, active, out=d_values)
        upstream = torch.mul(upstream_nH, values, out=self._d_active[:num_rows])
        self._backward(upstream, gates, grad_input=d_gates)
        return active.mul_(values), d_hidden
