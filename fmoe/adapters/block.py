"""A feed-forward block as an adapter describes it, and the pieces it is made of.

Shape letters: D model width, H hidden width.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe.errors import UserError
from fmoe.experts.ffn import ACTIVATIONS, Activation


class LinearMap(NamedTuple):
    """``weight @ x + bias``: weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None


def linear_map(module: nn.Module | None) -> LinearMap | None:
    """The map of an `nn.Linear`, or of the ``Conv1D`` of Hugging Face's GPT-2 (a linear map stored transposed).

    None for all else: quantised weights, and modules that do more than their weight says (LoRA, parametrisations).
    """
    if module is None or next(module.children(), None) is not None:
        return None
    if isinstance(module, nn.Linear):
        weight = module.weight
    elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        weight = module.weight.t()
    else:
        return None
    return LinearMap(weight, module.bias) if weight.is_floating_point() else None


@dataclass(frozen=True, eq=False)
class Block:
    """``W_out drop(act(W_in x + b_in)) + b_out``; gated: ``W_out drop(act(W_gate x) * W_value x)``.

    Attributes:
        maps_in: one map D -> H, or two: gate and value of a gated block.
        map_out: H -> D.
        activation: between the maps; has no parameters and treats every row by itself.
        module: the module that holds the block, whose mode (training or not) the MoE layer takes over.
        install: puts the MoE layer into the model and takes the dense maps out; None puts it in the place of `module`,
            wherever the model has that.
        dropout: probability of the dropout between activation and output map.
        after: modules that `module` applies to the block's output, to be kept where the layer replaces it.
        sequence_first: the block's input is [S, B, D] and not [B, S, D].
        place: where in `module` the block lies, for messages.

    Raises:
        UserError: the maps do not fit together.
    """

    maps_in: tuple[LinearMap, ...]
    map_out: LinearMap
    activation: Activation
    module: nn.Module
    install: Callable[[nn.Module], None] | None = None
    dropout: float = 0.0
    after: tuple[nn.Module, ...] = ()
    sequence_first: bool = False
    place: str = ""

    def __post_init__(self):
        if len(self.maps_in) not in (1, 2):
            raise UserError(f"a feed-forward block has 1 or 2 input maps, not {len(self.maps_in)}")
        shape_in, shape_out = tuple(self.maps_in[0].weight.shape), tuple(self.map_out.weight.shape)
        if shape_in[::-1] != shape_out or any(tuple(m.weight.shape) != shape_in for m in self.maps_in):
            shapes = ", ".join(str(tuple(m.weight.shape)) for m in (*self.maps_in, self.map_out))
            raise UserError(f"the maps of a feed-forward block have shapes {shapes}: not D -> H -> D")

    @property
    def d_model(self) -> int:
        return self.map_out.weight.shape[0]

    @property
    def d_hidden(self) -> int:
        return self.map_out.weight.shape[1]

    @property
    def is_gated(self) -> bool:
        return len(self.maps_in) == 2

    @property
    def has_bias(self) -> bool:
        return any(m.bias is not None for m in (*self.maps_in, self.map_out))

    @property
    def tensors(self) -> list[Tensor]:
        """Weights and biases."""
        return [t for m in (*self.maps_in, self.map_out) for t in m if t is not None]

    def __call__(self, x: Tensor) -> Tensor:
        """What the block computes in evaluation."""
        hidden, *value = (F.linear(x, *m) for m in self.maps_in)
        hidden = self.activation(hidden)
        return F.linear(hidden * value[0] if value else hidden, *self.map_out)


# Around zero, where activations differ, and far off, where some are clipped.
_GRID = [i / 20 for i in range(-240, 241)] + [-1e4, -100.0, -30.0, 30.0, 100.0, 1e4]


def known_activation(activation: Activation) -> str | Activation:
    """The name that `fmoe.experts` has for an activation, told by its values; the activation itself if it has none.

    Hugging Face has a class for each spelling of GELU; under a name the experts can use a fused one.
    """
    grid = torch.tensor(_GRID, dtype=torch.float32, device="cpu")  # whatever the default dtype and device are
    try:
        values = activation(grid.clone())
    except Exception:  # an activation of images, say: it is then used as it is
        return activation
    for name, function in ACTIVATIONS.items():
        expected = function(grid)
        if values.shape == expected.shape and torch.allclose(values, expected, rtol=1e-6, atol=1e-6):
            return name
    if getattr(activation, "inplace", False):  # autograd forbids it on the halves of a gated block
        activation = copy.copy(activation)
        activation.inplace = False
    return activation


@torch.no_grad()
def is_rowwise(activation: Activation, width: int) -> bool:
    """Whether the function keeps shapes and treats every row by itself, as a row must not depend on its neighbours in
    an expert."""
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0), device="cpu")
    try:
        whole, rows = activation(x.clone()), [activation(row.clone()) for row in x.view(6, 1, width)]
    except Exception:
        return False
    return whole.shape == x.shape and torch.allclose(whole.view(6, 1, width), torch.stack(rows), atol=1e-6)


@torch.no_grad()
def is_elementwise(activation: Activation) -> bool:
    """Whether the function treats every value by itself, so that the hidden units can be split."""
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), device="cpu")
    halves = torch.cat([activation(half.clone()) for half in x.chunk(2, dim=-1)], dim=-1)
    return torch.allclose(activation(x.clone()), halves, atol=1e-6)


def is_plain(module: nn.Module) -> bool:
    """Whether the module has nothing to learn or to save, as activations and dropouts have not."""
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None
