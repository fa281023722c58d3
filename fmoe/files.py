"""Files that survive a crash and locks of files. Standard library only."""

import errno
import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

with suppress(ImportError):  # on Windows, where the callers of `lock` raise before
    import fcntl

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # errors of file systems without locks


def is_full(error: OSError) -> bool:
    """Return whether the error reports a full disk or an exhausted quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def sync(path: Path) -> None:
    """Sync a file or a folder, so that a crash does not undo writes to it.

    For a folder, writes are the creation, renaming and removal of files.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file by way of ``NAME.PID.tmp``: readers, also after a crash, find the old content or the new one.

    Raises:
        OSError: writing failed. The old file is unchanged.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lock(file: int, *, wait: bool = False) -> bool | None:
    """Lock an open file or folder until its descriptor is closed, or until this process ends.

    Args:
        file: descriptor of the file.
        wait: wait until other processes release their locks.

    Returns:
        True if the file is locked, False if another process has locked it. None on a file system without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def unlock(file: int) -> None:
    """Release a `lock`, even if a forked process also has the descriptor."""
    fcntl.flock(file, fcntl.LOCK_UN)
