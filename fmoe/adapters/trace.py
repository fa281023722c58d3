"""Reading a feed-forward block by running it.

Children of a module tell what it is made of, not in which order it calls them, nor what else it does. So the module is
run once on random rows, its children's calls are recorded, and the block is believed if the recorded values are those
of the formula. Nothing depends on class or attribute names.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fmoe.adapters.block import LinearMap, is_plain, is_rowwise, linear_map
from fmoe.experts.ffn import ACTIVATIONS, Activation


class Call(NamedTuple):
    """A child's call. ``value`` is a copy of the output, which an activation may overwrite."""

    module: nn.Module
    input: Tensor
    output: Tensor
    value: Tensor


class Pieces(NamedTuple):
    """What a module was seen to do; the names are those of `fmoe.adapters.Block`."""

    maps_in: tuple[LinearMap, ...]
    map_out: LinearMap
    activation: Activation
    dropout: float
    after: tuple[nn.Module, ...]


def read_block(owner: nn.Module, function: Callable[[Tensor], Tensor]) -> Pieces | None:
    """The feed-forward block that ``function`` computes with direct children of ``owner``; None if it is none."""
    maps = [m for child in owner.children() if (m := linear_map(child)) is not None]
    for width in dict.fromkeys(m.weight.shape[1] for m in maps):
        traced = run(owner, function, width, maps[0].weight)
        if traced is not None and (pieces := _match(owner, *traced)) is not None:
            return pieces
    return None


def run(
    owner: nn.Module, function: Callable[[Tensor], Tensor], width: int, like: Tensor
) -> tuple[Tensor, Tensor, list[Call]] | None:
    """Calls ``function`` on rows [1, 3, width]: rows, output, and the calls of direct children of ``owner`` in order.

    Modules run in training mode, but for `nn.Dropout`: other randomness then shows as a mismatch and is not lost
    silently. None if ``function`` wants something else.
    """
    rows = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0), device="cpu")
    rows = rows.to(device=like.device, dtype=like.dtype)
    calls: list[Call] = []

    def record(module, args, output):
        if args and torch.is_tensor(args[0]) and torch.is_tensor(output):
            calls.append(Call(module, args[0], output, output.clone()))

    handles = [child.register_forward_hook(record) for child in owner.children()]
    devices = [like.device] if like.is_cuda else []
    try:
        with _dropout_off(owner), torch.no_grad(), torch.random.fork_rng(devices):
            output = function(rows.clone())
    except Exception:  # it takes other arguments: it is no feed-forward block
        return None
    finally:
        for handle in handles:
            handle.remove()
    return (rows, output, calls) if torch.is_tensor(output) else None


@contextmanager
def _dropout_off(owner: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in owner.modules()}
    for module in modes:
        module.training = not isinstance(module, nn.Dropout)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def difference(actual: Tensor, expected: Tensor) -> float:
    """Relative, norm-wise; infinite for other shapes, 0 on the meta device, where there are no values."""
    if actual.shape != expected.shape:
        return float("inf")
    if actual.is_meta:
        return 0.0
    scale = expected.double().norm().clamp(min=1e-30)
    return ((actual.double() - expected.double()).norm() / scale).item()


def limit(like: Tensor) -> float:
    """Largest `difference` that rounding explains."""
    return 4 * torch.finfo(like.dtype).eps


def find_activation(
    owner: nn.Module, calls: list[Call], hidden: list[list[Tensor]], target: Tensor
) -> tuple[Activation, int] | None:
    """The activation with ``act(gate) [* value] == target``, and which of the candidates ``hidden`` has it.

    Args:
        calls: of children between the linear maps.
        hidden: ``[hidden]``, or orders of ``[gate, value]``.
    """
    functions = [c.module for c in calls if is_plain(c.module) and not isinstance(c.module, nn.Dropout | nn.Identity)]
    functions += [f for f in vars(owner).values() if callable(f) and not isinstance(f, type)]
    if not target.is_meta:  # called as a function: F.gelu(self.fc1(x))
        functions += ACTIVATIONS.values()
    best, found = limit(target), None
    for order, (gate, *value) in enumerate(hidden):
        for function in functions:
            try:
                with torch.no_grad():
                    result = function(gate.clone())
                    error = difference(result * value[0] if value else result, target)
            except Exception:  # not a function of one tensor
                continue
            if error <= best and (found is None or error < best):
                best, found = error, (function, order)
    return found if found is not None and is_rowwise(found[0], target.shape[-1]) else None


def _match(owner: nn.Module, rows: Tensor, output: Tensor, calls: list[Call]) -> Pieces | None:
    linear = [i for i, call in enumerate(calls) if linear_map(call.module) is not None]
    if len(linear) not in (2, 3) or len({calls[i].module for i in linear}) != len(linear):
        return None
    *first, last = linear
    maps = [linear_map(calls[i].module) for i in first]
    target = calls[last].input
    if any(difference(calls[i].input, rows) > 0 for i in first) or difference(calls[last].value, output) > 0:
        return None
    between, dropouts = calls[first[0] + 1 : last], [i for i, c in enumerate(calls) if isinstance(c.module, nn.Dropout)]
    inner = [calls[i].module.p for i in dropouts if first[0] < i < last]
    if len(inner) > 1 or any(i < first[0] for i in dropouts):
        return None
    if len(first) == 1 and calls[first[0]].value.shape[-1] == 2 * target.shape[-1]:  # gate and value in one map
        maps = [LinearMap(w, b) for w, b in zip(maps[0].weight.chunk(2), _halves(maps[0].bias), strict=True)]
        hidden = list(calls[first[0]].value.chunk(2, dim=-1))
        gated_first = True
    else:
        hidden = [calls[i].value for i in first]
        gated_first = len(first) == 1 or any(c.input is calls[first[0]].output for c in between)
    orders = [[0, 1], [1, 0]] if gated_first else [[1, 0], [0, 1]]
    if len(hidden) == 1:
        orders = [[0]]
    if rows.shape != output.shape or any(value.shape != target.shape for value in hidden):
        return None
    found = find_activation(owner, between, [[hidden[i] for i in order] for order in orders], target)
    if found is None:
        return None
    activation, order = found
    return Pieces(
        maps_in=tuple(maps[i] for i in orders[order]),
        map_out=linear_map(calls[last].module),
        activation=activation,
        dropout=inner[0] if inner else 0.0,
        after=tuple(calls[i].module for i in dropouts if i > last),
    )


def _halves(bias: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, None) if bias is None else bias.chunk(2)
