"""Locks of a run folder, so that only one run at a time writes to it.

``launch.lock`` belongs to the process that started the run: ``fmoe train``, or rank 0 if torchrun was started by hand.
``run.lock`` belongs to rank 0. If the launcher is killed, rank 0 may live on until it has written its last checkpoint.

The operating system, or the server of a network file system, releases a lock when its holder dies. On a file system
without ``flock``, the existence of the file is the lock, and the file of a holder that died on another machine remains.
A file ``*.lock.json`` describes the holder, for error messages.
"""

import contextlib
import json
import logging
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fmoe.errors import UserError
from fmoe.files import write_atomically

LAUNCH = "launch.lock"
RUN = "run.lock"
WAIT = 600.0
"""Maximum seconds to wait for a run that is about to end."""
WAIT_FOR_SERVER = 180.0
"""Maximum seconds to wait until a file server releases the lock of a machine that may be dead."""

logger = logging.getLogger(__name__)
_held: dict[Path, dict[str, Any]] = {}  # locks of this process, with the description of their holder
os.register_at_fork(after_in_child=_held.clear)


@contextlib.contextmanager
def hold(folder: Path, *names: str) -> Iterator[None]:
    """Hold locks of a run folder during a ``with`` block.

    Creates a missing folder, and removes it again if it is empty at the end. Waits for a holder that is about to end,
    and for one on another machine, which may be dead.

    Args:
        names: `LAUNCH`, `RUN` or both in this order. The caller of `RUN` alone must be the only run of the folder.

    Raises:
        UserError: another run holds a lock (the message names its holder), or the folder is not writable.
    """
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(_hold(folder / name))
            yield
    finally:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def ending() -> None:
    """Announce that this process is about to end, so that others wait for its locks. Safe in a signal handler."""
    for path, holder in _held.items():
        holder["ending"] = True
        _describe(path, holder)


@contextlib.contextmanager
def _hold(path: Path) -> Iterator[None]:
    try:
        lock = _acquire(path)
    except OSError as error:
        reason = f"{path.name}: {error.strerror or error}"
        raise UserError(f"run.folder={path.parent} is not a writable folder ({reason}): name another one") from error
    since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    _held[path] = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "machine": _MACHINE}
    _describe(path, _held[path])
    try:
        yield
    finally:
        if _held.pop(path, None):  # not in a process that was forked inside the block
            with contextlib.suppress(OSError):
                _description(path).unlink(missing_ok=True)
                path.unlink(missing_ok=True)  # before the release: a process that waits for this file tries again
            lock.release()


def _acquire(path: Path) -> FileLock:
    begin = time.monotonic()
    last_described = begin
    has_warned = False
    lock = FileLock(path)
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # a process that gave up may have removed the folder
        with contextlib.suppress(Timeout), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the lack of flock
            lock.acquire(timeout=0)
            return lock
        holder = _read(path)
        waited = time.monotonic() - begin
        if holder:
            last_described = time.monotonic()
        is_elsewhere = holder.get("machine", _MACHINE) != _MACHINE
        if path.name == RUN or holder.get("ending"):  # a run whose launcher has released `LAUNCH` is ending
            limit = WAIT
        elif is_elsewhere:
            limit = WAIT_FOR_SERVER
        elif holder:
            limit = 0.0
        else:  # until a holder has described itself, or one that ends has removed its description and then the lock
            limit = last_described - begin + 3.0
        who = (
            f"process {holder['pid']} on {holder['host']}, holding it since {holder['since']}" if holder else "another"
        )
        held = f"run.folder={path.parent} is held by {who} ({path.name})"
        if waited > limit:
            is_marker = path.exists() and path.stat().st_size > 0  # without flock, filelock writes the holder into it
            dead = f"; if that process is dead, remove {path}" if is_elsewhere or is_marker else ""
            raise UserError(f"{held}: wait until that run ends, stop it, or name another run.folder{dead}")
        if not has_warned and waited > 1:
            logger.warning("%s: waiting at most %g s for its end", held, limit)
            has_warned = True
        time.sleep(0.2)


def _description(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _describe(path: Path, holder: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the lock is valid without the description
        write_atomically(_description(path), json.dumps(holder).encode())


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        holder = json.loads(_description(path).read_text())
        if isinstance(holder, dict) and {"pid", "host", "since"} <= holder.keys():
            return holder
    return {}


def _machine() -> str:
    """Return an identifier of this machine's current boot."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


_MACHINE = _machine()
