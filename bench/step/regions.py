"""Where the time of a training step goes: to regions of the model, forward and backward, and to the optimizer.

Regions are put around functions and modules from outside, for the steps that are looked at alone. Forward, a region is
between the begin and the end of a call. Backward, nothing is called: autograd numbers its nodes in the order in which
they are made, and on a CPU runs them in the reverse order. The nodes with numbers that were given within a region are
its own, so it is enough to look at the clock where a node follows one of another region. Gradients that are added up
(also into Megatron's main_grad) belong to the region whose node gave them: autograd adds them at once.
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
Mark = tuple[Any, str, str]  # whatever has the function, its name there, its region

_LAST = 2**64 - 1  # the number of all nodes that add up gradients of parameters


class Regions:
    """``with Regions(marks, model) as regions: ...`` counts the seconds of each region within.

    Args:
        marks: functions and the regions that they are; one within another is not counted to that one.
        model: the function whose output is what the backward pass begins with, as (what has it, its name).
        clock: seconds.

    Attributes:
        seconds: by region, in all.
    """

    def __init__(self, marks: Iterable[Mark], model: tuple[Any, str], clock: Callable[[], float] = time.perf_counter):
        self.seconds: dict[str, float] = defaultdict(float)
        self._marks, self._model, self._clock = list(marks), model, clock
        self._region = OTHER
        self._since = 0.0
        # Where in autograd's numbers each region begins, of the forward pass under way.
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
        own, call = vars(owner).get(name), wrap(getattr(owner, name))
        # A plain function, which in a class binds its object.
        setattr(owner, name, functools.wraps(call)(lambda *args, **kwargs: call(*args, **kwargs)))
        self._restore.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def _switch(self, region: str) -> str:
        now = self._clock()
        before, self._region = self._region, region
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
    """Nodes of a graph that are run in the reverse order of their numbers."""
    seen, waiting = {last}, [last]
    while waiting:
        node = waiting.pop()
        if node._sequence_nr() != _LAST:
            yield node._sequence_nr(), node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting.extend(new)
