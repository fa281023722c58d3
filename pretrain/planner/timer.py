"""Times on this machine, taken on all ranks at once and while no other program slows them."""

import math
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

Step = Callable[[], object]
Result = TypeVar("Result")

_SLOWED = 1.2  # times as long as on the idle machine


class Timer:
    """Times steps on all ranks of the default process group.

    A machine is busy if tiny operations of its CPU take clearly longer than when it is idle.

    Args:
        idle: seconds of 200 tiny operations on the idle machine (`idle_seconds`).
        device: device of the steps.
        repeats: number of measurements that are kept.
        min_seconds: shortest time of a measurement.
        patience: seconds that may be lost to dropped measurements. Later ones are all kept.
    """

    def __init__(self, idle: float, device: torch.device, *, repeats: int, min_seconds: float, patience: float):
        self.idle = idle
        self.device = device
        self.repeats = repeats
        self.min_seconds = min_seconds
        self.patience = patience

    def __call__(self, step: Step) -> tuple[float, float]:
        """Return the median seconds of a call on the slowest rank, and their spread (see `pretrain.planner.cluster`).

        Collective, as all methods. Two calls warm up.
        """
        self._mean(step, 2)
        calls = math.ceil(self.min_seconds / self._mean(step, 1))
        seconds = self.while_idle(lambda: self._mean(step, calls))
        first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
        return rounded(median), rounded((third - first) / median)

    def while_idle(self, measure: Callable[[], Result]) -> list[Result]:
        """Return the results of `repeats` calls, each of which began and ended while no rank's machine was busy."""
        results: list[Result] = []
        was_busy = self._is_busy()
        while len(results) < self.repeats:
            begin = time.perf_counter()
            result = measure()
            is_busy = self._is_busy()
            if self.patience > 0 and (was_busy or is_busy):
                self.patience -= self._most(time.perf_counter() - begin)
            else:
                results.append(result)
            was_busy = is_busy
        return results

    def wait(self) -> None:
        """Wait until the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _mean(self, step: Step, calls: int) -> float:
        dist.barrier()
        self.wait()
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        self.wait()
        return self._most((time.perf_counter() - begin) / calls)

    def _is_busy(self) -> bool:
        return self._most(_tiny_operations() / self.idle) > _SLOWED  # alike on all ranks

    def _most(self, number: float) -> float:
        most = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.item()


def idle_seconds(tries_for: float) -> float:
    """Return the seconds of 200 tiny operations on the idle CPU: of the fastest twentieth of tries in some seconds."""
    tries = []
    end = time.perf_counter() + tries_for
    while time.perf_counter() < end:
        tries.append(_tiny_operations())
    return float(np.quantile(tries, 0.05))


def _tiny_operations() -> float:
    tiny = torch.zeros(1, dtype=torch.float32, device="cpu")
    for number in range(300):
        if number == 100:  # the first ones come from memory after other work
            begin = time.perf_counter()
        tiny.add_(1)
    return time.perf_counter() - begin


def rounded(figure: float) -> float:
    """Return a figure with four significant digits."""
    return float(f"{figure:.4g}")
