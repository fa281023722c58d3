"""Progress of a long command: a bar on a terminal, occasional lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fmoe.errors import require

_SECONDS_BETWEEN_LINES = 15.0

# Called with bytes, documents and tokens so far.
Report = Callable[[int, int, int], None]


@contextmanager
def show_progress(purpose: str, total_bytes: int | None, enabled: bool) -> Iterator[Report]:
    """Yield a function that shows progress on stderr, given the bytes, documents and tokens so far.

    The function does nothing unless ``enabled``.

    Args:
        purpose: label of the progress bar or lines.
        total_bytes: bytes at the end; None if unknown.
    """
    if not enabled:
        yield lambda done, documents, tokens: None
    elif sys.stderr.isatty():
        with bar(purpose, total_bytes, _columns, documents=0, tokens=0) as update:
            yield lambda done, documents, tokens: update(done, documents=documents, tokens=tokens)
    else:
        yield _lines(purpose, total_bytes)


def _lines(purpose: str, total_bytes: int | None) -> Report:
    last = time.monotonic()

    def report(done: int, documents: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last < _SECONDS_BETWEEN_LINES:
            return
        last = time.monotonic()
        share = f"{done / 2**20:,.1f} MiB" if total_bytes is None else f"{100 * done // max(total_bytes, 1)}%"
        sys.stderr.write(f"{purpose}: {share}, {documents:,} documents, {tokens:,} tokens\n")
        sys.stderr.flush()

    return report


@contextmanager
def bar(
    purpose: str, total: int | None, columns: Callable[[Any], Sequence[Any]], **fields: int
) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr; yield a function of what is done and, as keywords, of the ``fields``.

    Args:
        columns: function of the module ``rich.progress``; returns columns to show before the remaining time.
        fields: first values that columns show.
    """
    console = require("rich.console", "pretrain", "the progress bar")
    rich = require("rich.progress", "pretrain", "the progress bar")
    shown = (rich.TextColumn("{task.description}"), rich.BarColumn(), *columns(rich), rich.TimeRemainingColumn())
    with rich.Progress(*shown, console=console.Console(stderr=True), transient=True) as progress:
        task = progress.add_task(purpose, total=total, **fields)
        yield lambda done, **values: progress.update(task, completed=done, **values)


def _columns(rich: Any) -> Sequence[Any]:
    counts = rich.TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens")
    return rich.TaskProgressColumn(), counts, rich.TransferSpeedColumn()
