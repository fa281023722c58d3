"""Differences between runs on the CPU and on a GPU: the clock, the memory, and waits of the host.

On a GPU, times are measured between two events on the stream, so that work of the host counts only if the stream waits
for it.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from bench.layer import contenders
from bench.layer.contenders import Layer, layer_step
from bench.layer.memory import Peaks
from bench.layer.problem import Problem
from fmoe.errors import UserError

Step = Callable[[], object]


@dataclass
class Cpu:
    """The CPU."""

    name = "cpu"
    shapes = "A,B,C,D"
    precisions = ("fp32", "bf16")
    passes = ("forward+backward",)
    min_seconds: float | None = None
    peaks: Peaks | None = None
    clock: Callable[[], float] = time.perf_counter

    def layers(self) -> Mapping[str, Layer]:
        """Contenders."""
        return contenders.layers()

    def peak(self, name: str, problem: Problem, backward: bool, threads: int) -> int | None:
        """Return the peak of the bytes that two steps add; None if not requested or not reported by the system."""
        return None if self.peaks is None else self.peaks(name, problem, backward, threads)

    def facts(self, layer: Layer, problem: Problem, backward: bool) -> dict[str, str]:
        """Return no further facts about a contender."""
        return {}


class EventClock:
    """Clock of seconds on the current stream; a call waits until the stream has reached it."""

    def __init__(self):
        self._last: torch.cuda.Event | None = None
        self._seconds = 0.0

    def __call__(self) -> float:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        if self._last is not None:  # summed: a float32 of milliseconds is too coarse for hours
            self._seconds += self._last.elapsed_time(event) / 1e3
        self._last = event
        return self._seconds


@dataclass
class Cuda:
    """The current GPU."""

    name = "cuda"
    shapes = "G1,G2,G3"
    precisions = ("bf16",)
    passes = ("forward", "forward+backward")
    min_seconds: float | None = 0.05  # of a run, which repeats short calls
    peaks: bool = True
    clock: Callable[[], float] = field(default_factory=EventClock)

    def layers(self) -> Mapping[str, Layer]:
        """Contenders."""
        return contenders.layers_on_cuda()

    def peak(self, name: str, problem: Problem, backward: bool, threads: int) -> int | None:
        """Return the peak of the bytes that two steps add in torch's allocator; None if not requested or on failure."""
        if not self.peaks:
            return None
        try:
            step = layer_step(self.layers()[name], problem, backward)
            step()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before
        except Exception:  # `frame.measure` meets and reports it
            return None

    def facts(self, layer: Layer, problem: Problem, backward: bool) -> dict[str, str]:
        """Return how often the host waits for the GPU in a step."""
        return {"host syncs": str(host_syncs(layer_step(layer, problem, backward)))}


def host_syncs(step: Step) -> int:
    """Return how often the host waits for the GPU in the second call of a step (the first one tunes and compiles)."""
    step()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return sum("synchroniz" in str(warning.message) for warning in caught)


def of_name(name: str, peak: bool, needs_gpu: bool = True) -> "Cpu | Cuda":
    """Return the device that ``--device`` names.

    Raises:
        UserError: a GPU is named and needed, and there is none.
    """
    if name == "cpu":
        return Cpu(peaks=Peaks() if peak else None)
    if needs_gpu and not torch.cuda.is_available():
        raise UserError(
            f"--device cuda: torch {torch.__version__} sees no GPU here; leave it out to measure on the CPU"
        )
    return Cuda(peaks=peak)
