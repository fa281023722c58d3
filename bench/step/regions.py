"""The time of a training step by region: regions of the model, forward and backward, and the optimizer.

Regions wrap functions and modules from outside, only for the steps that are measured. In the forward pass, a region
lasts from the beginning to the end of a call. The backward pass does not call these functions. But autograd numbers its
nodes in the order in which they are made, and on a CPU runs them in the reverse order. A node whose number was given
within a region belongs to that region, so it is enough to read the clock when a node follows a node of another region.
The addition of gradients (also into Megatron's main_grad) belongs to the region of the node that returned them, because
autograd adds them at once.
"""

import bisect
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

LAYER = "rest of the layer"  # reshapes, losses joining the backward pass, statistics
OTHER = "other"
BLOCK = ("router", "plan", "dispatch", "experts", "combine", LAYER)
REGIONS = ("attention", *BLOCK, "optimizer", OTHER)
Mark = tuple[Any, str, str]  # owner of a function, its name in the owner, its region

_LAST = 2**64 - 1  # the sequence number of all nodes that accumulate gradients of parameters


class Regions:
    """``with Regions(marks, model) as regions: ...`` measures the seconds of each region in the block.

    Args:
        marks: functions and their regions; a region inside another one does not count toward the outer one.
        model: the function whose output begins the backward pass, as (its owner, its name).
        clock: returns seconds.

    Attributes:
        seconds: total seconds by region.
    """

    def __init__(self, marks: Iterable[Mark], model: tuple[Any, str], clock: Callable[[], float] = time.perf_counter):
        self.seconds: dict[str, float] = defaultdict(float)
        self._marks = list(marks)
        self._model = model
        self._clock = clock
        self._region = OTHER
        self._since = 0.0
        # Autograd's sequence number at the beginning of each region of the current forward pass.
        self._begins: list[tuple[int, str]] = []
        self._restore: list[Callable[[], None]] = []

    def __enter__(self) -> "Regions":
        for owner, name, region in self._marks:
            self._replace(owner, name, functools.partial(self._within, region))
        self._replace(*self._model, self._forward)
        self._since = self._clock()
        return self

    def __exit__(self, *_) -> None:
        self._switch(OTHER)
        for restore in reversed(self._restore):
            restore()
        self._restore.clear()

    def _replace(self, owner: Any, name: str, wrap: Callable) -> None:
        own = vars(owner).get(name)
        call = wrap(getattr(owner, name))
        # A plain function, so that it binds `self` if the owner is a class.
        setattr(owner, name, functools.wraps(call)(lambda *args, **kwargs: call(*args, **kwargs)))
        self._restore.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def _switch(self, region: str) -> str:
        now = self._clock()
        before = self._region
        self._region = region
        self.seconds[before] += now - self._since
        self._since = now
        return before

    def _enter(self, region: str) -> str:
        self._begins.append((torch._C._autograd._get_sequence_nr(), region))
        return self._switch(region)

    def _within(self, region: str, call: Callable) -> Callable:
        def timed(*args, **kwargs):
            before = self._enter(region)
            try:
                return call(*args, **kwargs)
            finally:
                self._enter(before)

        return timed

    def _forward(self, call: Callable) -> Callable:
        def forward(*args, **kwargs):
            self._begins.clear()
            self._enter(OTHER)
            out = call(*args, **kwargs)
            if out.requires_grad:
                self._watch_backward(out)
            return out

        return forward

    def _watch_backward(self, out: Tensor) -> None:
        numbers = [number for number, _ in self._begins]
        before = None
        for number, node in sorted(_nodes(out.grad_fn), key=lambda found: found[0], reverse=True):
            place = bisect.bisect_right(numbers, number) - 1
            region = self._begins[place][1] if place >= 0 else OTHER
            if region != before:
                node.register_prehook(lambda _grads, region=region: self._switch(region) and None)
            before = region


def _nodes(last: Any) -> Iterator[tuple[int, Any]]:
    """Yield the nodes of a graph that run in the reverse order of their sequence numbers, with these numbers."""
    seen = {last}
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if node._sequence_nr() != _LAST:
            yield node._sequence_nr(), node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting.extend(new)
