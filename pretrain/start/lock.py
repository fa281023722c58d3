"""Locks of a run folder, so that only one run at a time writes to it.

There are two lock files. ``launch.lock`` belongs to the process that started the run: ``fmoe train``, or rank 0 if
torchrun was started by hand. ``run.lock`` belongs to rank 0. If the launcher is killed, rank 0 may live on until it has
written its last checkpoint. Each file names its holder, and is removed when the lock is released.

The files are locked with ``flock``. The kernel, or the server of a network file system, releases such a lock when its
holder dies. A holder also touches its file every few seconds. On file systems without a shared ``flock``, this
heartbeat shows that the holder is alive.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fmoe.errors import UserError

LAUNCH, RUN = "launch.lock", "run.lock"
TOKEN = "FMOE_LAUNCH_LOCK"  # environment variable of ranks: the token of their launcher's lock
REFUSED = "FMOE_LAUNCH_REFUSED"  # environment variable of ranks: the reason why their launcher has no lock

BEAT = 5.0
"""Seconds between two heartbeats."""
SILENCE = 3 * BEAT
"""Seconds without a heartbeat after which a holder on another machine counts as dead."""
WAIT = 600.0
"""Maximum seconds to wait for a run that is about to end."""
WAIT_FOR_SERVER = 180.0
"""Maximum seconds to wait until a file server releases the lock of a dead machine."""

_RECORD_BYTES = 1024
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def hold(folder: Path, *, is_launcher: bool = False) -> Iterator[str]:
    """Lock a run folder during a ``with`` block.

    Creates a missing folder, and removes it again if it is empty at the end. If the previous holder is about to end or
    seems dead, waits for it at most `WAIT` seconds.

    Args:
        is_launcher: True in the launcher, which holds only ``launch.lock``. False on rank 0, which holds ``run.lock``
            and, if no launcher set the environment variable `TOKEN`, also ``launch.lock``.

    Yields:
        The token of ``launch.lock``, a random string in the file. The launcher passes it to its ranks in `TOKEN`, so
        that they can check that the launcher still holds this lock.

    Raises:
        UserError: another run holds the folder (the message names its holder), or the folder is not writable.
    """
    if not is_launcher and (reason := os.environ.get(REFUSED)):
        raise UserError(reason)
    token = None if is_launcher else os.environ.get(TOKEN)
    with _made(folder), contextlib.ExitStack() as stack:
        if token is None:
            token = _enter(stack, folder / LAUNCH).token
        with contextlib.ExitStack() as run_lock:
            _enter(run_lock, folder / RUN)  # launchers wait for it too: rank 0 of the previous run may be alive
            if not is_launcher:
                holder = _read(folder / LAUNCH)
                if holder.get("token") != token:  # the launcher of this process is gone, another one has the lock
                    raise _in_use(folder / LAUNCH, holder)
                stack.push(run_lock.pop_all())
        yield token


def ending() -> None:
    """Announce that this process is about to end, so that others wait for its locks. Safe in a signal handler."""
    for lock in _held:
        lock.write(is_ending=True)


class _Lock:
    """A lock held by this process: an open file with a record of the holder (host, process, times)."""

    def __init__(self, path: Path, file: int):
        self.path, self.token, self._file = path, uuid.uuid4().hex, file
        self._since = time.time()
        self.write()

    def write(self, *, is_ending: bool = False) -> None:
        record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _clock(_started(self._since)),
            "since": _clock(self._since),
            "ending": int(is_ending),
            "machine": _MACHINE,
            "token": self.token,
        }
        with contextlib.suppress(OSError):  # the lock is valid without the record
            os.pwrite(self._file, json.dumps(record).ljust(_RECORD_BYTES - 1).encode() + b"\n", 0)
            os.fsync(self._file)

    def beat(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._file)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if _is_at(self._file, self.path):
                self.path.unlink()
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)


_held: list[_Lock] = []


def _after_fork() -> None:
    for lock in _held:
        lock.close()  # the child's copy of the descriptor would keep the lock after the parent ends
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


def _enter(stack: contextlib.ExitStack, path: Path) -> _Lock:
    """Acquire the lock file ``path``, and hold it with a heartbeat thread until ``stack`` is closed."""
    try:
        lock = _acquire(path)
    except OSError as error:
        raise UserError(
            f"run.folder={path.parent} is not a writable folder ({error.strerror}): name another one"
        ) from error
    is_over = threading.Event()
    _held.append(lock)

    def beat() -> None:
        while not is_over.wait(BEAT):
            lock.beat()

    def leave() -> None:
        if lock in _held:  # false in a process that was forked inside the block
            is_over.set()
            thread.join()
            _held.remove(lock)
            lock.release()

    thread = threading.Thread(target=beat, name=path.name, daemon=True)
    thread.start()
    stack.callback(leave)
    return lock


def _acquire(path: Path) -> _Lock:
    """Acquire the lock file ``path``. Raise UserError if its holder does not release it."""
    begin, has_warned, watch = time.monotonic(), False, _Watch()
    while True:
        with contextlib.ExitStack() as closing:
            file = _open(path)
            closing.callback(os.close, file)
            is_locked = _flock(file)  # None: the file system does not support flock
            if not _is_at(file, path):
                time.sleep(0.01)
                continue  # the holder has removed the file meanwhile
            watch.look(file)
            # flock covers all processes of this machine, but possibly not those of other machines.
            if is_locked is not False and (not watch.record or watch.is_silent or (is_locked and watch.is_local)):
                lock = _Lock(path, file)
                if is_locked is None:
                    time.sleep(BEAT)  # concurrent processes have written their record by then: the last one wins
                if is_locked or _record(file).get("token") == lock.token:
                    closing.pop_all()
                    return lock
        is_left = path.name == RUN  # launch.lock is ours already, so the launcher of this holder is gone
        if is_left or watch.record.get("ending"):
            limit, state = WAIT, "is about to end"
        elif watch.is_alive or (is_locked is False and watch.is_local):
            raise _in_use(path, watch.record)
        else:
            limit, state = (WAIT_FOR_SERVER if is_locked is False else WAIT), "has no heartbeat"
        waited = time.monotonic() - begin
        if waited > limit:
            raise _in_use(path, watch.record)
        if not has_warned and waited > 1:
            logger.warning("%s, which %s: waiting at most %g s", _held_by(path, watch.record), state, limit)
            has_warned = True
        time.sleep(0.2)


class _Watch:
    """Observer of the process that holds a lock; ``is_alive`` is True once a heartbeat was seen."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}
        self.is_alive = False
        self._sign, self._since = -1, 0.0

    def look(self, file: int) -> None:
        record, sign = _record(file), os.fstat(file).st_mtime_ns
        if record.get("token") != self.record.get("token"):
            self.is_alive, self._sign, self._since = False, sign, time.monotonic()
        elif sign != self._sign:
            self.is_alive, self._sign, self._since = True, sign, time.monotonic()
        self.record = record

    @property
    def is_local(self) -> bool:
        """True if the holder's process started on this machine since the last boot."""
        return self.record.get("machine") == _MACHINE

    @property
    def is_silent(self) -> bool:
        return time.monotonic() - self._since > SILENCE


def _flock(file: int) -> bool | None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return None
    return True


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)  # a process that gave up may have removed the folder
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):  # a link's target must not be overwritten
            raise UserError(f"{path} is not a regular file: remove it")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _is_at(file: int, path: Path) -> bool:
    """Return whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except OSError:
        return False


def _record(file: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = json.loads(os.pread(file, _RECORD_BYTES, 0))
        if isinstance(record, dict):
            return record
    return {}


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _record(file)
        finally:
            os.close(file)
    return {}


def _held_by(path: Path, holder: dict[str, Any]) -> str:
    who = "another process"
    if holder:
        who = "process {pid} on {host}, started {started}, holding it since {since}".format_map(_Shown(holder))
    return f"run.folder={path.parent} is held by {who} ({path.name})"


class _Shown(dict):
    def __missing__(self, key: str) -> str:
        return "?"


def _in_use(path: Path, holder: dict[str, Any]) -> UserError:
    return UserError(f"{_held_by(path, holder)}: wait until that run ends, stop it, or name another run.folder")


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """After the block, remove the folder and its parents if they are empty and did not exist before."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))


def _started(default: float) -> float:
    """Return the start time of this process, in seconds since 1970; ``default`` if it is unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    return default


def _machine() -> str:
    """Return an identifier of this machine's current boot."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


_MACHINE = _machine()
