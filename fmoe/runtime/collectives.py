"""Collectives of torch.distributed that cannot abort the process while it exits.

gloo's threads may hold a collective (its ``Work``) for some time after it is complete. The last thread to release it
frees its tensors, for which it needs the interpreter's lock. If the interpreter finalizes meanwhile, it ends the thread
inside a destructor, and the process aborts.

At exit, before that can happen, this module waits until threads have released every completed collective that `start`
started. It keeps permanent references to unfinished ones, and to the tensors of all other collectives.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_PASS_SECONDS = 0.05
_SETTLE_SECONDS = 60.0  # bound on the wait at exit; a thread needs only microseconds once it is scheduled


class Started:
    """A collective that `start` has started."""

    __slots__ = ("__weakref__", "_aliases", "_work")

    def __init__(self, work: dist.Work | None, aliases: list[Tensor]):
        self._work = work
        self._aliases = [weakref.ref(alias) for alias in aliases]

    def is_completed(self) -> bool:
        """Return whether the collective is complete, successfully or not."""
        return self._work is None or self._work.is_completed()

    def error(self) -> Exception | None:
        """Return the error of a complete collective; None if it succeeded or the backend reports none."""
        error = None if self._work is None else self._work.exception()
        return error if error is None or isinstance(error, Exception) else RuntimeError("the backend reports an error")

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait as `torch.distributed.Work.wait` does."""
        if self._work is None:
            return
        self._work.wait(*() if timeout is None else (timeout,))
        if self._aliases:
            self._work = None
            if _is_exiting:
                _settle()

    def is_released(self) -> bool:
        """Return whether the collective is complete and every thread has released its ``Work``."""
        if self._aliases and self._work is not None and self._work.is_completed():
            self._work = None
        return self._work is None and all(alias() is None for alias in self._aliases)


_started: set[Started] = set()  # on the CPU, not yet known to be released
_has_started = _is_exiting = False


def start(collective: Callable[..., dist.Work | None], *arguments: Any, **options: Any) -> Started:
    """Start ``collective(*arguments, async_op=True, **options)``, a function of `torch.distributed`."""
    global _has_started
    _started.difference_update([one for one in tuple(_started) if one.is_released()])
    # Only the work references the aliases of its tensors: once they are freed, every thread has released it.
    aliases: list[Tensor] = []
    work = collective(*[_aliased(argument, aliases) for argument in arguments], async_op=True, **options)
    if work is None or not all(alias.device.type == "cpu" for alias in aliases):
        return Started(work, [])
    started = Started(work, aliases)
    _started.add(started)
    _has_started = True
    return started


def run(collective: Callable[..., dist.Work | None], *arguments: Any, **options: Any) -> None:
    """Start a collective as `start` does, and wait for it."""
    start(collective, *arguments, **options).wait()


def gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the contiguous tensor of each rank of a group, by default of all ranks; they have the same shape."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    run(dist.all_gather, parts, tensor, group=group)
    return parts


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors the group's collectives take: the current GPU for NCCL, else the CPU."""
    return torch.device("cuda" if "nccl" in dist.get_backend_config(group) else "cpu")


def _aliased(argument: Any, aliases: list[Tensor]) -> Any:
    if isinstance(argument, Tensor):
        aliases.append(argument.detach())
        return aliases[-1]
    if isinstance(argument, list) and argument and isinstance(argument[0], Tensor):
        return [_aliased(tensor, aliases) for tensor in argument]
    return argument


def _settle() -> None:
    """Wait until threads have released every completed ``Work``. Keep unfinished ones alive for good."""
    end = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < end:
        waits = [one for one in _started if not one.is_released() and one._work is None]
        if not waits:
            break
        time.sleep(0.0005)  # releases the interpreter's lock, which the threads need
    for one in _started:
        if one._work is not None:
            _leak(one._work)


def _keep() -> None:
    """Leak references to CPU tensors that C++ code uses, so that no thread frees them during exit."""
    objects = gc.get_objects()
    held = []
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor | torch.UntypedStorage)}
    for one in [one for one in objects if type(one) in kinds]:
        with contextlib.suppress(Exception):  # tensor subclasses may refuse; collectives do not accept them
            if one.device.type != "cpu":
                continue
            if isinstance(one, torch.UntypedStorage):
                held.append(torch.empty(0, dtype=torch.uint8, device="cpu").set_(one))
            elif one._use_count() > 1:
                alias = one.detach()
                alias.grad = one  # a reference of C++ code
                held.append(alias)
    _leak(held)
    time.sleep(_PASS_SECONDS)  # threads that already wait for the lock get it


def _leak(value: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _at_exit() -> None:
    global _is_exiting
    _is_exiting = True
    _settle()
    if _has_started or (dist.is_available() and dist.is_initialized()):
        _keep()


def _after_fork() -> None:
    """Leak references to unfinished collectives: the child lacks the threads that would release them."""
    _leak(set(_started))
    _started.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
