"""Results stored per machine: the fastest of several variants, and the result of the self-check."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fmoe.errors import BuildError

_ROUNDS = 3

# `fmoe.kernels.cuda.selfcheck.failure`, set by the loader: an import would form a circle.
self_check: Callable[..., str | None] | None = None


def failure(device: torch.device, **options) -> str | None:
    """Return the first wrong result of `self_check` on a device, or its error; None if all results are right."""
    try:
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            return "there is no self-check" if self_check is None else self_check(device, **options)
    except Exception as error:  # from the driver, cuda.core, Triton's compiler or torch: layers run without the kernels
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def milliseconds(step: Callable[[], object]) -> float:
    """Return the time of a step on the current CUDA stream, with waits: the minimum of three runs after a warmup."""
    times = []
    for _ in range(1 + _ROUNDS):
        begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        done.record()
        done.synchronize()
        times.append(begin.elapsed_time(done))
    return min(times[1:])


class TuningCache:
    """Results of measurements by key, in a JSON file that the processes of a machine share.

    Without a writable cache folder, they last as long as the process.

    Args:
        name: name of the file.
        is_valid: returns whether a value is valid; invalid values of the file are ignored.
    """

    def __init__(self, name: str, is_valid: Callable[[object], bool]):
        self._name, self._is_valid = name, is_valid
        self._known: dict[str, object] | None = None

    def get(self, key: str) -> Any:
        """Return the value of a key, or None."""
        return self._values().get(key)

    def put(self, key: str, value: object) -> None:
        """Store a value, and keep the values that other processes have written since."""
        known = self._values()
        known[key] = value
        path = self._path()
        if path is None:
            return
        with suppress(OSError, ValueError):
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({**self._read(), **known}, indent=1), encoding="utf-8")
            os.replace(part, path)

    def _values(self) -> dict[str, object]:
        if self._known is None:
            self._known = {key: value for key, value in self._read().items() if self._is_valid(value)}
        return self._known

    def _read(self) -> dict[str, object]:
        path = self._path()
        with suppress(OSError, ValueError):
            if path is not None and isinstance(found := json.loads(path.read_text(encoding="utf-8")), dict):
                return found
        return {}

    def _path(self) -> Path | None:
        from fmoe.kernels import cache

        try:
            return cache.writable() / self._name
        except BuildError:
            return None
