"""Evaluation on tasks of lm-evaluation-harness."""

from fmoe.errors import require
from pretrain.callbacks.base import Callback, Loop, Metrics
from pretrain.config import Recipe
from pretrain.data.opening import open_tokenizer


class TaskEvaluation(Callback):
    """Add metrics ``eval/TASK/METRIC`` every ``evaluation.every`` steps, and after the last step.

    As with `Validation`, no evaluation follows a signal that stops the run.

    Raises:
        UserError: the package lm_eval is not installed; otherwise, see ``pretrain.inference.harness.Tasks``.
    """

    def __init__(self, recipe: Recipe):
        require("lm_eval", "lm-eval", f"evaluation.tasks={list(recipe.evaluation.tasks)}")
        from pretrain.inference import harness

        self._every = recipe.evaluation.every
        self._tasks = harness.Tasks(recipe)
        self._wrap = harness.HarnessModel

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        self._model = self._wrap(trainer.engine, open_tokenizer(trainer.recipe))

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        if trainer.is_done or (trainer.step % self._every == 0 and not trainer.is_stopping):
            metrics |= self._tasks.evaluate(self._model)
