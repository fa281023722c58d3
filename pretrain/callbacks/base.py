"""A callback, and the loop that it sees."""

from typing import Any, Protocol

from pretrain.checkpoint import Snapshot
from pretrain.checkpoint.host import HostBuffers
from pretrain.config import Recipe
from pretrain.data.inputs import Inputs
from pretrain.engine import Engine
from pretrain.process import Processes

Metrics = dict[str, float | int | list[float] | None]


class Loop(Protocol):
    """The trainer, as far as callbacks read it; `pretrain.trainer.Trainer` documents the attributes."""

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
    """Called on every rank, at the same places: a callback may communicate. The default does nothing."""

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        """Before the first step; ``trainer.step`` is where it begins. May add to the metrics of that place."""

    def before_step(self, trainer: Loop) -> None:
        """Before every step, of which ``trainer.step`` were made."""

    def check_step(self, trainer: Loop, loss: float, grad_norm: float) -> str | None:
        """Within a step, before anything of the model changed; ``trainer.step`` does not count it yet.

        Args:
            loss, grad_norm: the same bits on every rank; not finite if they are not on any rank.

        Returns:
            Why the step is skipped; None to make it. The same on every rank.
        """

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        """After a step, which ``trainer.step`` counts already. May add to the step's metrics for those behind it."""

    def on_end(self, trainer: Loop, error: BaseException | None) -> None:
        """At the end, also after an error; every callback that was started is ended."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this callback in a checkpoint, for `pretrain.checkpoint.codec`; the same on all ranks.
        Empty for none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; not called for a checkpoint without state of this callback."""
