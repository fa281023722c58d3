"""torchrun as a child of ``fmoe train``: forwards signals to the run, returns its exit code, ends with it.

torchrun answers SIGTERM by ending its workers within 30 seconds and itself with code 1, whatever they return. So the
parent signals a worker instead: all workers stop together and write the exit code to a small file, and torchrun, which
sees them succeed, ends by itself.

``python -m pretrain.torchrun ARGS`` is that child. Its own messages go to a file, and which ranks failed to another, in
the folder that launcher and workers share. Workers inherit the descriptor of the real stderr.
"""

import os
import sys
from pathlib import Path

FOLDER = "FMOE_LAUNCHER"  # environment variable: the folder that launcher and workers share
LOG, FAILED = "torchrun.log", "failed.json"

if __name__ == "__main__":
    # Before torch is imported, whose loggers keep the stderr that they find.
    sys.stderr = (Path(os.environ[FOLDER]) / LOG).open("a", buffering=1)

import contextlib
import ctypes
import json
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from fmoe.errors import EXIT_USAGE, UserError
from pretrain import lock, process
from pretrain.process import EXIT_DIVERGED, EXIT_REQUEUE

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # environment variable of workers: how often torchrun has started them again
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Seconds that torchrun leaves its workers when it gets a signal itself, as from a scheduler that signals everybody; its
# default of 30 is less than a step may take.
_PATIENCE = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# Loaded here: between fork and exec there is little one may do.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies, for any reason. Linux only."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _before_exec() -> None:
    die_with_parent()
    # It would end a torchrun that a scheduler signals with everybody, and workers that are not ready for it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def command(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs torchrun with these arguments."""
    return [sys.executable, "-m", "pretrain.torchrun", *arguments]


def run(command: Sequence[str], environment: Mapping[str, str], log: Path | None = None) -> int:
    """Run torchrun to its end; return the exit code posted by the workers that it started last, or else torchrun's own.

    Prints which rank died and why, where no worker reported how the run ends.

    The first SIGTERM, SIGUSR1 or SIGINT has the run stop between two steps (`EXIT_REQUEUE`). A second SIGINT goes to
    torchrun, which ends its workers at once.

    Args:
        command: that of `command`, or a substitute for it.
        log: gets torchrun's own messages if the run fails.

    Raises:
        UserError: the command ended well, but the programs that it started were not ours.
    """
    received: list[int] = []
    child: subprocess.Popen | None = None

    def forward(number: int, _frame) -> None:
        received.append(number)
        lock.ending()
        if child is not None:
            _stop(child.pid, Path(folder), number, len(received) == 1)

    with tempfile.TemporaryDirectory(prefix="fmoe-") as folder:
        before = {number: signal.signal(number, forward) for number in _STOP}
        try:
            # A session of its own: Ctrl-C in a terminal would go to torchrun directly, which ends everybody.
            child = subprocess.Popen(
                command,
                env=dict([_PATIENCE]) | {**environment, FOLDER: folder},
                start_new_session=True,
                preexec_fn=_before_exec,
            )
            if received:
                _stop(child.pid, Path(folder), received[0], True)
            code = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        said = _posted(Path(folder), "code")
        if code and said != EXIT_USAGE:
            _keep(Path(folder) / LOG, log)
        if said:
            return said
        if code and not received:
            _explain(Path(folder), code, log)
        if not code and not (Path(folder) / "life").exists():
            raise UserError(
                "nothing was trained: the processes that were started ran another module called pretrain; PYTHONPATH "
                f"is {environment.get('PYTHONPATH', '')!r}"
            )
    if code and received:  # before there was anything to save
        return 128 + signal.SIGINT if received[0] == signal.SIGINT else EXIT_REQUEUE
    return code if code >= 0 else 128 - code


_CAUSES = {
    signal.SIGKILL: "most likely the machine was out of memory (dmesg tells), or somebody ended it",
    signal.SIGBUS: "most likely shared memory or a disk was full (df /dev/shm)",
    signal.SIGSEGV: "native code failed",
    signal.SIGABRT: "native code gave up",
    signal.SIGTERM: "a scheduler or somebody ended it",
}


def _ending_of(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"was killed by signal {-code}"
    return f"was killed by {number.name}" + (f": {_CAUSES[number]}" if number in _CAUSES else "")


def _error_name(rank: int | str) -> str:
    """File of a rank's traceback."""
    return f"error-{rank}"


def _explain(folder: Path, code: int, log: Path | None) -> None:
    """Print which rank died first, and of what; the errors of the others go to the log."""
    failed: list[dict] = []
    with contextlib.suppress(OSError, ValueError):
        failed = json.loads((folder / FAILED).read_text())
    # Who was killed gave no error, and others lost their connection to it; who was ended by torchrun came last.
    failed.sort(key=lambda one: (one["code"] in (-signal.SIGTERM, 0), one["code"] >= 0, one["time"]))
    lines = []
    for number, one in enumerate(failed):
        with contextlib.suppress(OSError):
            path = folder / _error_name(one["rank"])
            if number == 0:
                lines.append(path.read_text().rstrip())
            else:
                _keep(path, log)
    if failed:
        text = f"rank {failed[0]['rank']} (process {failed[0]['pid']}) {_ending_of(failed[0]['code'])}"
    else:
        text = f"torchrun {_ending_of(code)}"
    lines.append(f"fmoe train: error: {text}")
    if len(failed) > 1:
        lines.append(f"  ended after it     rank {', '.join(str(other['rank']) for other in failed[1:])}")
    if log is not None and log.exists():
        lines.append(f"  torchrun's log     {log}")
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def _keep(found: Path, log: Path | None) -> None:
    """Add torchrun's messages to the log in the run folder."""
    with contextlib.suppress(OSError):
        text = found.read_text(errors="replace")
        if text and log is not None:
            with log.open("a") as file:
                file.write(text)


def _stop(torchrun: int, folder: Path, number: int, is_first: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if not is_first:
            if number == signal.SIGINT:
                os.kill(torchrun, signal.SIGINT)
            return
        worker = _posted(folder, "pid")
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGTERM)
                return
        os.kill(torchrun, signal.SIGTERM)  # nobody trains yet, or not again yet


def join() -> None:
    """Tie a worker that starts to its launcher, if that is `run`'s torchrun: it ends with it."""
    if FOLDER in os.environ:
        die_with_parent()
        _write("life", os.environ.get(_RESTARTS, "0"))


def ready() -> None:
    """Announce that this worker handles signals from now on."""
    if process.local_rank() == 0:
        _post("pid", os.getpid())


def report(code: int) -> int:
    """Post the exit code of the run to the launcher; return that of this process: 0 where torchrun shall not fail."""
    if FOLDER not in os.environ or code == 0:
        return code
    _post("code", code)
    return 0 if code in (EXIT_REQUEUE, EXIT_DIVERGED) else code


def keep_error(text: str) -> bool:
    """Leave a worker's traceback to the launcher, which prints only the first one's.

    Returns:
        True if it will. False without a launcher, and where torchrun will start the workers again.
    """
    if FOLDER not in os.environ or os.environ.get(_RESTARTS, "0") != os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"):
        return False
    _write(_error_name(os.environ["RANK"]), text)
    return True


def _post(name: str, value: int) -> None:
    """Post a value to the launcher. It is of this life of the workers: torchrun may start others."""
    _write(f"{name}-{os.environ.get(_RESTARTS, '0')}", str(value))


def _posted(folder: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / f"{name}-{(folder / 'life').read_text()}").read_text())
    return None


def _write(name: str, text: str) -> None:
    if folder := os.environ.get(FOLDER):
        # Renamed, so that no reader sees half of it; several workers may post at the same time.
        path = Path(folder) / f"{name}.{os.getpid()}"
        with contextlib.suppress(OSError):  # a parent that is gone
            path.write_text(text)
            path.rename(path.with_name(name))


def main(arguments: Sequence[str]) -> None:
    """Run torchrun in this process, and write which ranks failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    folder = Path(os.environ[FOLDER])
    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        failed = []
        for rank, failure in error.failures.items():
            path = folder / _error_name(rank)  # when it failed; its process may have taken long to end
            time = path.stat().st_mtime if path.exists() else failure.timestamp
            failed.append({"rank": rank, "pid": failure.pid, "code": failure.exitcode, "time": time})
        (folder / FAILED).write_text(json.dumps(failed))
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
