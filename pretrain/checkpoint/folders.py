"""The folder of checkpoints: step names, complete steps, and removal of old ones.

A step is complete when it has its final name and a manifest. Other names are:

* ``step-N.tmp``: being written, or left by a process that died while writing;
* ``step-N.trash``: being removed;
* ``step-N.damaged``: skipped when a run resumed from an older checkpoint.
"""

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

from fmoe.errors import UserError
from fmoe.files import sync

MANIFEST = "manifest.json"
STATE = "state.json"
TMP = ".tmp"
TRASH = ".trash"
DAMAGED = ".damaged"
logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Return the name of a step's folder: ``20`` -> ``"step-00000020"``."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder name: ``"step-00000020"`` -> ``20``; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def shard_name(rank: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"shard-{rank:05d}.safetensors"


def rank_name(rank: int) -> str:
    """Return the name of the file with a rank's own state, such as its random generators."""
    return f"rank-{rank:05d}.json"


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, ascending; none if the folder does not exist."""
    return [step for step, path in _paths_of_steps(folder) if (path / MANIFEST).is_file()]


def step_folders(folder: Path) -> list[Path]:
    """Return the step folders in a checkpoints folder or in a run's folder, newest first.

    Folders without a manifest, which are damaged checkpoints, are included. So are links, even broken ones.
    """
    for parent in (Path(folder), Path(folder) / "checkpoints"):
        paths = [path for _, path in reversed(_paths_of_steps(parent)) if path.is_symlink() or path.is_dir()]
        if paths:
            return paths
    return []


def _paths_of_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return the entries of a folder with the name of a step, with their steps, ascending."""
    if not Path(folder).is_dir():
        return []
    numbered = [(step_of(path.name), path) for path in Path(folder).iterdir()]
    return sorted((step, path) for step, path in numbered if step is not None)


def latest(folder: Path) -> Path | None:
    """Return the complete checkpoint with the highest step, or None."""
    complete = steps(folder)
    return Path(folder) / step_name(complete[-1]) if complete else None


def remove(path: Path) -> None:
    """Remove a folder, file or link, if it exists. The target of a link stays."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_leftovers(folder: Path, suffixes: tuple[str, ...] = (TMP, TRASH)) -> None:
    """Remove the folders ``step-N`` + suffix that dead processes left in ``folder``, for each of ``suffixes``.

    Call it on one rank, while no rank saves.
    """
    for suffix in suffixes:
        for leftover in Path(folder).glob(f"step-*{suffix}"):
            if step_of(leftover.name.removesuffix(suffix)) is not None:
                _discard(leftover)


def _discard(path: Path) -> None:
    """Remove a file or folder; log an OSError instead of raising it."""
    try:
        remove(path)
    except OSError as error:
        logger.warning("%s cannot be removed, the run continues: %s", path, error)


def set_aside(path: Path) -> Path:
    """Rename a damaged step folder to ``step-N.damaged`` (or ``.damaged.2``, ...), and return the new path."""
    number = 1
    target = path.with_name(path.name + DAMAGED)
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}{DAMAGED}.{number}")
    path.rename(target)
    sync(path.parent)
    return target


def keep_last(folder: Path, n: int, keep_every: int | None = None) -> list[int]:
    """Remove all complete checkpoints but the newest ``n`` and the multiples of ``keep_every``. Call it on one rank.

    A checkpoint is renamed to ``step-N.trash`` before its removal, so that a crash never leaves a partial one under its
    final name. Folders ``step-N.trash`` of an earlier crash are removed too.

    Args:
        n: at least 1.
        keep_every: also keep all steps that are multiples of this number; None keeps only the newest ``n``.

    Returns:
        The removed steps, ascending.

    Raises:
        UserError: ``n`` or ``keep_every`` is less than 1.
    """
    if n < 1:
        raise UserError(f"n={n} must be at least 1")
    if keep_every is not None and keep_every < 1:
        raise UserError(f"keep_every={keep_every} must be at least 1")
    folder = Path(folder)
    if not folder.is_dir():
        return []
    remove_leftovers(folder, (TRASH,))
    removed = [step for step in steps(folder)[:-n] if keep_every is None or step % keep_every]
    for step in removed:
        final = folder / step_name(step)
        trash = final.with_name(final.name + TRASH)
        with contextlib.suppress(FileNotFoundError):  # moved elsewhere meanwhile
            final.rename(trash)
            sync(folder)
            _discard(trash)
    return removed
