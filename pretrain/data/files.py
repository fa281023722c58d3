"""Output files that are there complete or not at all."""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fmoe.errors import UserError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(*paths: Path) -> Iterator[list[BinaryIO]]:
    """Opens a temporary file beside each path; the block writes them, and leaving it puts all of them in place.

    Files are synced, then renamed in the order given. The last path is the commit record: its old file is removed
    before the first rename, so while it exists, all the paths are complete and of one run. An error in the block
    removes the temporary files and leaves what was there before; a killed process leaves ``NAME.PID.tmp`` behind.

    Raises:
        UserError: a file cannot be created there, or the disk is full.
    """
    temporaries = [path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in paths]
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(_create(path)) for path in temporaries]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        if len(paths) > 1:
            paths[-1].unlink(missing_ok=True)
            _sync_folder(paths[-1].parent)
        for temporary, path in zip(temporaries, paths, strict=True):
            os.replace(temporary, path)
        for folder in {path.parent for path in paths}:
            _sync_folder(folder)
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise UserError(f"cannot write {paths[0]}: {error.strerror}") from error
        raise
    finally:
        for temporary in temporaries:
            with suppress(OSError):  # cleaning up must not hide what went wrong
                temporary.unlink(missing_ok=True)


def refuse_existing(paths: Iterable[Path], overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Raises a `UserError` for the first path that is one of ``inputs``, or that exists unless ``overwrite``."""
    read = {path.resolve() for path in inputs}
    for path in paths:
        if path.resolve() in read:
            raise UserError(f"{path} is an input and would be overwritten; choose another --out")
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists; --overwrite replaces it")


def beside(prefix: Path, suffix: str) -> Path:
    """``prefix`` with ``suffix`` appended; unlike ``with_suffix`` it keeps the dots of a name such as ``v1.5``."""
    return prefix.with_name(prefix.name + suffix)


def _create(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")
    except OSError as error:
        raise UserError(f"cannot write in {path.parent}: {error.strerror}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
