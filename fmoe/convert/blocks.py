"""`Block`: a dense feed-forward block as a finder describes it, and checks of linear maps and activations.

Shape letters: D model width, H hidden width.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe.errors import UserError
from fmoe.experts.ffn import ACTIVATIONS
from fmoe.kernels.glu import Activation


class LinearMap(NamedTuple):
    """``weight @ x + bias``: weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None


def linear_map(module: Any) -> LinearMap | None:
    """Return weight [out, in] and bias of an `nn.Linear`, or of the ``Conv1D`` of Hugging Face's GPT-2.

    The result is None for any other module; `obstacle` returns the reason.
    """
    if module is None or obstacle(module) is not None:
        return None
    return LinearMap(module.weight.t() if _is_conv1d(module) else module.weight, module.bias)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def addition(module: nn.Module) -> str | None:
    """Return a phrase, "has ...", if the module has hooks or a replaced ``forward``; else None.

    A converted model would lose these.
    """
    if any(getattr(module, name, None) for name in _HOOKS):
        return "has hooks"
    if "forward" in vars(module):
        return "has a forward that replaces its class's"
    return None


def obstacle(module: nn.Module) -> str | None:
    """Return a phrase that explains why the module is not just the linear map of its weight and bias; None if it is."""
    kind = type(module)
    if not _is_conv1d(module) and not isinstance(module, nn.Linear):
        return f"is a {kind.__name__}, not an nn.Linear"
    if any(value is not None and nn.parameter.is_lazy(value) for value in module._parameters.values()):
        return "has no weight yet: run the model once to initialize it"
    if (added := addition(module)) is not None:
        return added
    held = module._parameters
    if next(module.children(), None) is not None or not held.keys() <= {"weight", "bias"} or module._buffers:
        return f"is a {kind.__name__} with more than a weight and a bias"
    for name in ("weight", "bias"):
        value = getattr(module, name, None)
        if value is not held.get(name) or (value is None and name == "weight"):
            return f"computes its {name} (spectral or weight norm, pruning, a parametrization)"
        if value is None:
            continue
        if hasattr(value, "placements"):
            return f"has a sharded {name} (DTensor): call fmoefy before sharding"
        if type(value) is not nn.Parameter or value.layout is not torch.strided or not value.is_floating_point():
            return f"has a {name} of {type(value).__name__} {value.dtype}: experts need plain floating-point weights"
        if torch.finfo(value.dtype).bits < 16:
            return f"has a {name} of {value.dtype}: experts need 16 bits or more"
        if value._backward_hooks or value._post_accumulate_grad_hooks:
            return f"has hooks on its {name}"
    if type(module).forward is not nn.Linear.forward and not _is_conv1d(module) and not _computes_linear_map(module):
        return f"is a {type(module).__name__}, whose output is not that of its weight and bias"
    return None


def _computes_linear_map(module: Any) -> bool:
    """Return whether a small float64 copy of the module computes x W^T + b, in training and in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    height, width = min(module.out_features, 24), min(module.in_features, 16)
    tensors = {}
    for name, p in module._parameters.items():
        if p is not None:
            tensors[name] = nn.Parameter(
                torch.randn((height, width)[: p.ndim], generator=generator, dtype=torch.float64, device="cpu")
            )
    try:
        copied = copy.deepcopy(module, {id(module._parameters[name]): tensor for name, tensor in tensors.items()})
        copied.in_features, copied.out_features = width, height
        rows = torch.randn(64, width, generator=generator, dtype=torch.float64, device="cpu")
        scales = torch.exp2(torch.arange(-24.0, 40.0, dtype=torch.float64, device="cpu"))
        rows = (rows * scales.unsqueeze(1)).requires_grad_()
        leaves = [rows, *tensors.values()]
        expected = F.linear(rows, tensors["weight"], tensors.get("bias"))
        slopes = torch.autograd.grad(expected.sum(), leaves)
        for training in (False, True):
            actual = copied.train(training)(rows)
            pairs = zip((actual, *torch.autograd.grad(actual.sum(), leaves)), (expected, *slopes), strict=True)
            for a, e in pairs:
                if a.shape != e.shape or not ((a - e).norm(dim=-1) <= 1e-9 * e.norm(dim=-1)).all():
                    return False
    except Exception:  # the module cannot be copied, or is not a function of rows
        return False
    return True


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


@dataclass(frozen=True, eq=False)
class Block:
    """A feed-forward block: ``W_out drop(act(W_in x + b_in)) + b_out``, where ``drop`` is dropout in training.

    A gated block is ``W_out drop(act(W_gate x) * W_value x)``, with optional biases.

    Attributes:
        maps_in: one map D -> H, or two: gate and value of a gated block.
        map_out: the map H -> D.
        activation: function between the maps; it has no parameters and maps each row independently.
        module: the module that holds the block. The MoE layer inherits its mode (training or evaluation).
        install: function that puts the MoE layer, its argument, into the model and removes the dense maps. None
            replaces `module` in each of its parents.
        dropout: probability of the dropout between activation and output map.
        after: modules that `module` applies to the block's output. With ``install=None``, they follow the MoE layer;
            an ``install`` function has to keep them itself.
        sequence_first: whether the block's input is [S, B, D] instead of [B, S, D].
        place: name of the block within `module`, for messages.

    Raises:
        UserError: a map is None, or the maps do not fit together.
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
        maps_in = self.maps_in
        if len(maps_in) not in (1, 2):
            raise UserError(f"maps_in has {len(maps_in)} maps; a feed-forward block has 1, or 2 if it is gated")
        if None in (*maps_in, self.map_out):
            maps = {"map_out": self.map_out} | {f"maps_in[{n}]": found for n, found in enumerate(maps_in)}
            none = ", ".join(f"{name}=None" for name, found in sorted(maps.items()) if found is None)
            raise UserError(
                f"{none}: a feed-forward block needs all its maps; if linear_map(layer) returned None, "
                "fmoe.convert.blocks.obstacle(layer) says why"
            )
        shape_in, shape_out = tuple(maps_in[0].weight.shape), tuple(self.map_out.weight.shape)
        if shape_in[::-1] != shape_out or any(tuple(m.weight.shape) != shape_in for m in maps_in):
            shapes = ", ".join(str(tuple(m.weight.shape)) for m in (*maps_in, self.map_out))
            raise UserError(f"the maps of a feed-forward block have shapes {shapes}; they must map D -> H -> D")

    @property
    def d_model(self) -> int:
        """Width of the input and of the output."""
        return self.map_out.weight.shape[0]

    @property
    def d_hidden(self) -> int:
        """Number of hidden units."""
        return self.map_out.weight.shape[1]

    @property
    def is_gated(self) -> bool:
        """True if the block has two input maps, gate and value."""
        return len(self.maps_in) == 2

    @property
    def has_bias(self) -> bool:
        """True if any map has a bias."""
        return any(m.bias is not None for m in (*self.maps_in, self.map_out))

    @property
    def tensors(self) -> list[Tensor]:
        """Weights and biases of all maps."""
        return [t for m in (*self.maps_in, self.map_out) for t in m if t is not None]

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the block in evaluation mode, on [..., D]."""
        hidden, *value = (F.linear(x, *m) for m in self.maps_in)
        hidden = self.activation(hidden)
        return F.linear(hidden * value[0] if value else hidden, *self.map_out)


def probe_values(dtype: torch.dtype) -> Tensor:
    """Return the values at which activations are compared, float64 [N] and exact in ``dtype``.

    They are dense around 0, and reach far out in both directions, where some activations clip. Some have the full
    precision of the dtype, which a cast to a narrower dtype would round.
    """
    near = torch.arange(-192, 193, dtype=torch.float64, device="cpu") / 16
    exponents = torch.arange(-20, 40, dtype=torch.float64, device="cpu")
    far = (torch.exp2(exponents).unsqueeze(1) * near.new_tensor([1.0, 1.25, 1.5, 1.75])).flatten()
    full = 4 * torch.randn(128, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    values = torch.cat([near, far, -far, full.to(dtype).double()])
    return values[values.abs() <= torch.finfo(dtype).max]


def agree(actual: Tensor, expected: Tensor, size: Tensor | float, dtype: torch.dtype) -> bool:
    """Return whether each value of ``actual`` differs from ``expected`` by no more than rounding.

    Args:
        size: magnitude of the intermediate values. Where they cancel, as in GELU far below zero, their rounding errors
            remain.
        dtype: dtype of the model. A 16-bit dtype has the tolerance of float32, in which activations are evaluated. If
            ``actual`` itself has 16 bits, its dtype sets the tolerance.
    """
    if actual.shape != expected.shape:
        return False
    rounding = 64 * torch.finfo(dtype).eps if dtype == torch.float64 else 4 * torch.finfo(torch.float32).eps
    expected = expected.to(actual)
    limit = max(rounding, torch.finfo(actual.dtype).eps) * expected.abs().double() + rounding * size
    error = (actual.double() - expected.double()).abs()
    return bool(((error <= limit) | (actual == expected) | (actual.isnan() & expected.isnan())).all())


def same_function(actual: Activation, expected: Activation, dtype: torch.dtype) -> bool:
    """Return whether two functions have the same values and derivatives over the range of ``dtype``."""
    grid = probe_values(dtype)
    results = []
    for function in (actual, expected):
        x = grid.clone().requires_grad_()
        with torch.enable_grad():
            y = function(x.clone())  # a copy, which the function may overwrite
            if y.shape != x.shape or not y.requires_grad:
                return False
            # Large gradients, which a custom backward pass may clip.
            (slope,) = torch.autograd.grad(y, x, torch.full_like(y, 1024.0))
            slope = slope / 1024
        results.append((y.detach(), slope.masked_fill(grid == 0, 0)))  # relu's slope at 0 is a convention
    (y, slope), (expected_y, expected_slope) = results
    return agree(y, expected_y, grid.abs().clamp(max=16), dtype) and agree(slope, expected_slope, 16, dtype)


def known_activation(activation: Activation, dtype: torch.dtype = torch.float32) -> str | Activation:
    """Recognize an activation by its values and derivatives, and return its name in `fmoe.experts.ffn.ACTIVATIONS`.

    If no name fits, return the activation itself. If it changes its input in place, return a copy that does not.
    """
    for name, function in ACTIVATIONS.items():
        try:
            if same_function(activation, function, dtype):
                return name
        except Exception:  # for example an activation of images, which is used unchanged
            break
    if getattr(activation, "inplace", False):  # autograd forbids in-place changes of a gated block's halves
        copied: Any = copy.copy(activation)
        copied.inplace = False
        return copied
    return activation


def _rows(count: int, width: int) -> Tensor:
    values = probe_values(torch.float16)
    generator = torch.Generator().manual_seed(0)
    order = torch.randint(len(values), (count, width), generator=generator, dtype=torch.int64, device="cpu")
    return values[order]


@torch.no_grad()
def is_rowwise(activation: Activation, width: int) -> bool:
    """Return whether the function keeps shapes and maps each row independently.

    In an expert, the neighbors of a row depend on the routing. An activation must therefore not mix rows.
    """
    x = _rows(6, width).view(2, 3, width)
    try:
        whole, rows = activation(x.clone()), torch.stack([activation(row.clone()) for row in x.view(6, 1, width)])
    except Exception:
        return False
    return whole.shape == x.shape and torch.allclose(whole.view(6, 1, width), rows, atol=1e-9, equal_nan=True)


@torch.no_grad()
def is_elementwise(activation: Activation) -> bool:
    """Return whether the function maps each value independently, so that the hidden units can be split."""
    x = _rows(64, 8)
    try:
        single = torch.cat([activation(column.clone()) for column in x.split(1, dim=-1)], dim=-1)
    except Exception:  # for example a function of pairs
        return False
    return torch.allclose(activation(x.clone()), single, atol=1e-9, equal_nan=True)


def is_plain(module: nn.Module) -> bool:
    """Return whether the module has neither parameters nor buffers, like activations and dropouts."""
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None
