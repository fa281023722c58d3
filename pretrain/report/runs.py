"""Readers of a run folder that may still be growing."""

import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from fmoe.errors import UserError
from pretrain.config.renamed import with_new_names
from pretrain.report.record import Record
from pretrain.tracking.events import EVENTS, read_events
from pretrain.tracking.folder import CONFIG, METRICS, RUN_INFO, read_run_info
from pretrain.tracking.jsonl import Row, complete_lines, parse_row, without_replaced


class MetricsFile:
    """A ``metrics.jsonl`` that may be growing.

    Args:
        path: the file, which may not exist yet.

    Attributes:
        record: aggregate of the complete lines up to the last `refresh`, without rows that later rows replace (after a
            resume).
    """

    def __init__(self, path: Path):
        self.path = path
        self.record = Record()
        self._inode: int | None = None
        self._offset = 0  # of the first line that has not been read
        self._num_lines = 0

    def refresh(self) -> bool:
        """Read the lines added since the last call; return whether there were any.

        A line without its newline is left for the next call. Steps may go back (see `without_replaced`).

        Raises:
            UserError: the file cannot be read, or a line is not a row (see `parse_row`).
        """
        try:
            with self.path.open("rb") as file:
                before = self._offset
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode = status.st_ino
                    self._reset()  # another file: the run was resumed from an earlier step
                file.seek(self._offset)
                for _, _, row in self._new_rows(file):
                    if self.record.step is not None and row["step"] < self.record.step:
                        self._read_again(file)
                        break
                    self._add(row)
                return self._offset != before
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error

    def _reset(self) -> None:
        self.record = Record()
        self._offset = 0
        self._num_lines = 0

    def _new_rows(self, file: BinaryIO) -> Iterator[tuple[int, int, Row]]:
        """Yield number, offset and row of each complete line."""
        for line in complete_lines(file):
            offset = self._offset
            self._offset += len(line)
            self._num_lines += 1
            yield self._num_lines, offset, parse_row(line, self.path, self._num_lines)

    def _read_again(self, file: BinaryIO) -> None:
        """Read the whole file again, without the rows that later rows replace."""
        self._reset()
        file.seek(0)
        # Without the rows, which may not fit into memory.
        lines = [(row["step"], number, offset) for number, offset, row in self._new_rows(file)]
        for _, number, offset in without_replaced(lines, lambda line: line[0]):
            file.seek(offset)
            self._add(parse_row(file.readline(), self.path, number))

    def _add(self, row: Row) -> None:
        try:
            self.record.add(row)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from error


class RunFolder:
    """Contents of a run folder.

    Args:
        folder: path of the run folder.

    Attributes:
        name: name of the run in the report.
        record: aggregate of the run's metrics.
        recipe: values of the resolved recipe by ``section.key``; empty without a recipe.
        run_info: content of ``run.json``; empty if it does not exist yet.
        events: events of ``events.jsonl``, and events derived from metrics.

    Raises:
        UserError: the folder does not exist.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise UserError(f"{folder} is not a run folder: it does not exist or is not a folder")
        self.folder = folder
        self.name = folder.resolve().name
        self._metrics = MetricsFile(folder / METRICS)
        self._versions: dict[str, tuple[int, int] | None] = {}  # of the other files, when they were last read
        self.recipe: Row = {}
        self.run_info: Row = {}
        self._logged: list[Row] = []

    @property
    def record(self) -> Record:
        return self._metrics.record

    def refresh(self) -> bool:
        """Read new data; return whether there was any.

        Raises:
            UserError: a file is damaged.
        """
        is_new = self._metrics.refresh()
        versions = {name: _version(self.folder / name) for name in (CONFIG, RUN_INFO, EVENTS)}
        changed = {name for name, version in versions.items() if version != self._versions.get(name)}
        if CONFIG in changed:
            self.recipe = _read_recipe(self.folder / CONFIG)
        if RUN_INFO in changed:
            self.run_info = read_run_info(self.folder)
        if EVENTS in changed:
            self._logged = read_events(self.folder / EVENTS)
        self._versions = versions
        return is_new or bool(changed)

    def require_steps(self) -> None:
        """Raise UserError if the run has no step yet."""
        if not (self.folder / METRICS).is_file():
            raise UserError(f"{self.folder} has no {METRICS}: pass the folder of a run that has trained")
        if self.record.step is None:
            raise UserError(f"{self.folder / METRICS} has no step yet")

    @property
    def events(self) -> list[Row]:
        """Events in order of steps. ``lost`` marks an event after which the run was resumed from an earlier step."""
        logged = {(event["kind"], event["step"]) for event in self._logged}
        events: list[Row] = []
        for event in self._logged:
            if event["kind"] in ("resume", "start"):
                events = [e | {"lost": True} if e["step"] > event["step"] else e for e in events]
            events.append({**event, "lost": False})
        for event in self.record.events:
            if (event["kind"], event["step"]) not in logged:
                events.append({**event, "time": None, "lost": False})
        return sorted(events, key=lambda e: e["step"])

    @property
    def total_steps(self) -> int | None:
        """The recipe's number of steps; None without a recipe."""
        steps = self.recipe.get("train.steps")
        return steps if isinstance(steps, int) else None

    def layer_label(self, layer: int) -> str:
        """Return the label of a layer, such as ``layer 3`` or, in a T5, ``encoder 3`` or ``decoder 3``."""
        encoder = self.recipe.get("model.num_layers")
        if self.recipe.get("model.kind") == "t5" and isinstance(encoder, int):
            return f"encoder {layer}" if layer <= encoder else f"decoder {layer - encoder}"
        return f"layer {layer}"


def _version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def open_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """Open run folders under distinct names: the folder's name, prefixed by as many parent folders as needed.

    Raises:
        UserError: a folder does not exist, or is given twice.
    """
    runs: dict[Path, RunFolder] = {}
    for folder in folders:
        run = RunFolder(folder)
        path = folder.resolve()
        if path in runs:
            raise UserError(f"{folder} is given twice")
        runs[path] = run
    for path, run in runs.items():
        depth = 1
        while any(other != path and other.parts[-depth:] == path.parts[-depth:] for other in runs):
            depth += 1
        run.name = "/".join(path.parts[-depth:])
    return list(runs.values())


def _read_recipe(path: Path) -> Row:
    try:
        sections = with_new_names(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    recipe: Row = {}
    for name, section in sections.items():
        if isinstance(section, dict):
            recipe |= {f"{name}.{key}": value for key, value in section.items()}
        else:
            recipe[name] = section
    return recipe
