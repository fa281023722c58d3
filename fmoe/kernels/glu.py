"""Gated linear units: the activation between the two linear maps of a gated expert.

Shape letters: n rows, H hidden width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


class SwiGLUOAI:
    """Activation of gated experts in GPT-OSS (arXiv 2508.10925): ``g sigmoid(1.702 g) (v + 1)``.

    The gate g is clamped to at most 7, and the value v to [-7, 7]. At these bounds, derivatives are those inside.
    Calling the instance returns the first factor, ``g sigmoid(1.702 g)``, for given gates. `second` returns the second
    factor, ``v + 1``, for given values.
    """

    alpha = 1.702
    limit = 7.0

    def __call__(self, gates: Tensor) -> Tensor:
        # Not torch.clamp, whose derivative at the bound is 1 before torch 2.14, and 0 since.
        gates = torch.where(gates > self.limit, self.limit, gates)
        return gates * (self.alpha * gates).sigmoid()

    def second(self, values: Tensor) -> Tensor:
        """Return the factor ``v + 1``, with values v clamped to [-7, 7]."""
        values = torch.where(values > self.limit, self.limit, values)
        return torch.where(values < -self.limit, -self.limit, values) + 1

    def slopes(self, gates: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives of the factors ``g sigmoid(1.702 g)`` and ``v + 1``, zero where g or v is clamped."""
        clamped = gates.clamp(max=self.limit)
        sigmoid = (self.alpha * clamped).sigmoid()
        slope = sigmoid * (1 + self.alpha * clamped * (1 - sigmoid))
        return slope * (gates <= self.limit), (values.abs() <= self.limit).to(values.dtype)

    def __eq__(self, other: object) -> bool:
        return type(other) is SwiGLUOAI

    def __hash__(self) -> int:
        return hash(SwiGLUOAI)

    def __repr__(self) -> str:
        return "swiglu_oai"


def gate(activation: Activation, hidden_nP: Tensor) -> Tensor:
    """Return ``activation(first half) * second half`` (GLU variants, arXiv 2002.05202): [n, 2 H] -> [n, H].

    `SwiGLUOAI` also transforms the second half.
    """
    gates, values = hidden_nP.unsafe_chunk(2, dim=-1)  # views that an activation may change in place
    if isinstance(activation, SwiGLUOAI) and torch.finfo(hidden_nP.dtype).bits == 16:  # rounded once, as in kernels
        return (activation(gates.float()) * activation.second(values.float())).to(hidden_nP.dtype)
    return activation(gates) * (activation.second(values) if isinstance(activation, SwiGLUOAI) else values)
