"""Base class of callbacks, and the loop as they see it."""

from typing import Any, Protocol

from pretrain.checkpoint import Snapshot
from pretrain.checkpoint.host import HostBuffers
from pretrain.config import Recipe
from pretrain.data.inputs import Inputs
from pretrain.engine import Engine
from pretrain.process import Processes

Metrics = dict[str, float | int | list[float] | None]


class Loop(Protocol):
    """Attributes of the trainer that callbacks read; `pretrain.trainer.Trainer` documents them."""

    step: int
    is_stopping: bool
    was_skipped: bool
    recipe: Recipe
    processes: Processes
    engine: Engine
    inputs: Inputs

    @property
    def is_done(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    def snapshot(self, buffers: HostBuffers | None = None) -> Snapshot: ...


class Callback:
    """Base class whose hooks do nothing. Hooks run on every rank in the same order, so they may communicate."""

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        """Run before the first step of this process; ``trainer.step`` steps are completed. May add metrics, which are
        logged for that number of steps."""

    def before_step(self, trainer: Loop) -> None:
        """Run before every step; ``trainer.step`` steps are completed."""

    def check_step(self, trainer: Loop, loss: float, grad_norm: float) -> str | None:
        """Run within a step, before the model changes; ``trainer.step`` does not count the step yet.

        Args:
            loss, grad_norm: bitwise equal on every rank; not finite if the value of any rank is not finite.

        Returns:
            Reason to skip the step, or None. Must be the same on every rank.
        """

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        """Run after a step, which ``trainer.step`` counts. May add metrics, which later callbacks see."""

    def on_end(self, trainer: Loop, error: BaseException | None) -> None:
        """Run when the run ends, also with an error; called for every callback whose `on_start` was called."""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state for checkpoints, in types of `pretrain.checkpoint.codec`; the same on all ranks.
        An empty dictionary is not saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned; not called for a checkpoint without this callback's state."""
