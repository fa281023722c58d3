"""Times at which statistics are counted: when gradients arrive, once per forward pass, and inside compiled code.

torch.compile can trace neither `AuxLosses.record` nor `AuxLosses.scale` of `fmoe.auxiliary`: statistics are state, and
the scale is a number that changes. So compiled code refers to an `AuxLosses` by number, and passes statistics as
tensors to two operations that are opaque to it. They return copies, because operations must not return their inputs.
"""

import itertools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, List, Optional, Tuple  # noqa: UP035 - torch reads schemas of operations from these

import torch
from torch import Tensor
from torch.utils import checkpoint

from fmoe.routing import Routing, RoutingStats

_registered: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()  # objects `AuxLosses`
_numbers = itertools.count()
_tickets = itertools.count()  # of forward passes
_counted: dict[int, None] = {}  # the latest tickets whose statistics are counted
_MAX_COUNTED = 4096


def call_on_backward(outputs: list[Tensor], function: Callable[[], None]) -> None:
    """Call ``function`` once, when the first gradient of the outputs arrives."""
    waiting = [function]

    def run(_grad: Tensor) -> None:
        if waiting:
            waiting.pop()()

    for out in outputs:
        # A view leaves the graph if it is changed in place; its base does not.
        (out if out._base is None else out._base).register_hook(run)


def is_recomputation() -> bool:
    """Return whether an activation checkpoint is repeating a forward pass that ran with gradients enabled before."""
    # Reentrant checkpoints run the first pass without gradients, so their second pass must count. Torch has no API for
    # the kind of checkpoint, so the stack is searched.
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "recompute_fn" and frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def register(aux: Any) -> Tensor:
    """Return a new number by which compiled code refers to an `AuxLosses`, as long as that lives."""
    number = next(_numbers)
    _registered[number] = aux
    # As a tensor, so that layers of equal shape share compiled code.
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def attach(x: Tensor, routing: Routing, total: Tensor | None, number: Tensor) -> Tensor:
    """Return ``x``; its backward pass adds the scaled gradient of ``total``, if any, and counts the statistics.

    Args:
        total: weighted sum of the losses.
        number: result of `register`.
    """
    stats = routing.stats
    sums = [] if stats is None else [stats.load_E, stats.dropped, stats.entropy, stats.tokens]
    values = [value.detach() for value in (*sums, *routing.losses.values())]
    attached, _ticket = _attach(x, total, number, values, ",".join(routing.losses), stats is not None)
    return attached


@torch.library.custom_op("fmoe::attach", mutates_args=())
def _attach(
    weight: Tensor,
    total: Optional[Tensor],  # noqa: UP045
    number: Tensor,
    values: List[Tensor],  # noqa: UP006
    names: str,
    has_stats: bool,
) -> Tuple[Tensor, Tensor]:  # noqa: UP006
    """Return a copy of ``weight``, and a ticket: a new id for this forward pass."""
    return weight.clone(), torch.tensor(next(_tickets), dtype=torch.int64, device="cpu")


@_attach.register_fake
def _(
    weight: Tensor, total: Tensor | None, number: Tensor, values: list[Tensor], names: str, has_stats: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("fmoe::record", mutates_args=())
def _record(
    grad: Tensor,
    number: Tensor,
    ticket: Tensor,
    values: List[Tensor],  # noqa: UP006
    names: str,
    has_stats: bool,
) -> Tuple[Tensor, Tensor]:  # noqa: UP006
    """Count the statistics once per ticket. Return a copy of ``grad``, and the current factor of the losses."""
    # The backward pass uses the result, so that no compiler removes the operation.
    aux = _registered.get(int(number))
    scale: float | Tensor = 1.0
    if aux is not None:
        if int(ticket) not in _counted:  # otherwise the backward pass runs again (retain_graph)
            _counted[int(ticket)] = None
            if len(_counted) > _MAX_COUNTED:
                _counted.pop(next(iter(_counted)), None)
            stats = RoutingStats(values[0], values[1], values[2], values[3]) if has_stats else None
            losses = dict(zip(filter(None, names.split(",")), values[4 * has_stats :], strict=True))
            aux.record(Routing(grad.new_empty(0, dtype=torch.int64), grad, losses, stats))
        scale = aux.scale()
    if isinstance(scale, Tensor):
        return grad.clone(), scale.to(grad.device, torch.float32).reshape(()).clone()
    return grad.clone(), torch.full((), scale, dtype=torch.float32, device=grad.device)  # a copy would synchronize


@_record.register_fake
def _(
    grad: Tensor, number: Tensor, ticket: Tensor, values: list[Tensor], names: str, has_stats: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad), grad.new_empty((), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _weight, total, number, values, ctx.names, ctx.has_stats = inputs
    ctx.dtype = None if total is None else total.dtype
    ctx.num_values = len(values)
    ctx.save_for_backward(number, output[1], *values)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Any, ...]:
    number, ticket, *values = ctx.saved_tensors
    grad, scale = _record(grad, number, ticket, values, ctx.names, ctx.has_stats)
    return grad, None if ctx.dtype is None else scale.to(ctx.dtype), None, [None] * ctx.num_values, None, None


_attach.register_autograd(_backward, setup_context=_keep)
