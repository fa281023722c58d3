"""What a layer does in its backward pass besides differentiating, as operations that torch.compile takes whole.

`fmoe.losses.attach_loss` calls back into the layer, which tracing cannot follow: statistics are the layer's state, and
the loss scale is a number that changes. So under torch.compile the layer goes by number, its statistics as tensors, and
both operations are opaque. They return copies of T x K numbers, as operations must not return what they are given.

Shape letters: T tokens, E experts, K choices.
"""

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, List, Optional, Tuple  # noqa: UP035  what torch's schemas are read from

import torch
from torch import Tensor
from torch.utils import checkpoint

from fmoe.routing import Routing, RoutingStats

if TYPE_CHECKING:
    from fmoe.auxiliary import AuxiliaryLosses

_layers: "weakref.WeakValueDictionary[int, AuxiliaryLosses]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_tickets = itertools.count()  # of forward passes
_counted: dict[int, None] = {}  # the latest tickets whose statistics are counted
_MAX_COUNTED = 4096


def enrol(layer: "AuxiliaryLosses") -> Tensor:
    """The layer's number, on the CPU: a tensor, so that what is compiled for one layer serves all like it."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def hook(outputs: list[Tensor], on_backward: Callable[[], None]) -> None:
    """Call ``on_backward`` once, at the first gradient of the outputs."""
    waiting = [on_backward]

    def run(_grad: Tensor) -> None:
        if waiting:
            waiting.pop()()

    for out in outputs:
        # A view that is changed in place leaves the graph, its base does not.
        (out._base if out._is_view() else out).register_hook(run)


def is_repeated() -> bool:
    """Return whether a checkpoint repeats a forward pass that ran with gradients enabled before.

    Reentrant checkpoints run the first one without: there, the second one is the first that counts. Torch has no word
    for which of them is at work, but the stack shows it.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "recompute_fn" and frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def attach(x: Tensor, routing: Routing, total: Tensor | None, number: Tensor) -> Tensor:
    """``x`` as of `fmoe.losses.attach_loss` with the layer's scale, whose backward pass has the layer record."""
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
    """(the weights, the forward pass's ticket)."""
    return weight.clone(), torch.tensor(next(_tickets), dtype=torch.int64, device="cpu")


@_attach.register_fake
def _(weight, total, number, values, names, has_stats):
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
    """(the gradient, the scale of the losses); has the layer record once for each ticket. Consumed by who
    differentiates, so that no compiler leaves it out."""
    layer = _layers.get(int(number))
    scale = 1.0
    if layer is not None:
        if int(ticket) not in _counted:  # else the backward pass runs again: retain_graph
            _counted[int(ticket)] = None
            if len(_counted) > _MAX_COUNTED:
                _counted.pop(next(iter(_counted)), None)
            stats = RoutingStats(*values[:4]) if has_stats else None
            losses = dict(zip(filter(None, names.split(",")), values[4 * has_stats :], strict=True))
            layer.record(Routing(grad.new_empty(0, dtype=torch.int64), grad, losses, stats))
        scale = layer.scale()
    return grad.clone(), torch.as_tensor(scale, dtype=torch.float32, device=grad.device).reshape(()).clone()


@_record.register_fake
def _(grad, number, ticket, values, names, has_stats):
    return torch.empty_like(grad), grad.new_empty((), dtype=torch.float32)


def _keep(ctx, inputs, output):
    _weight, total, number, values, ctx.names, ctx.has_stats = inputs
    ctx.dtype = None if total is None else total.dtype
    ctx.num_values = len(values)
    ctx.save_for_backward(number, output[1], *values)


def _backward(ctx, grad, _):
    number, ticket, *values = ctx.saved_tensors
    grad, scale = _record(grad, number, ticket, values, ctx.names, ctx.has_stats)
    return grad, None if ctx.dtype is None else scale.to(ctx.dtype), None, [None] * ctx.num_values, None, None


_attach.register_autograd(_backward, setup_context=_keep)
