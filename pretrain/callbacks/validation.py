"""Validation loss."""

from pretrain.callbacks.base import Callback, Metrics


class Validation(Callback):
    """Adds ``val/loss`` before the first step, every so many steps, and after the last."""

    def __init__(self, every: int, sequences: int):
        self.every, self.sequences = every, sequences

    def on_start(self, trainer, metrics: Metrics) -> None:
        if trainer.step == 0:
            self._evaluate(trainer, metrics)

    def on_step(self, trainer, metrics: Metrics) -> None:
        if trainer.step % self.every == 0 or trainer.is_done:
            self._evaluate(trainer, metrics)

    def _evaluate(self, trainer, metrics: Metrics) -> None:
        metrics["val/loss"] = trainer.engine.evaluate(trainer.inputs.validation, self.sequences)
