"""Logging of metrics on rank 0."""

from pathlib import Path

from pretrain.callbacks.base import Callback, Loop, Metrics
from pretrain.config import Recipe
from pretrain.tracking import Trackers, build_trackers


class Tracking(Callback):
    """Log the metrics of the trainer and of earlier callbacks.

    Args:
        resume_step: step of the checkpoint that the run resumes from; None for a new run.
    """

    def __init__(self, recipe: Recipe, resume_step: int | None):
        self.recipe = recipe
        self.resume_step = resume_step
        self._trackers: Trackers | None = None

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        if trainer.processes.is_main:
            tracking = self.recipe.tracking
            self._trackers = build_trackers(
                Path(self.recipe.run.folder),
                wandb=tracking.wandb,
                tensorboard=tracking.tensorboard,
                trackio=tracking.trackio,
                console_every=tracking.console_every,
                total_steps=self.recipe.train.steps,
                config=self.recipe.values(),
                resume_step=self.resume_step,
                picture_every=tracking.picture_every,
                project=tracking.project,
            )
            self.on_step(trainer, metrics)

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        if self._trackers is not None and metrics:
            self._trackers.log(trainer.step, metrics)

    def on_end(self, trainer: Loop, error: BaseException | None) -> None:
        if self._trackers is not None:
            self._trackers.close(ok=error is None)
