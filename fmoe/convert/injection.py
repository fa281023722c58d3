"""Trial runs of a module, with known values injected as the outputs of its linear maps."""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fmoe.convert.blocks import agree, probe_values
from fmoe.kernels.glu import Activation


def required(function: Callable) -> list[str]:
    """Return the names of a function's or module's positional parameters without a default."""
    function = function.forward if isinstance(function, nn.Module) else function
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in positional and p.default is p.empty]


class Call(NamedTuple):
    """One recorded call of a module: its input and output."""

    module: nn.Module
    input: Any
    output: Any


class Trial(NamedTuple):
    """A way to run a module: the function to call, its arguments, and stubs that replace some of its children."""

    owner: nn.Module
    function: Callable
    args: tuple
    stubs: dict[nn.Module, Callable]

    def __call__(
        self,
        *,
        training: bool = False,
        grad: bool = False,
        stand_ins: dict[nn.Module, Activation] | None = None,
        rows: Tensor | None = None,
        rates: "Rates | None" = None,
    ) -> tuple[list["Call"], Any]:
        """Run the function; return the calls of inner modules, in order, and the output.

        `nn.Dropout` modules are off, but other randomness is not. The module and its buffers are restored afterwards.

        Args:
            stand_ins: functions that replace the forward of modules.
            rows: tensor that replaces the first argument.
            rates: object that records and disables dropouts called as functions; None leaves these on.
        """
        calls = []

        def record(module: nn.Module, args: tuple, output: Any) -> None:
            calls.append(Call(module, args[0] if args else None, output))

        args = self.args if rows is None else (rows, *self.args[1:])
        device = args[0].device
        with contextlib.ExitStack() as stack:
            stack.enter_context(restored(self.owner))
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.autocast(device.type if device.type != "meta" else "cpu", enabled=False))
            torch.random.default_generator.manual_seed(0)
            if device.type == "cuda":
                torch.cuda.manual_seed(0)
            for module in self.owner.modules():
                module.training = training and type(module).forward is not nn.Dropout.forward
                module._compiled_call_impl = None  # torch.compile would specialize on values that are tried once
                if module is not self.owner:
                    stack.callback(module.register_forward_hook(record).remove)
            for module, forward in {**self.stubs, **(stand_ins or {})}.items():
                module.forward = forward
            with rates or contextlib.nullcontext():
                output = self.function(*(a.clone() if torch.is_tensor(a) else a for a in args))
        return calls, output


@contextmanager
def restored(owner: nn.Module) -> Iterator[None]:
    """Restore attributes, children and buffers of the module and of all modules inside it on exit."""
    tables = []  # attributes of modules, and the tables of children, parameters and buffers in them
    for module in owner.modules():
        attributes = vars(module)
        tables += [attributes, *(attributes[name] for name in ("_modules", "_parameters", "_buffers"))]
    contents = [dict(table) for table in tables]
    buffers = [(b, b.clone()) for b in owner.buffers()]
    try:
        yield
    finally:
        for table, content in zip(tables, contents, strict=True):
            table.clear()
            table.update(content)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


class Rates(TorchFunctionMode):
    """Context manager in which `torch.nn.functional.dropout` only records its rate and returns its input.

    Attributes:
        inside: rates of the dropouts between the linear maps of a block.
        outside: rates of the other dropouts.
        current: the list to which the next rate is added.
    """

    def __init__(self):
        super().__init__()
        self.inside: list[float] = []
        self.outside: list[float] = []
        self.current = self.outside

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.dropout:
            return function(*args, **(kwargs or {}))
        arguments = inspect.signature(F.dropout).bind(*args, **(kwargs or {})).arguments
        rate = arguments.get("p", 0.5)
        if arguments.get("training", True) and rate > 0:
            self.current.append(rate)
        return arguments["input"]


class Injected(NamedTuple):
    """One run of a module whose linear maps return known values (`Injection`).

    Attributes:
        inputs: input of each input map.
        hidden: input of the output map.
        result: value that the output map returned.
        output: output of the module.
    """

    inputs: list[Tensor]
    hidden: Tensor
    result: Tensor
    output: Any


class Injection:
    """Callable that runs a module with known values in place of the outputs of its linear maps.

    Args:
        trial: the module to run, and its arguments.
        first: the input maps.
        last: the output map.
        shapes: output shape of each input map.
        weight: weight of the output map.
        is_fused: whether a single input map computes gate and value.
    """

    def __init__(
        self,
        trial: Trial,
        first: tuple[nn.Module, ...],
        last: nn.Module,
        shapes: list[torch.Size],
        weight: Tensor,
        is_fused: bool,
    ):
        self.trial = trial
        self.first = first
        self.last = last
        self.weight = weight
        self.is_fused = is_fused
        # Injected values are float64, on the device of the weights; on the CPU if the weights are meta tensors.
        self.device = torch.device("cpu") if weight.is_meta else weight.device
        shape = (*shapes[0][:-1], weight.shape[1])
        self.parts = [self._fill(shape, seed) for seed in range(2 if is_fused else len(shapes))]

    def _fill(self, shape: tuple[int, ...], seed: int) -> Tensor:
        grid = probe_values(self.weight.dtype)
        generator = torch.Generator().manual_seed(seed)
        count = math.prod(shape)
        orders = [
            torch.randperm(len(grid), generator=generator, dtype=torch.int64, device="cpu")
            for _ in range(count // len(grid) + 1)
        ]
        return grid[torch.cat(orders)[:count]].view(shape).to(self.device)

    def __call__(self, parts: list[Tensor] | None = None, **options) -> Injected:
        parts = self.parts if parts is None else parts
        rates = options.get("rates")
        inputs: list[Tensor] = []
        hidden: list[Tensor] = []
        result: list[Tensor] = []

        def return_value(x: Tensor, value: Tensor) -> Tensor:
            inputs.append(x.clone())
            if rates is not None:
                rates.current = rates.inside
            return value.clone()  # an activation may overwrite it

        def return_result(h: Tensor) -> Tensor:
            hidden.append(h)
            if rates is not None:
                rates.current = rates.outside
            result.append(self._fill((*h.shape[:-1], self.weight.shape[0]), 2).to(self.weight))
            return result[0].clone()

        stand_ins = {m: partial(return_value, value=v) for m, v in zip(self.first, self.values(parts), strict=True)}
        *_, output = self.trial(stand_ins={**stand_ins, self.last: return_result}, **options)
        return Injected(inputs, hidden[0], result[0], output)

    def values(self, parts: list[Tensor]) -> list[Tensor]:
        return [torch.cat(parts, -1)] if self.is_fused else parts

    def follows(self, activation: Activation, order: list[int], hidden: Tensor) -> bool:
        """Return whether ``hidden`` is ``activation(gate) * value``; without a value, ``activation(gate)``.

        Args:
            order: indices of gate and value in ``self.parts``, the injected values.
            hidden: input of the output map.
        """
        try:
            with torch.no_grad():
                expected = _formula(activation, [self.parts[i] for i in order])
                if hidden.shape != expected.shape:
                    return False
        except Exception:  # not a function of one tensor
            return False
        size = self.parts[order[0]].abs().clamp(max=16)
        size = size * self.parts[order[1]].abs() if len(order) == 2 else size
        return agree(hidden, expected, size, self.weight.dtype)

    def keeps_slope(self, activation: Activation, order: list[int]) -> bool:
        """Return whether the input of the output map has the derivatives of ``activation(gate) * value``.

        Return False if that input depends on a parameter. Without a value, the formula is ``activation(gate)``.

        Args:
            order: indices of gate and value in ``self.parts``, the injected values.
        """
        parts = [part if i == order[0] else torch.ones_like(part) for i, part in enumerate(self.parts)]
        slopes = []
        learned = [p for p in self.trial.owner.parameters() if not p.requires_grad]
        for parameter in learned:
            parameter.requires_grad_(True)
        try:
            for is_run in (True, False):
                leaves = [part.clone().requires_grad_() for part in parts]
                with torch.enable_grad():
                    if is_run:
                        hidden = self(leaves, grad=True).hidden
                    else:
                        hidden = _formula(activation, [leaves[i] for i in order])
                    if any(s is not None for s in _slopes(hidden, [*self.trial.owner.parameters()])):
                        return False
                    slopes.append(_slopes(hidden, leaves))
        except RuntimeError:  # no derivative at all
            return False
        finally:
            for parameter in learned:
                parameter.requires_grad_(False)
        # relu's derivative at 0 is a convention.
        at_zero = self.parts[order[0]] == 0
        return all(
            agree(actual.masked_fill(at_zero, 0), expected.masked_fill(at_zero, 0), 16, self.weight.dtype)
            for actual, expected in zip(*slopes, strict=True)
            if actual is not None
        ) and all((a is None) == (e is None) for a, e in zip(*slopes, strict=True))

    def is_sole_use(self) -> bool:
        """Return whether the input maps' outputs affect the module's output only through the output map."""
        outputs = tree_leaves(self().output)
        flipped = tree_leaves(self([part.flip(-2) for part in self.parts]).output)
        return all(not torch.is_tensor(a) or is_same(a, b) for a, b in zip(outputs, flipped, strict=True))

    def is_whole(self) -> bool:
        """Return whether the input maps get the module's input, and the module returns the output map's output."""
        rows = self.trial.args[0]
        for training in (False, True):
            for x in (rows, wide_rows(rows, is_multiplied=False)):
                seen = self(training=training, rows=x)
                if not all(is_same(value, x) for value in seen.inputs) or not is_same(seen.output, seen.result):
                    return False
        return True


def _slopes(y: Tensor, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(y.double().sum(), leaves, allow_unused=True, retain_graph=True) if leaves else ()


def _formula(activation: Activation, values: list[Tensor]) -> Tensor:
    gate, *value = values
    gate = activation(gate.clone())
    return gate * value[0] if value else gate


def is_same(actual: Any, expected: Tensor) -> bool:
    """Return whether shapes, dtypes and values are equal, NaN included; meta tensors have no values to compare."""
    if not torch.is_tensor(actual) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if actual.is_meta or expected.is_meta:
        return True
    return bool(((actual == expected) | ((actual != actual) & (expected != expected))).all())


def wide_rows(rows: Tensor, is_multiplied: bool = True) -> Tensor:
    """Return the rows, scaled by powers of two over a wide range of the dtype.

    Args:
        is_multiplied: choose a smaller range, so that two matrix products with the rows do not overflow.
    """
    low, high, highest = (-6, 4, 12) if rows.dtype == torch.float16 else (-20, 20, 60)
    if not is_multiplied:
        high = highest
    count = rows.shape[:-1].numel()  # the exponents span the range for any number of rows
    exponents = torch.linspace(low, high, count, dtype=torch.float32, device=rows.device).round()
    return rows * torch.exp2(exponents).to(rows.dtype).view(*rows.shape[:-1], 1)


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest ``|actual - expected| / |expected|`` of all rows.

    It is infinite if the shapes differ, and 0 if there are no values (empty, or on the meta device).
    """
    if actual.shape != expected.shape:
        return math.inf
    if actual.is_meta or not actual.numel():
        return 0.0
    actual = torch.atleast_1d(actual).double()
    expected = torch.atleast_1d(expected).double()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = (actual - expected).masked_fill(same, 0).norm(dim=-1)
    error /= expected.norm(dim=-1).clamp(min=1e-30)
    return error.nan_to_num(math.inf).max().item()


def limit(like: Tensor) -> float:
    """Return the largest `difference` that rounding explains in the dtype of ``like``."""
    if not like.is_floating_point():
        return 0.0
    return (2 if torch.finfo(like.dtype).bits == 16 else 16) * torch.finfo(like.dtype).eps
