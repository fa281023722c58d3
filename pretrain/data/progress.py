"""Progress of a long command: a bar on a terminal, occasional lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
        with _bar(purpose, total_bytes) as report:
            yield report
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
def _bar(purpose: str, total_bytes: int | None) -> Iterator[Report]:
    console = require("rich.console", "pretrain", "the progress bar")
    rich = require("rich.progress", "pretrain", "the progress bar")
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens"),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console.Console(stderr=True), transient=True) as progress:
        task = progress.add_task(purpose, total=total_bytes, documents=0, tokens=0)
        yield lambda done, documents, tokens: progress.update(task, completed=done, documents=documents, tokens=tokens)
