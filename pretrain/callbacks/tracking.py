"""Logging of metrics on rank 0."""

from collections.abc import Callable

from pretrain.callbacks.base import Callback, Loop, Metrics
from pretrain.tracking import Trackers


class Tracking(Callback):
    """Log the metrics of the trainer and of earlier callbacks.

    Args:
        build: builds the trackers; called only on rank 0.
    """

    def __init__(self, build: Callable[[], Trackers]):
        self._build = build
        self._trackers: Trackers | None = None

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        if trainer.processes.is_main:
            self._trackers = self._build()
            self._log(trainer, metrics)

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        self._log(trainer, metrics)

    def _log(self, trainer: Loop, metrics: Metrics) -> None:
        if self._trackers is not None and metrics:
            self._trackers.log(trainer.step, metrics)

    def on_end(self, trainer: Loop, error: BaseException | None) -> None:
        if self._trackers is not None:
            self._trackers.close(ok=error is None)
