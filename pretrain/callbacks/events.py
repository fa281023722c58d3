"""Events of a run, written to events.jsonl."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrain.callbacks.base import Callback, Loop, Metrics
from pretrain.tracking.events import EventLog

logger = logging.getLogger(__name__)

# Loggers whose warnings are events of the run.
_LOGGERS = ("fmoe", "megatron_patch", "pretrain")


class Events(Callback):
    """Record the events of a run on rank 0 (`pretrain.tracking.events`): start and end, saves, and warnings.

    The warnings come from the loggers ``fmoe``, ``megatron_patch`` and ``pretrain``. They are still printed. The
    attribute ``event`` of a log record (``extra={"event": (step, "skip")}``) sets the step and the kind of its event.
    If an event cannot be written, the run continues with a warning, and stops recording events.

    Args:
        path: the file. A new run renames an existing one to ``NAME.old``.
        resumed_from: checkpoint that the run resumes from; None for a new run.
        changes: changes of the recipe since that checkpoint.
    """

    def __init__(self, path: Path, resumed_from: Path | None, changes: Sequence[str] = ()):
        self.path = path
        self.resumed_from = resumed_from
        self.changes = changes
        self._log: EventLog | None = None
        self._handler: _Handler | None = None

    def on_start(self, trainer: Loop, metrics: Metrics) -> None:
        if not trainer.processes.is_main:
            return
        if self.resumed_from is None and self.path.exists():
            self.path.replace(self.path.with_name(self.path.name + ".old"))
        self._log = EventLog(self.path)
        self._handler = _Handler(lambda event, text: self._add(*(event or (trainer.step, "warning")), text))
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self._handler)
        if self.resumed_from is None:
            self._add(trainer.step, "start", f"of {trainer.recipe.train.steps} steps")
        else:
            changed = f" with {', '.join(self.changes)}" if self.changes else ""
            self._add(trainer.step, "resume", f"from {self.resumed_from}{changed}")

    def saved(self, step: int, folder: Path) -> None:
        """Record that a checkpoint is on disk. Safe to call from any thread."""
        self._add(step, "save", f"{folder.parent.name}/{folder.name}")

    def on_end(self, trainer: Loop, error: BaseException | None) -> None:
        if self._log is None or self._handler is None:
            return
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self._handler)
        if error is not None:
            self._add(trainer.step, "error", f"{type(error).__name__}: {error}")
        elif trainer.is_done:
            self._add(trainer.step, "end", "the last step is completed")
        else:
            self._add(trainer.step, "stop", "by a signal")

    def _add(self, step: int, kind: str, text: str) -> None:
        if self._log is None:
            return
        try:
            self._log.add(step, kind, text)
        except OSError as error:
            self._log = None
            logger.warning("%s cannot be written: the run continues without recording events: %s", self.path, error)


class _Handler(logging.Handler):
    """Handler that passes each warning to ``add``."""

    def __init__(self, add: Callable[[tuple[int, str] | None, str], None]):
        super().__init__(logging.WARNING)
        self._add_event = add
        self._process = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        # Python itself prints only warnings that reach no handler, but they reach this one.
        if logging.lastResort is not None and not self._has_others(record):
            logging.lastResort.handle(record)
        if os.getpid() == self._process:  # not in a forked data worker
            self._add_event(getattr(record, "event", None), record.getMessage())

    def _has_others(self, record: logging.LogRecord) -> bool:
        ancestor: logging.Logger | None = logging.getLogger(record.name)
        while ancestor is not None:
            if any(handler is not self for handler in ancestor.handlers):
                return True
            ancestor = ancestor.parent if ancestor.propagate else None
        return False
