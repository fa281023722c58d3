"""Base class of callbacks, and the loop as they see it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fmoe.errors import UserError, add_name, build_named
from pretrain.checkpoint import Snapshot
from pretrain.checkpoint.host import HostBuffers
from pretrain.config import Recipe
from pretrain.data.inputs import Inputs
from pretrain.engine import Engine
from pretrain.start.process import Processes

Metrics = dict[str, float | int | list[float] | None]
State = dict[str, Any]


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
    """Base class whose hooks do nothing.

    Every rank runs the hooks in the same order, so they may communicate, except in `on_end` after an error.

    Attributes:
        registered: the callback's name in ``run.callbacks``; empty for the trainer's own callbacks.
    """

    registered = ""

    @property
    def state_key(self) -> str:
        """Key of the callback's state in checkpoints."""
        return f"run.callbacks.{self.registered}" if self.registered else type(self).__name__

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        """Run before the first step of this process; ``trainer.step`` is 0, or the step of the checkpoint resumed from.

        Metrics that the hook adds to ``metrics`` are logged at that step.
        """

    def before_step(self, trainer: Loop) -> None:
        """Run before every step; ``trainer.step`` does not count this step yet."""

    def on_progress(self, trainer: Loop) -> None:
        """Run at the beginning of every micro batch, in training and validation."""

    def check_step(self, trainer: Loop, loss: float, grad_norm: float) -> str | None:
        """Run within a step, before the model changes; ``trainer.step`` does not count the step yet.

        Not called if an earlier callback skips the step, or for an fp16 overflow that a lower loss scale may cure.

        Args:
            loss, grad_norm: reduced over all ranks, and bitwise equal on each. NaN or infinite if any rank's value is.

        Returns:
            Reason to skip the step, or None. Must be the same on every rank.
        """

    def on_step(self, trainer: Loop, metrics: Metrics) -> None:
        """Run after every step, which ``trainer.step`` now counts.

        Later callbacks see the metrics that the hook adds to ``metrics``.
        """

    def on_end(self, trainer: Loop, error: BaseException | None) -> None:
        """Run when training ends, also with an error. Called for every callback whose `on_start` was called."""

    def state_dict(self) -> State:
        """Return the callback's state for checkpoints, the same on all ranks.

        Its values have types that `pretrain.checkpoint.codec` supports. An empty dictionary is not saved.
        """
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned. Not called for a checkpoint without this callback's state."""


CALLBACKS: dict[str, Callable[..., Callback]] = {}
"""Registered callbacks by name."""


def register_callback(name: str, factory: Callable[..., Callback]) -> None:
    """Register a callback under a new name, for ``run.callbacks`` of a recipe.

    Args:
        factory: a class, or a function that returns the callback. It is called with the recipe, and with the options in
            ``run.callback_options.NAME`` as keywords, in every process that checks or runs the recipe.

    Raises:
        UserError: the name is empty or belongs to another callback.
    """
    add_name(CALLBACKS, "callback", name, factory)


def build_callbacks(recipe: Recipe) -> list[Callback]:
    """Build the callbacks of ``run.callbacks``, in their order.

    Raises:
        UserError: a callback is unknown, listed twice, fails with its options or is not a ``Callback``; or options are
            set for a callback that is not listed.
    """
    names = recipe.run.callbacks
    tables = recipe.run.callback_options
    for name in tables:
        if name not in names:
            raise UserError(f"run.callback_options.{name} is set, but run.callbacks={list(names)} lacks {name}")
    callbacks = []
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"run.callbacks={list(names)} has {name} twice")
        options = tables.get(name, {})
        if not isinstance(options, Mapping):
            raise UserError(f"run.callback_options.{name}={options!r} must be a table")
        options_key = f"run.callback_options.{name}"
        callback = build_named(CALLBACKS, "run.callbacks", name, options_key, options, recipe=recipe)
        if not isinstance(callback, Callback):
            raise UserError(
                f"run.callbacks={name} must build a pretrain.callbacks.Callback, not {type(callback).__name__}"
            )
        callback.registered = name
        callbacks.append(callback)
    return callbacks
