"""Cache of compiled libraries: its folders, locks and entries.

An entry is one file, ``KEY-SHA256.so`` (``.zip`` for CUDA kernels). The key identifies the inputs of the build. The
SHA-256 of the file's bytes reveals damage by a full or bad disk. An entry appears by a rename, so readers never see a
partial file. A build holds the lock of its key. The operating system releases the lock when the process
ends.
"""

import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fmoe.errors import BuildError, CompilerError
from fmoe.files import lock, sha256, sync, unlock, write_atomically

KEEP = 8  # entries per folder and suffix; the least recently used are removed
SUFFIXES = (".so", ".zip")

logger = logging.getLogger("fmoe")

_BUILDING = "building-"


def folders() -> list[Path]:
    """Return the cache folders in search order.

    If FMOE_CACHE is set, it names the only one. Otherwise the user's cache folder comes first. The second is in the
    directory for temporary files, for users whose home directory is not writable.
    """
    named = os.environ.get("FMOE_CACHE")
    if named:
        return [Path(named).absolute()]
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return [Path(base) / "fmoe", _temporary()]
    try:
        return [Path.home() / ".cache" / "fmoe", _temporary()]
    except RuntimeError:  # a user without a home
        return [_temporary()]


def get(
    key: str,
    build: Callable[[Path], Path] | BuildError,
    *,
    what: str,
    compiler: str,
    suffix: str = ".so",
    force: bool = False,
    instead_of: tuple[int, int] | None = None,
) -> Path:
    """Return the path of the cache entry of ``key``; build the entry if it is missing.

    If several processes need the entry at once, one builds it while it holds the key's lock (`locked`). The others use
    its result or its error. On a file system without locks, several processes may build the entry.

    Args:
        build: function that builds a library in a temporary folder, and returns its path. It raises `CompilerError` on
            failure. Or the error that there is no compiler, raised if a build is needed.
        what: name of the library in messages.
        compiler: name of the compiler in messages.
        force: build even if the entry exists.
        instead_of: `identity` of an entry that did not load. That entry is not returned again.

    Raises:
        BuildError: there is no compiler (``build``), the build fails, or no cache folder is usable; the message has one
            line.
    """

    def accepted(entry: Path | None) -> Path | None:
        return None if entry is None or force or identity(entry) == instead_of else entry

    entry = accepted(find(key, suffix))
    if entry is not None:
        return entry
    if isinstance(build, BuildError):
        raise build
    folder = writable()
    report = failure(folder, key)
    earlier_report = identity(report)
    try:
        with locked(folder, key, what) as is_locked:
            # Perhaps the process that held the lock has built the entry, or has failed.
            entry = accepted(find_in(folder, key, suffix))
            if entry is not None:
                return entry
            if not force and identity(report) not in (None, earlier_report):
                raise BuildError(report.read_text(encoding="utf-8").partition("\n")[0])
            begin = time.monotonic()
            logger.warning("compiling %s with %s, once per machine; fmoe build does it in advance", what, compiler)
            if is_locked:
                _remove_workplaces(folder, key)
            with tempfile.TemporaryDirectory(
                prefix=f"{_BUILDING}{key}-", dir=folder, ignore_cleanup_errors=True
            ) as place:
                try:
                    library = build(Path(place))
                except CompilerError as error:
                    reason = f"{compiler} failed: {error}"
                    publish_failure(folder, key, f"{reason}\n{error.output}")
                    raise BuildError(f"{reason} (full output: {report})") from error
                entry = _publish(library, folder, key)
            logger.info("compiled %s in %.1f s: %s", what, time.monotonic() - begin, entry)
            return entry
    except OSError as error:
        reason = error.strerror or str(error)
        raise BuildError(f"building {what} in {folder} failed: {reason}; set FMOE_CACHE to another folder") from error


def find(key: str, suffix: str = ".so") -> Path | None:
    """Return the newest intact entry whose name begins with ``key``; None if no such entry exists.

    The entry comes from the first of the `folders` that has one. Untrusted folders are skipped, such as those with
    write access for all users.
    """
    for folder in folders():
        if folder.is_dir() and _distrust(folder) is None:
            entry = find_in(folder, key, suffix)
            if entry is not None:
                return entry
    return None


def find_in(folder: Path, key: str, suffix: str = ".so") -> Path | None:
    """Return the newest intact entry of one folder whose name begins with ``key``; None if no such entry exists."""
    for path in sorted(folder.glob(f"{key}*{suffix}"), key=_modified, reverse=True):
        with suppress(OSError):  # another process may remove it
            if sha256(path) == path.stem.rpartition("-")[2]:
                with suppress(OSError):  # the folder may be read-only
                    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
                return path
    return None


def writable() -> Path:
    """Return the first of the `folders` that is writable and trusted; create it if it is missing.

    A folder with write access for all users is not trusted.

    Raises:
        BuildError: no folder is usable; the message gives the reason for each.
    """
    reasons = []
    for folder in folders():
        try:
            # A default folder is private; a folder named by FMOE_CACHE may be shared.
            folder.mkdir(mode=0o755 if os.environ.get("FMOE_CACHE") else 0o700, parents=True, exist_ok=True)
            reason = _distrust(folder)
            if reason is None:
                if os.access(folder, os.W_OK | os.X_OK):
                    return folder
                reason = "not writable"
        except OSError as error:
            reason = error.strerror
        reasons.append(f"{folder}: {reason}")
    raise BuildError(f"no cache folder: {'; '.join(reasons)}; set FMOE_CACHE to a writable folder of your own")


@contextmanager
def locked(folder: Path, key: str, what: str = "a library") -> Iterator[bool]:
    """Wait for the lock of ``key`` in ``folder``, and hold it in this context.

    Args:
        what: name of the library in the log.

    Yields:
        Whether the lock is held. It is not held on a file system without locks.
    """
    handle, is_locked = _lock(folder / f"{key}.lock", what)
    try:
        yield is_locked
    finally:
        if is_locked:
            unlock(handle)
        os.close(handle)


def _publish(library: Path, folder: Path, key: str) -> Path:
    """Move a built library into the cache, and return the path of the entry.

    Remove the key's older entries and failure report. Also remove the least recently used entries, so that at most
    `KEEP` with the library's suffix remain.
    """
    suffix = library.suffix
    library.chmod(0o755 if suffix == ".so" else 0o644)
    digest = sha256(library)
    sync(library)
    entry = folder / f"{key}-{digest}{suffix}"
    os.replace(library, entry)
    sync(folder)
    with suppress(OSError):
        failure(folder, key).unlink()
    for old in folder.glob(f"{key}-*{suffix}"):
        if old != entry:
            _remove(old)
    for old in sorted(folder.glob(f"*{suffix}"), key=_used, reverse=True)[KEEP:]:
        if old != entry:
            _remove(old)
    return entry


def failure(folder: Path, key: str) -> Path:
    """Return the path of the report of the last failed build of ``key``.

    The report is the error in one line, then the compiler's whole output.
    """
    return folder / f"{key}.failed"


def publish_failure(folder: Path, key: str, text: str) -> None:
    """Write the `failure` report of a build. Keep only the newest `KEEP` reports of the folder."""
    write_atomically(failure(folder, key), text.encode())
    for old in sorted(folder.glob("*.failed"), key=_modified, reverse=True)[KEEP:]:
        _remove(old)


def last_failure(key: str) -> str | None:
    """Return the first line of the `failure` report of ``key`` in the first folder that has one; None if none has."""
    for folder in folders():
        try:
            return failure(folder, key).read_text(encoding="utf-8").partition("\n")[0]
        except OSError:
            continue
    return None


def clean() -> int:
    """Wait for running builds; then remove all entries, failure reports and unfinished builds.

    Untrusted folders, such as those with write access for all users, are left alone.

    Returns:
        Number of removed entries.
    """
    count = 0
    for folder in folders():
        if not folder.is_dir() or _distrust(folder) is not None:
            continue
        for path in folder.glob("*.lock"):
            with locked(folder, path.stem) as is_locked:
                if is_locked:
                    _remove_workplaces(folder, path.stem)
                    path.unlink(missing_ok=True)
        for path in folder.iterdir():
            if path.suffix in (*SUFFIXES, ".failed"):
                path.unlink(missing_ok=True)
                count += path.suffix in SUFFIXES
    return count


def identity(path: Path) -> tuple[int, int] | None:
    """Return (inode, modification time) of a file; None if the file is missing or inaccessible.

    At least one of the two changes if the file is replaced.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"fmoe-{os.getuid()}"


def _distrust(folder: Path) -> str | None:
    """Return why libraries in a folder must not be loaded; None if they may be."""
    status = folder.lstat() if folder == _temporary() else folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "not a folder"
    if status.st_mode & stat.S_IWOTH:
        return f"all users have write access (mode {stat.S_IMODE(status.st_mode):o})"
    # A folder named by FMOE_CACHE may belong to another user. A default folder must not: any user could create it.
    may_be_anothers = os.environ.get("FMOE_CACHE") and not folder.parent.stat().st_mode & stat.S_IWOTH
    if not may_be_anothers and status.st_uid not in (os.getuid(), 0):
        return f"belongs to user {status.st_uid}, not to {os.getuid()}"
    if folder == _temporary() and status.st_mode & 0o077:
        return f"other users have access (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _lock(path: Path, what: str) -> tuple[int, bool]:
    """Lock a file, after waiting for other processes; return its descriptor, and whether it is locked."""
    while True:
        # O_CLOEXEC: a compiler that inherited the handle would hold the lock after this process ends.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            is_locked = lock(handle)
            if is_locked is False:
                logger.info("another process compiles %s: waiting for it (lock %s)", what, path)
                is_locked = lock(handle, wait=True)
        except OSError:
            os.close(handle)
            raise
        if is_locked is None:
            return handle, False
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(handle)):
                return handle, True
        os.close(handle)  # `clean` has removed the file


def _remove_workplaces(folder: Path, key: str) -> None:
    for left in folder.glob(f"{_BUILDING}{key}-*"):
        shutil.rmtree(left, ignore_errors=True)


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _used(path: Path) -> int:
    try:
        return path.stat().st_atime_ns
    except OSError:
        return 0


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
