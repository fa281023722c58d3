"""Interface of trackers, and a group of trackers."""

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from fmoe.errors import UserError, one_line
from pretrain.tracking.loads import LoadMatrix

Metrics = Mapping[str, float | int | list[float] | str | LoadMatrix | None]

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Destination of metrics. `pretrain.tracking.metrics` declares their names and units."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record metrics of a step. A step may be logged more than once, for example with its validation loss."""

    def close(self, ok: bool = True) -> None:
        """End the tracking of a run; ``ok=False`` marks a failed run."""


class Trackers:
    """Group of trackers.

    Errors of a required tracker are raised. An optional tracker that raises is dropped with one warning, so that an
    unreachable dashboard does not end the training.

    Args:
        required: trackers that keep the metrics of the run, such as `JsonlTracker`.
        optional: consoles and dashboards.
        view: returns a step's metrics for the optional trackers, for example with pictures added.
    """

    def __init__(
        self,
        required: Iterable[Tracker],
        optional: Iterable[Tracker] = (),
        view: Callable[[int, Metrics], Metrics] = lambda _, metrics: metrics,
    ) -> None:
        self._required = list(required)
        self._optional = list(optional)
        self._view = view

    def add_optional(self, kind: Callable[..., Tracker], *arguments: Any, **options: Any) -> None:
        """Build an optional tracker, ``kind(*arguments, **options)``, and add it.

        A UserError is raised. After any other error, the run continues without the tracker, and a warning names it.
        """
        try:
            self._optional.append(kind(*arguments, **options))
        except UserError:
            raise
        except Exception as error:
            _warn_dropped(kind.__name__, error)

    def log(self, step: int, metrics: Metrics) -> None:
        """Log to every tracker; see `Tracker.log`."""
        for tracker in self._required:
            tracker.log(step, metrics)
        seen = self._view(step, metrics)
        for tracker in tuple(self._optional):
            try:
                tracker.log(step, seen)
            except Exception as error:
                self._optional.remove(tracker)
                _warn_dropped(type(tracker).__name__, error)

    def close(self, ok: bool = True) -> None:
        """Close every tracker, the required ones first; see `Tracker.close`. A second call does nothing."""
        try:
            while self._required:
                self._required.pop(0).close(ok)
        finally:
            while self._optional:
                tracker = self._optional.pop(0)
                try:
                    tracker.close(ok)
                except Exception as error:
                    _warn_dropped(type(tracker).__name__, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(ok=kind is None)


def kept_id(path: Path, *, is_new: bool) -> str:
    """Return the id stored in the file ``path``. If ``is_new`` or without such a file, store a new random id first.

    A dashboard that cannot remove logged steps shows each start or resume of a run as a separate run. The id groups
    them.
    """
    stored = "" if is_new or not path.exists() else path.read_text().strip()
    if not stored:
        stored = uuid.uuid4().hex[:12]
        path.write_text(stored + "\n")
    return stored


def _warn_dropped(label: str, error: Exception) -> None:
    logger.warning("%s failed and is no longer used; the run is unaffected: %s", label, one_line(error))
