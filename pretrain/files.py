"""Output files that appear complete or not at all, and JSON files."""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fmoe.errors import UserError
from fmoe.files import is_full, lock, sync

logger = logging.getLogger(__name__)


@contextmanager
def replacing(*paths: Path) -> Iterator[list[BinaryIO]]:
    """Yield a temporary binary file for each path. At the end of the ``with`` block, sync and rename each to its path.

    Of several paths, the last is the commit record: its old file is removed before the first rename, and its new file
    is renamed last. While the last path exists, all files are complete and from the same block.

    An error in the block removes the temporary files and keeps the old files. A killed process leaves ``NAME.PID.tmp``,
    which the next writer of these paths removes.

    Raises:
        UserError: a file cannot be created next to its path, or the disk is full.
    """
    for path in paths:
        _remove_leftovers(path)
    created: list[Path] = []
    try:
        with ExitStack() as stack:
            files = []
            for path in paths:
                temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
                files.append(stack.enter_context(_create(temporary)))
                created.append(temporary)
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
            with _locked(paths[-1].parent):  # renames of another process would mix the files of two runs
                if len(paths) > 1:
                    paths[-1].unlink(missing_ok=True)
                    sync(paths[-1].parent)
                for temporary, path in zip(created, paths, strict=True):
                    os.replace(temporary, path)
        for folder in {path.parent for path in paths}:
            sync(folder)
    except OSError as error:
        if is_full(error):
            raise UserError(f"cannot write {paths[0]}: {error.strerror}") from error
        raise
    finally:
        for temporary in created:
            with suppress(OSError):  # cleaning up must not hide the first error
                temporary.unlink(missing_ok=True)


def refuse_existing(paths: Iterable[Path], overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Raise a `UserError` if a path is one of ``inputs``, or exists but is not a file.

    An existing file also raises it if ``overwrite`` is False.
    """
    paths = list(paths)
    refuse_inputs(paths, inputs)
    for path in paths:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} exists and is not a file; choose another --out")
        if os.path.lexists(path) and not overwrite:
            raise UserError(f"{path} exists; pass --overwrite to replace it")


def refuse_inputs(outputs: Iterable[Path], inputs: Iterable[Path]) -> None:
    """Raise a `UserError` for the first output that is one of the inputs, even under another name."""
    existing = [path for path in inputs if os.path.exists(path)]  # others are reported when they are read
    for path in outputs:
        if path.exists() and any(path.samefile(file) for file in existing):
            raise UserError(f"{path} is an input and would be overwritten; choose another output")


def with_ending(prefix: Path, suffix: str) -> Path:
    """Append ``suffix`` to ``prefix``. Unlike ``with_suffix``, keep the dots of a name such as ``v1.5``.

    Raises:
        UserError: the prefix has no file name, such as ``.``, ``..`` or ``/``.
    """
    if prefix.name in ("", ".."):
        raise UserError(f"the prefix {str(prefix)!r} has no file name: add one, e.g. {prefix / 'train'}")
    return prefix.with_name(prefix.name + suffix)


def _create(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("xb")
    except OSError as error:
        if isinstance(error, FileExistsError) and path.exists():  # a process of the same id on another machine
            raise UserError(f"{path} is being written by another process: wait until it ends") from error
        raise UserError(f"cannot write in {path.parent}: {error.strerror}") from error
    lock(file.fileno())
    return file


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote ``path``."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)\.tmp")
    try:
        names = os.listdir(path.parent)
    except OSError:
        return  # the folder is missing, or `_create` reports the error
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        leftover = path.with_name(name)
        pid = int(match[1])
        if (pid != os.getpid() and _is_alive(pid)) or _is_locked(leftover):
            logger.warning("%s is kept: process %d may still be writing it", leftover, pid)
            continue
        with suppress(OSError):
            size = leftover.stat().st_size
            leftover.unlink()
            logger.warning("removed %s (%d bytes), left by process %d, which has ended", leftover, size, pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


def _is_locked(path: Path) -> bool:
    """Return whether a process on this or another machine is writing the file; True if unknown."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return not lock(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on ``folder`` in the ``with`` block."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing.

    Raises:
        UserError: the file is unreadable, or is not a JSON object.
    """
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is invalid: it must hold a JSON object")
    return value
