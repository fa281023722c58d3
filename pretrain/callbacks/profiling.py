"""Traces of some steps, by torch's profiler."""

import logging
import signal
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pretrain.callbacks.base import Callback, Loop, Metrics

logger = logging.getLogger(__name__)


class Profiling(Callback):
    """Write traces of this rank to ``folder``/step-N/rank-R.json.gz, for chrome://tracing and Perfetto.

    A trace has the operations of ``steps`` steps, from step ``first`` on, or from the next step after SIGUSR2. If a
    trace cannot be written, the run continues with a warning.

    Args:
        folder: folder of all traces.
        first: step of the first trace; None for traces by a signal only.
        steps: number of steps per trace.
    """

    def __init__(self, folder: Path, first: int | None, steps: int):
        self.folder = folder
        self.first = first
        self.steps = steps
        self._is_asked = False
        self._profile: Any = None
        self._begun = 0

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        def ask(_number: int, _frame: object) -> None:
            self._is_asked = True

        signal.signal(signal.SIGUSR2, ask)

    def before_step(self, trainer: Loop) -> None:
        is_first = self.first is not None and trainer.step + 1 == self.first
        if self._profile is None and (self._is_asked or is_first):
            self._is_asked = False
            self._begun = trainer.step + 1
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        if self._profile is not None and (trainer.step + 1 == self._begun + self.steps or trainer.is_last):
            self._write(trainer)

    def on_end(self, trainer: Loop, error: BaseException | None) -> None:
        if self._profile is not None:
            self._write(trainer)
        # A request that comes too late must not kill a process that is ending.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def _write(self, trainer: Loop) -> None:
        trace = self._profile
        self._profile = None
        trace.stop()
        path = self.folder / f"step-{self._begun:08d}" / f"rank-{trainer.processes.rank}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)
        else:
            if trainer.processes.is_main:
                steps = (self._begun, trainer.step, path.parent)
                logger.warning("steps %d to %d are in %s", *steps, extra={"event": (trainer.step, "profile")})
