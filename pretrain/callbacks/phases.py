"""Time of a step by phase on all ranks, and the slowest rank."""

import logging

import torch
from megatron.core.pipeline_parallel import schedules

from fmoe.runtime import collectives, phases
from fmoe.runtime.deferral import WeightGradients
from pretrain.callbacks.base import Callback, Loop, Metrics
from pretrain.engine import pipeline

logger = logging.getLogger(__name__)


class Phases(Callback):
    """Measure every ``every``-th step of all ranks, and add the times to the metrics (``time/forward_ms``, ...).

    A measured step begins before the callbacks that follow this one, and ends before their `on_step`. Waiting for
    another rank is not work: the slowest rank is the one with the most work of its own. If it exceeds ``slow`` times
    the mean of the other ranks, a warning names it, unless the previous measurement named it too.
    """

    def __init__(self, every: int, slow: float):
        self.every = every
        self.slow = slow
        self._named: int | None = None

    def before_step(self, trainer: Loop) -> None:
        if (trainer.step + 1) % self.every == 0:
            split = (pipeline, "backward_inputs"), (WeightGradients, "run")  # with parallel.schedule=zero_bubble
            phases.start(trainer.processes.device, (schedules, "backward_step"), *split)

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        if trainer.step % self.every:
            return
        times = phases.stop()
        times["work"] = sum(times[name] for name in phases.WORK)
        row = torch.tensor(list(times.values()), dtype=torch.float64, device=trainer.processes.device)
        table = torch.stack(collectives.gather(row)).cpu()  # [ranks, phases]
        for name, ranks in zip(times, table.T, strict=True):
            metrics[f"time/{name}_ms"] = float(ranks.mean())
            metrics[f"time/{name}_ms/largest"] = float(ranks.max())
            metrics[f"time/{name}_ms/largest_rank"] = int(ranks.argmax())
            metrics[f"time/{name}_ms/ranks"] = ranks.tolist()
        slowest = int(ranks.argmax())  # of the last column, the work
        others = (ranks.sum() - ranks[slowest]) / (len(ranks) - 1)  # NaN with a single rank
        is_slow = bool(ranks[slowest] > self.slow * others)
        if is_slow and slowest != self._named and trainer.processes.is_main:
            text = "rank %d is slow: step %d took %.0f ms without waits, other ranks %.0f ms (docs/operations.md)"
            logger.warning(text, slowest, trainer.step, ranks[slowest], others)
        self._named = slowest if is_slow else None

    def on_end(self, trainer: Loop, error: BaseException | None) -> None:
        phases.stop()
