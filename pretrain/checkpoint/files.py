"""File writes that survive a crash, and diagnosis of files that did not."""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fmoe.errors import UserError
from fmoe.files import sha256

CHUNK = 16 << 20  # bytes written or hashed at a time


class SaveError(UserError):
    """The operating system refused to read or write a file (disk full, no permission).

    Attributes:
        errno: the system's error number (``errno.ENOSPC``, ...), or None.
    """

    def __init__(self, message: str, errno: int | None = None):
        super().__init__(message)
        self.errno = errno


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and hex SHA-256 of a file, as the manifest records them."""

    size: int
    sha256: str


def write_file(path: Path, buffers: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file, sync it to disk and return its record.

    The record has the SHA-256 of ``buffers``: the file is not read back.

    Raises:
        OSError: writing failed. The error always names the file, unlike the errors of ``write`` and ``fsync``.
    """
    digest = hashlib.sha256()
    chunks = list(_chunks(buffers))
    # SHA-256 takes longer than writing on many machines, so a second thread computes it (hashlib releases the GIL).
    hasher = ThreadPoolExecutor(1, "fmoe-sha256")
    for chunk in chunks:
        hasher.submit(digest.update, chunk)
    try:
        with open(path, "xb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        hasher.shutdown()
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        hasher.shutdown(cancel_futures=True)
    return FileRecord(sum(map(len, chunks)), digest.hexdigest())


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the folder's filesystem, as an unprivileged process may use them. Quotas are ignored."""
    return shutil.disk_usage(folder).free


def _chunks(buffers: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        view = memoryview(buffer)
        for begin in range(0, len(view), CHUNK):
            yield view[begin : begin + CHUNK]


def size_problem(path: Path, record: FileRecord) -> str | None:
    """Return the problem of a file, such as ``"is missing"``; None if it is a regular file of the recorded size."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_size != record.size:
        return f"has {status.st_size} bytes, but {record.size} in the manifest"
    return None


def content_problem(path: Path, record: FileRecord) -> str | None:
    """Return the problem of a file, such as ``"is missing"``.

    Return None if it is a regular file of the recorded size and SHA-256.
    """
    problem = size_problem(path, record)
    if problem is not None:
        return problem
    try:
        digest = sha256(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if digest == record.sha256 else "is damaged: its SHA-256 differs from the manifest's"
