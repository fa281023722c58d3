"""Time of a training step by phase, on this rank.

`start` begins a measurement, and `stop` returns the milliseconds of each phase. In between, each moment belongs to one
phase: a phase that begins within another one suspends it. Waits of the host or of a GPU's stream for collectives are
phases of their own, so the rest is this rank's own work.

Without a measurement and in compiled code, `phase` does nothing. A measurement on a GPU records events on the current
stream, and waits for the device only in `stop`.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

WORK = ("forward", "experts", "backward", "optimizer", "other")
WAITS = ("exchange", "reduction", "collectives")
_COLLECTIVES = ("wait", "all", "_all", "reduce", "_reduce", "broadcast")

_is_on_gpu = False
_marks: list[tuple[str, Any]] = []  # phase that begins, and when; empty without a measurement
_patches = ExitStack()


def start(device: torch.device, *backward: tuple[Any, str]) -> None:
    """Begin a measurement.

    Args:
        device: device of the rank.
        backward: modules and names of the functions in them that run a backward pass.
    """
    global _is_on_gpu
    _is_on_gpu = device.type == "cuda"
    functions = [(*function, "backward") for function in backward]
    # Collectives of any library end in `Work.wait`; a synchronous one of nccl runs within the group's method.
    for owner in (dist.Work, dist.ProcessGroup):
        functions += [(owner, name, "collectives") for name in vars(owner) if name.startswith(_COLLECTIVES)]
    for owner, name, of_phase in functions:
        function = vars(owner)[name]
        setattr(owner, name, phase(of_phase)(function))
        _patches.callback(setattr, owner, name, function)
    _mark("other")


def current() -> str:
    """Return the present phase of a measurement."""
    return _marks[-1][0]


def stop() -> dict[str, float]:
    """End the measurement, and return the milliseconds of each phase. On a GPU, wait for the device."""
    _patches.close()
    times = dict.fromkeys((*WORK, *WAITS), 0.0)
    if _marks:
        _mark("other")
        if _is_on_gpu:
            torch.cuda.synchronize()  # events may be on several streams, as FSDP starts collectives on its own
    for (name, begin), (_, end) in pairwise(_marks):
        times[name] += begin.elapsed_time(end) if _is_on_gpu else 1e3 * (end - begin)
    _marks.clear()
    return times


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Run a context whose time belongs to the phase ``name``: one of `WORK` or `WAITS`."""
    # Another Python thread may write a checkpoint. Autograd's threads run while the measured one waits for them.
    # Compiled code that depended on a measurement would be compiled again, with graph breaks.
    if torch.compiler.is_compiling() or not _marks or type(threading.current_thread()) is threading.Thread:
        yield
        return
    outer = _marks[-1][0]
    # Recomputed experts belong to the backward pass, and all within a wait to the wait.
    _mark(outer if outer in WAITS or (outer, name) == ("backward", "experts") else name)
    try:
        yield
    finally:
        if _marks:  # empty if `stop` was called meanwhile: a mark would begin another measurement
            _mark(outer)


def _mark(name: str) -> None:
    now: Any = time.perf_counter()
    if _is_on_gpu:
        now = torch.cuda.Event(enable_timing=True)
        now.record()
    _marks.append((name, now))
