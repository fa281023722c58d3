"""Console output: one line every few steps and, on a terminal, a progress line below."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from fmoe.errors import UserError
from pretrain.tracking.metrics import DECLARED
from pretrain.tracking.tracker import Metrics

_REFRESH_SECONDS = 0.1
_MIN_WIDTH_FOR_BAR = 110

_PROGRESS_KEYS = frozenset(["loss", "val/loss", "lr", "tokens_per_second", "mfu"])


class ConsoleTracker:
    """Print the first step, every ``every``-th step, the last one, and every validation result.

    Args:
        total_steps: the run's last step.
        every: steps between lines.
        first_step: step at which a resumed run starts, to estimate the remaining time.
        console: output console; by default standard output.

    Raises:
        UserError: ``every`` is below 1.
    """

    def __init__(self, *, total_steps: int, every: int, first_step: int = 0, console: Console | None = None) -> None:
        if every < 1:
            raise UserError(f"console_every={every} must be at least 1")
        self._total_steps = total_steps
        self._every = every
        self._console = console or Console()
        self._has_printed = False
        self._latest: dict[str, Any] = {}
        self._refreshed_at = float("-inf")
        self._progress = _progress(self._console) if self._console.is_terminal else None
        self._task: Any = (
            self._progress.add_task("", total=total_steps, completed=first_step) if self._progress else None
        )

    def log(self, step: int, metrics: Metrics) -> None:
        """Print the step if it is due."""
        is_due = not self._has_printed or step % self._every == 0 or step == self._total_steps or "val/loss" in metrics
        text = _fields(metrics) if is_due else ""
        if text:
            self._has_printed = True
            # soft_wrap: one step is one line, in a log file as in a narrow terminal.
            self._console.print(self._step(step) + text, markup=False, highlight=False, soft_wrap=True)
        if self._progress is not None:
            self._update_progress(self._progress, step, metrics)

    def close(self, ok: bool = True) -> None:
        """Remove the progress line."""
        if self._progress is not None:
            self._progress.stop()

    def _step(self, step: int) -> str:
        return f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"

    def _update_progress(self, progress: Progress, step: int, metrics: Metrics) -> None:
        self._latest.update((key, value) for key, value in metrics.items() if key in _PROGRESS_KEYS)
        progress.update(self._task, completed=step, description=self._step(step) + _fields(self._latest))
        progress.start()
        # Drawn here and not by a thread, which could hold a lock while the training loop forks data workers.
        now = time.monotonic()
        if now - self._refreshed_at >= _REFRESH_SECONDS:
            progress.refresh()
            self._refreshed_at = now


def _fields(metrics: Metrics) -> str:
    printed = ((metric.console, metrics.get(metric.key)) for metric in DECLARED if metric.console)
    return "".join("  " + text.format(value) for text, value in printed if value is not None)


def _progress(console: Console) -> Progress:
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
    if console.width >= _MIN_WIDTH_FOR_BAR:
        columns.append(BarColumn(bar_width=12))
    columns += [TextColumn("eta"), TimeRemainingColumn(compact=True)]
    return Progress(*columns, console=console, auto_refresh=False, transient=True)
