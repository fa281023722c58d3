"""``metrics.jsonl``: the metrics of a run, one strict JSON object per line.

A line is complete with its newline. Each line is a single ``write`` to a file opened for appending. A killed process
therefore leaves at most one incomplete line, at the end. Readers skip this line, and a resumed run removes it.
"""

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fmoe.errors import UserError
from fmoe.files import write_atomically
from pretrain.tracking.tracker import Metrics

T = TypeVar("T")
Row = dict[str, Any]  # values by key


class JsonlTracker:
    """Append every metric to a file of JSON lines.

    JSON has no NaN and no infinity. Such a value is written as null, and the line also gets the key ``KEY_nonfinite``
    with ``"nan"``, ``"inf"`` or ``"-inf"``. For a list, ``KEY_nonfinite`` is a list with null at the finite values.

    Args:
        path: the file, in an existing folder.
        resume_step: step of the checkpoint to resume from. Lines of later steps are removed, so that no step appears
            twice. None for a new run; an existing file is then renamed to ``NAME.old``.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        if path.exists():
            if resume_step is not None:  # a crash leaves the old file intact
                with path.open("rb") as file:
                    lines = enumerate(complete_lines(file), start=1)
                    valid = (line for number, line in lines if parse_row(line, path, number)["step"] <= resume_step)
                    write_atomically(path, valid)
            elif path.stat().st_size > 0:
                path.replace(path.with_name(path.name + ".old"))
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def log(self, step: int, metrics: Metrics) -> None:
        """Append one line. It survives the end of this process and, after `close`, a power failure.

        Raises:
            UserError: the line cannot be written: the disk is full, or the file was removed.
        """
        row: Row = {"step": step}
        for key, value in metrics.items():
            if key in row:
                raise ValueError(
                    f"metric {key!r} is a duplicate: the line already has this key, as the step or as KEY_nonfinite of "
                    "another metric; rename the metric"
                )
            row.update(_strict(key, value))
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        if os.fstat(self._file).st_nlink == 0:
            raise UserError(f"{self._path} was removed or replaced during the run: resume from the newest checkpoint")
        with self._refusing_full_disks():
            while line:  # the rest of a line of which the disk took a part is refused with the reason
                line = line[os.write(self._file, line) :]

    def close(self, ok: bool = True) -> None:
        """Sync and close the file."""
        try:
            with self._refusing_full_disks():
                os.fsync(self._file)
        finally:
            os.close(self._file)

    @contextlib.contextmanager
    def _refusing_full_disks(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written: {error.strerror}; make room, then resume from the newest checkpoint"
            ) from error


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a ``metrics.jsonl`` in order of steps, without an incomplete last line.

    Steps may go back, as in a file concatenated from the parts of a resumed run: see `without_replaced`.

    Raises:
        UserError: the file is missing, or a line is not a row (see `parse_row`).
    """
    if not path.exists():
        raise UserError(f"metrics file {path} does not exist")
    with path.open("rb") as file:
        rows = [parse_row(line, path, number) for number, line in enumerate(complete_lines(file), start=1)]
    return without_replaced(rows, lambda row: row["step"])


def complete_lines(file: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file up to a line without its newline, which can only be the last."""
    return itertools.takewhile(lambda line: line.endswith(b"\n"), file)


def parse_row(line: bytes, path: Path, number: int) -> Row:
    """Return a row of a ``metrics.jsonl``.

    Raises:
        UserError: the line is not a JSON object with a step from 0 to 2^32 - 1. The message has path and number.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < 1 << 32:
        raise UserError(f"{path}, line {number}: not a JSON object with a step from 0 to 2^32 - 1")
    return row


def without_replaced(rows: Iterable[T], step_of: Callable[[T], int]) -> list[T]:
    """Drop rows that a later row replaces: a row of an earlier step replaces all rows of its step and of later ones."""
    valid: list[T] = []
    for row in rows:
        step = step_of(row)
        if valid and step < step_of(valid[-1]):
            while valid and step <= step_of(valid[-1]):
                valid.pop()
        valid.append(row)
    return valid


def _strict(key: str, value: Any) -> Row:
    if value is None or isinstance(value, str):
        return {key: value}
    if isinstance(value, list | tuple):
        names = [_nonfinite_name(key, item) for item in value]
        items = [item if name is None else None for item, name in zip(value, names, strict=True)]
        return {key: items, f"{key}_nonfinite": names} if any(names) else {key: items}
    name = _nonfinite_name(key, value)
    return {key: value} if name is None else {key: None, f"{key}_nonfinite": name}


def _nonfinite_name(key: str, number: float | int) -> str | None:
    if not isinstance(number, float | int):
        # A tensor in particular: reading it would synchronize the device.
        raise TypeError(
            f"metric {key!r} is or contains a {type(number).__name__}, not a number, a list of numbers or a str"
        )
    return None if math.isfinite(number) else str(float(number))
