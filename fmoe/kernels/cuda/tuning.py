"""Choice of the fastest variant by measurement, stored per machine; and a function that runs the self-check."""

import functools
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fmoe.errors import BuildError, one_line
from fmoe.files import write_atomically

logger = logging.getLogger("fmoe")

_ROUNDS = 3

T = TypeVar("T")

# `fmoe.kernels.cuda.selfcheck.failure`, set by the loader, because an import would be circular.
self_check: Callable[..., str | None] | None = None


def failure(device: torch.device, **options) -> str | None:
    """Run `self_check` on a device. Return the first wrong result or the error raised; None if all results are right.

    The check runs in its own thread, so that the caller's inference mode, fake tensors, autocast and default device do
    not affect it. It also works while the caller runs a custom operation.

    Args:
        options: options of `self_check`.
    """

    def check() -> str | None:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return "there is no self-check" if self_check is None else self_check(device, **options)

    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(check).result()
    except Exception as error:  # from the driver, cuda.core, Triton's compiler or torch: layers run without the kernels
        return one_line(error, 200, with_type=True)


def cache_key(rows: Tensor, num_rows: int, w_in: Tensor, w_out: Tensor, *versions: str) -> str:
    """Return a cache key of device, versions of torch and others, dtype and sizes.

    ``num_rows`` is rounded up to a power of two.
    """
    bucket = 1 << max(num_rows - 1, 0).bit_length()
    sizes = "x".join(map(str, (bucket, *w_in.shape, w_out.shape[2])))
    device = torch.cuda.get_device_name(rows.device) if rows.is_cuda else rows.device.type
    of_packages = ", ".join((f"torch {torch.__version__}", *versions))
    return f"{device}, {of_packages}, {str(rows.dtype).removeprefix('torch.')}, {sizes}"


def fastest(candidates: Sequence[T], run: Callable[[T], object], key: str) -> tuple[T, bool]:
    """Measure ``run`` with each candidate, and choose the fastest.

    Candidates with which ``run`` raises are left out. If it raises with all of them, the first is chosen.

    Args:
        key: name of the measurement in the log.

    Returns:
        The chosen candidate; and whether to store the choice for later runs, False if a candidate ran out of memory.
    """
    times: dict[T, float] = {}
    lasts = True
    for candidate in candidates:
        try:
            times[candidate] = milliseconds(functools.partial(run, candidate))
        except Exception as error:  # Triton has its own classes for lack of shared memory and of registers
            lasts = lasts and not isinstance(error, torch.OutOfMemoryError)
            logger.info("%s: %s does not run (%s)", key, candidate, one_line(error, 200, with_type=True))
    best = min(times, key=times.__getitem__) if times else candidates[0]
    listed = ", ".join(f"{name} {time:.3f} ms" for name, time in sorted(times.items(), key=lambda item: item[1])[:4])
    logger.info("%s: %s (%s)", key, best, listed or "none of the candidates runs")
    return best, lasts


def milliseconds(step: Callable[[], object]) -> float:
    """Return the time of a step on the current CUDA stream: the best of three runs after a warmup."""
    times = []
    for _ in range(1 + _ROUNDS):
        begin = torch.cuda.Event(enable_timing=True)
        done = torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        done.record()
        done.synchronize()
        times.append(begin.elapsed_time(done))
    return min(times[1:])


class TuningCache:
    """Results of measurements by key, in a JSON file that the processes of a machine share.

    Without a writable cache folder, the results last as long as the process.

    Args:
        name: name of the file.
        is_valid: function that returns whether a value is valid. Invalid values of the file are ignored.
    """

    def __init__(self, name: str, is_valid: Callable[[object], bool]):
        self._name = name
        self._is_valid = is_valid
        self._loaded: dict[str, object] | None = None

    def get(self, key: str) -> Any:
        """Return the value of a key, or None."""
        return self._values().get(key)

    def put(self, key: str, value: object, lasts: bool = True) -> None:
        """Store a value. Values that other processes have added to the file are kept.

        Args:
            lasts: whether to store it in the file too, not only in this process.
        """
        self._values()[key] = value
        path = self._path()
        if path is None or not lasts:
            return
        with suppress(OSError, ValueError):
            write_atomically(path, json.dumps({**self._read(), key: value}, indent=1).encode())

    def _values(self) -> dict[str, object]:
        if self._loaded is None:
            self._loaded = {key: value for key, value in self._read().items() if self._is_valid(value)}
        return self._loaded

    def _read(self) -> dict[str, object]:
        path = self._path()
        with suppress(OSError, ValueError):
            values = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
            return values if isinstance(values, dict) else {}
        return {}

    def _path(self) -> Path | None:
        from fmoe.kernels import cache

        try:
            return cache.writable() / self._name
        except BuildError:
            return None
