"""The problem that every contender gets: sizes, the same weights and batch, and optionally the same choices.

Shape letters: T tokens, D width, H hidden width, E experts, K experts per token, P height of the first matrix.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe import random
from fmoe.errors import UserError
from fmoe.experts import initial


@dataclass(frozen=True)
class Shape:
    """A layer and its batch."""

    name: str
    tokens: int
    d_model: int
    d_hidden: int
    num_experts: int
    top_k: int
    gated: bool = False

    @property
    def rows(self) -> int:
        """Number of assignments, T * K."""
        return self.tokens * self.top_k

    @property
    def height(self) -> int:
        """Height of the first weight matrix: H, or 2 H if the layer is gated."""
        return self.d_hidden * (1 + self.gated)

    def act(self, hidden: Tensor) -> Tensor:
        """GELU, or SwiGLU if the layer is gated."""
        if not self.gated:
            return F.gelu(hidden)
        gate, value = hidden.chunk(2, dim=-1)
        return F.silu(gate) * value

    def __str__(self) -> str:
        kind = "SwiGLU" if self.gated else "GELU"
        return f"{self.name} T{self.tokens} D{self.d_model} H{self.d_hidden} E{self.num_experts} K{self.top_k} {kind}"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("A", 2048, 512, 1024, 64, 2),
        Shape("B", 4096, 256, 1024, 8, 2),
        Shape("C", 2048, 1024, 4096, 8, 1),
        Shape("D", 4096, 512, 512, 128, 8, gated=True),
        Shape("S", 4096, 256, 512, 32, 2),  # of sweeps: small enough for 65,536 tokens and 256 experts
        # For GPUs: coarse experts, fine ones, very fine ones.
        Shape("G1", 4096, 1024, 4096, 64, 2),
        Shape("G2", 32768, 4096, 1024, 128, 8, gated=True),
        Shape("G3", 24576, 1536, 256, 128, 8, gated=True),
        # Of published models: Mixtral 8x7B, Qwen3-30B-A3B, and a Switch Transformer.
        Shape("mixtral", 8192, 4096, 14336, 8, 2, gated=True),
        Shape("qwen3", 16384, 2048, 768, 128, 8, gated=True),
        Shape("switch", 8192, 1024, 4096, 64, 1),
        # The defaults of FastMoE's benchmark of its layer, and half of each size except the number of experts.
        Shape("fastmoe", 4096, 1024, 4096, 64, 2),
        Shape("fastmoe-half", 2048, 512, 2048, 64, 2),
        Shape("tiny", 64, 32, 48, 4, 2),  # to rehearse
    )
}


@dataclass(frozen=True, eq=False)
class Problem:
    """A shape in a precision, its weights and its batch, drawn from a seed.

    Args:
        skew: None leaves the choice to the routers. Otherwise the choices are given: the hottest expert gets ``skew``
            times its even share of the assignments, the others the rest in equal parts.
        device: device of weights and batch; their values are the same on every device.
    """

    shape: Shape
    dtype: torch.dtype
    skew: float | None = None
    seed: int = 0
    device: str = "cpu"

    @functools.cached_property
    def router_ED(self) -> Tensor:
        return self._draw(1, self.shape.num_experts, self.shape.d_model)

    @functools.cached_property
    def w_in_EPD(self) -> Tensor:
        return self._draw(2, self.shape.num_experts, self.shape.height, self.shape.d_model)

    @functools.cached_property
    def w_out_EDH(self) -> Tensor:
        return self._draw(3, self.shape.num_experts, self.shape.d_model, self.shape.d_hidden)

    @functools.cached_property
    def x_TD(self) -> Tensor:
        drawn = torch.randn(self.shape.tokens, self.shape.d_model, generator=self._generator(4))
        return drawn.to(self.device, self.dtype)

    @functools.cached_property
    def grad_TD(self) -> Tensor:
        grad = torch.randn(self.shape.tokens, self.shape.d_model, generator=self._generator(5)) * 0.01
        return grad.to(self.device, self.dtype)

    @functools.cached_property
    def expert_TK(self) -> Tensor | None:
        """The given choices, int64; None if the routers choose."""
        if self.skew is None:
            return None
        return forced_choices(self.shape, self.skew, self._generator(6)).to(self.device)

    def _draw(self, stream: int, *sizes: int) -> Tensor:
        """Draw matrices of variance 1 / fan in, one by one, on the device, with the same bits on every device."""
        out = torch.empty(sizes, dtype=self.dtype, device=self.device)
        for number, matrix in enumerate(out if len(sizes) == 3 else out.unsqueeze(0)):
            keys = [random.key("bench", self.seed, stream, number)]
            drawn = initial.draw(keys, matrix.numel(), out.device, sizes[-1] ** -0.5, is_normal=True)
            matrix.copy_(drawn.view_as(matrix))
        return out

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(8 * self.seed + stream)


def skewed_counts(shape: Shape, skew: float) -> list[int]:
    """Return the number of assignments of each expert, T * K in total: ``skew`` even shares for the first, the rest in
    equal parts for the others.

    Raises:
        UserError: ``skew`` is below 1, or gives the first expert more than one assignment per token.
    """
    hottest = round(skew * shape.rows / shape.num_experts)
    if skew < 1 or hottest > shape.tokens:
        limit = shape.num_experts / shape.top_k
        raise UserError(f"skew={skew:g} must be from 1 to num_experts / top_k = {limit:g} (shape {shape})")
    if shape.num_experts == 1:
        return [shape.rows]
    return [hottest, *even_counts(shape.rows - hottest, shape.num_experts - 1)]


def even_counts(rows: int, num_experts: int) -> list[int]:
    """Return the number of rows of each expert, as even as integers allow."""
    each, rest = divmod(rows, num_experts)
    return [each + (e < rest) for e in range(num_experts)]


def forced_choices(shape: Shape, skew: float, generator: torch.Generator) -> Tensor:
    """Return ``expert_TK`` with the loads of `skewed_counts`, different experts for each token, and tokens in random
    order.
    """
    counts = torch.tensor(skewed_counts(shape, skew))
    expert_N = torch.arange(shape.num_experts).repeat_interleave(counts)
    # A token's choices lie T apart in this list, and an expert's at most T - 1: a token's choices differ.
    expert_TK = expert_N.view(shape.top_k, shape.tokens).t()
    return expert_TK[torch.randperm(shape.tokens, generator=generator)].contiguous()
