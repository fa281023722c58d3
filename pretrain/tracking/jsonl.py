"""``metrics.jsonl``: the record of a run, one strict JSON object a line.

A line counts once its newline is written. Each is a single ``write`` to a file opened for appending, so a process
killed at any moment leaves at most one torn line, the last, which readers skip and the next start removes.
"""

import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fmoe.errors import UserError
from pretrain.tracking.tracker import Metrics


class JsonlTracker:
    """Appends every metric to a file of JSON lines.

    JSON knows no NaN and no infinity: such a value is written as null, and ``KEY_nonfinite`` says ``"nan"``, ``"inf"``
    or ``"-inf"`` (for a list: a list with null at the finite values).

    Args:
        path: the file, in an existing folder.
        resume_step: lines of later steps are removed, so that no step appears twice after going back to a checkpoint.
            None begins a new record; one that is there already is kept beside it as ``NAME.old``.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        if path.exists():
            if resume_step is not None:
                _rewind(path, resume_step)
            elif path.stat().st_size > 0:
                path.replace(path.with_name(path.name + ".old"))
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def log(self, step: int, metrics: Metrics) -> None:
        """Appends one line. It outlives this process from here on, and a power failure from `close` on."""
        row: dict[str, Any] = {"step": step}
        for key, value in metrics.items():
            if key in row:
                raise ValueError(f"metric {key!r} is there twice: it is also the name of the step or of a marker")
            row.update(_strict(key, value))
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        if os.fstat(self._file).st_nlink == 0:
            raise OSError(errno.ENOENT, "the record was removed or replaced while the run wrote it", str(self._path))
        if os.write(self._file, line) != len(line):
            raise OSError(errno.ENOSPC, f"line of step {step} is written in part", str(self._path))

    def close(self, ok: bool = True) -> None:
        """Syncs and closes the file."""
        os.fsync(self._file)
        os.close(self._file)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl`` in the order they were logged, without a torn last line.

    Raises:
        UserError: the file is missing, or holds a line that no tracker has written.
    """
    if not path.exists():
        raise UserError(f"metrics file {path} does not exist")
    return [row for _, row in _complete_lines(path)]


def _complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # only the last line can lack its newline
            try:
                row = json.loads(line)
                is_row = isinstance(row, dict) and isinstance(row.get("step"), int)
            except (ValueError, RecursionError):
                is_row = False
            if not is_row:
                raise UserError(f"metrics file {path}, line {number}: not a JSON object with an integer step")
            yield line, row


def _rewind(path: Path, step: int) -> None:
    """Removes torn and later lines through a temporary and a rename: killed meanwhile, the old file stays whole."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as kept:
        kept.writelines(line for line, row in _complete_lines(path) if row["step"] <= step)
        kept.flush()
        os.fsync(kept.fileno())
    temporary.replace(path)


def _strict(key: str, value: Any) -> dict[str, Any]:
    """The entries for one metric, with nothing in them that strict JSON lacks."""
    if value is None or isinstance(value, str):
        return {key: value}
    if isinstance(value, list | tuple):
        names = [_nonfinite_name(key, item) for item in value]
        items = [item if name is None else None for item, name in zip(value, names, strict=True)]
        return {key: items, **({f"{key}_nonfinite": names} if any(names) else {})}
    name = _nonfinite_name(key, value)
    return {key: value} if name is None else {key: None, f"{key}_nonfinite": name}


def _nonfinite_name(key: str, number: float | int) -> str | None:
    if not isinstance(number, float | int):
        # A tensor in particular: its value would cost a device synchronisation nobody asked for.
        raise TypeError(f"metric {key!r} holds a {type(number).__name__}: a number, a list of numbers or str expected")
    return None if math.isfinite(number) else str(float(number))
