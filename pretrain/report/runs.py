"""Readers of a run folder that may still be growing."""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fmoe.errors import UserError
from pretrain.report.record import Record
from pretrain.tracking.events import EVENTS, read_events
from pretrain.tracking.folder import CONFIG, METRICS, RUN_INFO, read_run_info

# The start of a line as `JsonlTracker` writes it.
_STEP = re.compile(rb'\{"step": (\d+)[,}]')


class MetricsFile:
    """A ``metrics.jsonl`` that may be growing.

    Args:
        path: the file, which may not exist yet.

    Attributes:
        record: aggregate of the complete lines up to the last `refresh`, without rows that later rows replace (after a
            resume).
    """

    def __init__(self, path: Path):
        self.path, self.record = path, Record()
        self._inode: int | None = None
        self._read = self._lines = 0

    def refresh(self) -> bool:
        """Read the lines added since the last call; return whether there were any.

        A line without its newline is left for the next call. Steps may go back, as in a file concatenated from the
        parts of a resumed run. The later rows then replace the earlier ones.

        Raises:
            UserError: the file cannot be read, or a line is not a JSON object with a step from 0 to 2^32 - 1.
        """
        try:
            with self.path.open("rb") as file:
                before, status = self._read, os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._read:
                    # Another file: the run was resumed from an earlier step.
                    self.record, self._read, self._lines = Record(), 0, 0
                    self._inode = status.st_ino
                file.seek(self._read)
                for line in self._complete_lines(file):
                    row = self._parse(line)
                    if self.record.step is not None and row["step"] < self.record.step:
                        self._read_what_counts()
                        break
                    self._add(row)
                return self._read != before
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error

    def _complete_lines(self, file) -> Iterator[bytes]:
        for line in file:
            if not line.endswith(b"\n"):
                return
            self._read += len(line)
            self._lines += 1
            yield line

    def _read_what_counts(self) -> None:
        """Read the whole file again, without the rows that later rows replace."""
        self.record, self._read, self._lines = Record(), 0, 0
        kept: list[tuple[int, int, int]] = []  # rows that no later row replaces: step, offset, line number
        with self.path.open("rb") as file:
            for line in self._complete_lines(file):
                found = _STEP.match(line)
                step = int(found[1]) if found else self._parse(line)["step"]
                is_back = bool(kept) and kept[-1][0] > step
                while is_back and kept and kept[-1][0] >= step:
                    kept.pop()
                kept.append((step, self._read - len(line), self._lines))
            lines = self._lines
            for _, offset, self._lines in kept:  # for errors
                file.seek(offset)
                self._add(self._parse(file.readline()))
            self._lines = lines

    def _add(self, row: dict[str, Any]) -> None:
        try:
            self.record.add(row)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from error

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < 1 << 32:
            raise UserError(f"{self.path}, line {self._lines}: not a JSON object with a step from 0 to 2^32 - 1")
        return row


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
        self.folder, self.name = folder, folder.resolve().name
        self._metrics = MetricsFile(folder / METRICS)
        self._seen: dict[str, tuple[int, int] | None] = {}
        self.recipe: dict[str, Any] = {}
        self.run_info: dict[str, Any] = {}
        self._logged: list[dict[str, Any]] = []

    @property
    def record(self) -> Record:
        return self._metrics.record

    def refresh(self) -> bool:
        """Read new data; return whether there was any.

        Raises:
            UserError: a file is damaged.
        """
        is_new = self._metrics.refresh()
        if self._has_changed(CONFIG):
            self.recipe, is_new = _read_recipe(self.folder / CONFIG), True
        if self._has_changed(RUN_INFO):
            self.run_info, is_new = read_run_info(self.folder), True
        if self._has_changed(EVENTS):
            self._logged, is_new = read_events(self.folder / EVENTS), True
        return is_new

    def require_steps(self) -> None:
        """Raise UserError if the run has no step yet."""
        if not (self.folder / METRICS).is_file():
            raise UserError(f"{self.folder} has no {METRICS}: pass the folder of a run that has trained")
        if self.record.step is None:
            raise UserError(f"{self.folder / METRICS} has no step yet")

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events in order of steps. ``lost`` marks an event after which the run was resumed from an earlier step."""
        logged = {(event["kind"], event["step"]) for event in self._logged}
        found = [e for e in self.record.events if (e["kind"], e["step"]) not in logged]
        events: list[dict[str, Any]] = []
        for event in self._logged:
            if event["kind"] in ("resume", "start"):
                events = [e | {"lost": True} if e["step"] > event["step"] else e for e in events]
            events.append({**event, "lost": False})
        return sorted(events + [{**e, "time": None, "lost": False} for e in found], key=lambda e: e["step"])

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

    def _has_changed(self, name: str) -> bool:
        try:
            status = (self.folder / name).stat()
            now = (status.st_mtime_ns, status.st_size)
        except OSError:
            now = None
        before, self._seen[name] = self._seen.get(name), now
        return now != before


def open_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """Open run folders under distinct names: the folder's name, prefixed by as many parent folders as needed.

    Raises:
        UserError: a folder does not exist, or is given twice.
    """
    runs, paths = [], []
    for folder in folders:
        runs.append(RunFolder(folder))
        if folder.resolve() in paths:
            raise UserError(f"{folder} is given twice")
        paths.append(folder.resolve())
    for run, path in zip(runs, paths, strict=True):
        depth, others = 1, [other for other in paths if other != path]
        while any(other.parts[-depth:] == path.parts[-depth:] for other in others):
            depth += 1
        run.name = "/".join(path.parts[-depth:])
    return runs


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return {
        key: value
        for name, section in sections.items()
        for key, value in (
            ((f"{name}.{key}", value) for key, value in section.items())
            if isinstance(section, dict)
            else [(name, section)]
        )
    }
