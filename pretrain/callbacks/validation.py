"""Validation loss."""

from pretrain.callbacks.base import Callback, Loop, Metrics


class Validation(Callback):
    """Add the metric ``val/loss`` before the first step of a new run, every ``every`` steps, and after the last step.

    If a signal stops the run before its last step, no validation follows, because the process may have only seconds
    left.
    """

    def __init__(self, every: int, sequences: int):
        self.every = every
        self.sequences = sequences

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        if trainer.step == 0:
            self._evaluate(trainer, metrics)

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        if trainer.is_done or (trainer.step % self.every == 0 and not trainer.is_stopping):
            self._evaluate(trainer, metrics)

    def _evaluate(self, trainer: Loop, metrics: Metrics) -> None:
        if trainer.inputs.validation is not None:
            metrics["val/loss"] = trainer.engine.evaluate(trainer.inputs.validation, self.sequences)
