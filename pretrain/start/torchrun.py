"""Run torchrun as a child process, so that signals stop a run between steps and the run's exit code is passed on.

On SIGTERM, torchrun passes the signal to its ranks, and kills them after a timeout. It then exits with code 1, whatever
the ranks' exit codes are. Therefore the parent, ``fmoe train``, sends the signal to one rank instead. All ranks then
stop at the same step, write the run's exit code to a small file and exit with 0. torchrun then ends by itself. If the
parent dies, torchrun ends too.

``python -m pretrain.start.torchrun ARGS`` is the child process. Parent, child and ranks share a temporary folder with
these files, where N is torchrun's number of restarts:

* ``job.json``: the job of the ranks;
* ``life``: N, and ``pid-N``: the rank to which signals go, and ``code-N``: the run's exit code;
* ``error-RANK``: the traceback of a rank;
* ``torchrun.log``: torchrun's messages, and ``failed.json``: its list of failed ranks.
"""

import os
import sys
from pathlib import Path

FOLDER = "FMOE_LAUNCHER"  # environment variable: the folder that launcher and ranks share
PARENT = "FMOE_PARENT"  # environment variable: the process that started this one
_LOG = "torchrun.log"
_FAILED = "failed.json"
_JOB = "job.json"

if __name__ == "__main__":
    # Before torch is imported: its loggers keep the stderr that they find.
    sys.stderr = (Path(os.environ[FOLDER]) / _LOG).open("a", buffering=1)

import contextlib
import ctypes
import json
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from fmoe.errors import EXIT_USAGE, UserError, ranks_text
from fmoe.files import write_atomically
from fmoe.runtime import launcher
from pretrain.start import lock
from pretrain.start.codes import EXIT_DIVERGED, EXIT_REQUEUE
from pretrain.start.job import Job, load

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # environment variable of ranks: number of restarts by torchrun
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# Loaded here: hardly anything is safe between fork and exec.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies, for any reason. Linux only."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _before_exec() -> None:
    die_with_parent()
    # A scheduler may send SIGUSR1 to every process: it would end torchrun, and ranks that have no handler yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def command(arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs torchrun with these arguments."""
    return [sys.executable, "-m", "pretrain.start.torchrun", *arguments]


def run(command: Sequence[str], environment: Mapping[str, str], log: Path | None = None, job: Job | None = None) -> int:
    """Run torchrun until it ends, and return the run's exit code.

    The exit code is the one that a rank passed to `report` or, if there is none, torchrun's. If the run fails and no
    rank passed a code, prints the rank that failed first, and the cause.

    The first SIGTERM, SIGUSR1 or SIGINT stops the run between two steps; the code is then `EXIT_REQUEUE`. Until a rank
    handles signals, the first signal ends torchrun instead. A later SIGINT ends all ranks at once.

    Args:
        command: command line from `command`, or a substitute.
        log: file to which, after a failure, torchrun's messages are appended, and the tracebacks of all failed ranks
            except the first.
        job: the job of the ranks; None for a command that reads none.

    Raises:
        UserError: the command succeeded, but its processes did not run this package.
    """
    received: list[int] = []
    torchrun: subprocess.Popen | None = None

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        lock.ending()
        if torchrun is not None:
            _stop(torchrun.pid, folder, number, len(received) == 1)

    with tempfile.TemporaryDirectory(prefix="fmoe-") as name:
        folder = Path(name)
        if job is not None:
            job.save(folder / _JOB)
        # When a scheduler signals all processes, torchrun gives its ranks this time; a step may take longer than the
        # default of 30 seconds.
        variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120", **environment}
        variables |= {FOLDER: name, PARENT: str(os.getpid())}
        before = {number: signal.signal(number, forward) for number in _STOP}
        try:
            # In a session of its own: Ctrl-C in a terminal would otherwise reach torchrun too, which ends all ranks.
            torchrun = subprocess.Popen(command, env=variables, start_new_session=True, preexec_fn=_before_exec)
            if received:
                _stop(torchrun.pid, folder, received[0], True)
            code = torchrun.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        reported = _posted(folder, "code")
        if code and reported != EXIT_USAGE:
            _append(folder / _LOG, log)
        if reported:
            return reported
        if code and received:
            cause = signal.Signals(received[0]).name
            sys.stderr.write(f"fmoe train: {cause} ended the run, which saved nothing since its newest checkpoint\n")
            return 128 + signal.SIGINT if received[0] == signal.SIGINT else EXIT_REQUEUE
        if code:
            _explain(folder, code, log)
        elif not (folder / "life").exists():
            raise UserError(
                "nothing was trained: the started processes ran another module called pretrain; check PYTHONPATH="
                f"{environment.get('PYTHONPATH', '')!r}"
            )
    return code if code >= 0 else 128 - code


_CAUSES = {
    signal.SIGKILL: "most likely the machine was out of memory (see dmesg), or somebody killed it",
    signal.SIGBUS: "most likely shared memory or a disk was full (see df /dev/shm)",
    signal.SIGSEGV: "native code crashed",
    signal.SIGABRT: "native code aborted",
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


def _explain(folder: Path, code: int, log: Path | None) -> None:
    """Print the rank that failed first, and the cause; add the tracebacks of other ranks to the log."""
    failed: list[dict] = []
    with contextlib.suppress(OSError, ValueError):
        failed = json.loads((folder / _FAILED).read_text())
    # Killed ranks first: other ranks fail because they lose the connection to them. torchrun ends the rest, by SIGTERM.
    failed.sort(key=lambda one: (one["code"] in (-signal.SIGTERM, 0), one["code"] >= 0, one["time"]))
    lines = [f"fmoe train: error: torchrun {_ending_of(code)}"]
    if failed:
        first = failed[0]
        lines = [f"fmoe train: error: rank {first['rank']} (process {first['pid']}) {_ending_of(first['code'])}"]
        with contextlib.suppress(OSError):
            lines.insert(0, (folder / f"error-{first['rank']}").read_text().rstrip())
    for other in failed[1:]:
        _append(folder / f"error-{other['rank']}", log)
    if len(failed) > 1:
        lines.append(f"  ended after it     {ranks_text([other['rank'] for other in failed[1:]])}")
    if log is not None and log.exists():
        lines.append(f"  torchrun's log     {log}")
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def _append(source: Path, log: Path | None) -> None:
    """Append the text of file ``source`` to file ``log``."""
    with contextlib.suppress(OSError):
        text = source.read_text(errors="replace")
        if text and log is not None:
            with log.open("a") as file:
                file.write(text)


def _stop(torchrun: int, folder: Path, number: int, is_first: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if is_first:
            pid = _posted(folder, "pid")
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                    return
            os.kill(torchrun, signal.SIGTERM)  # no rank of this start handles signals yet
        elif number == signal.SIGINT:
            os.kill(torchrun, signal.SIGINT)


def join() -> None:
    """Make this rank end when its torchrun ends. Does nothing if `run` did not start that torchrun."""
    if FOLDER in os.environ:
        _end_with_parent()
        _write("life", os.environ.get(_RESTARTS, "0"))


def _end_with_parent() -> None:
    die_with_parent()
    if os.environ.get(PARENT) != str(os.getppid()):
        sys.exit(1)  # the parent died before


def job() -> Job | None:
    """Return the job that `run` got; None if it did not start this rank."""
    return load(Path(os.environ[FOLDER]) / _JOB) if FOLDER in os.environ else None


def ready() -> None:
    """Announce to the launcher, on local rank 0, that this rank handles signals from now on."""
    if launcher.local_rank() == 0:
        _post("pid", os.getpid())


def report(code: int) -> int:
    """Report the run's exit code to the launcher, and return the exit code of this process.

    The latter is 0 for a run that a signal stopped or that diverged: torchrun would restart the ranks otherwise.
    """
    if FOLDER not in os.environ or code == 0:
        return code
    _post("code", code)
    return 0 if code in (EXIT_REQUEUE, EXIT_DIVERGED) else code


def keep_error(text: str) -> bool:
    """Write ``text``, this rank's traceback, to a file. The launcher prints the file of the rank that failed first.

    Returns:
        True if the file was written. False without a launcher, and while torchrun may still restart the ranks.
    """
    if FOLDER not in os.environ or os.environ.get(_RESTARTS, "0") != os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"):
        return False
    _write(f"error-{os.environ['RANK']}", text)
    return True


def _post(name: str, value: int) -> None:
    _write(f"{name}-{os.environ.get(_RESTARTS, '0')}", str(value))


def _posted(folder: Path, name: str) -> int | None:
    """Return the value that a rank of the last start posted."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / f"{name}-{(folder / 'life').read_text()}").read_text())
    return None


def _write(name: str, text: str) -> None:
    if folder := os.environ.get(FOLDER):
        with contextlib.suppress(OSError):  # the parent is gone
            write_atomically(Path(folder) / name, text.encode())


def main(arguments: Sequence[str]) -> None:
    """Run torchrun in this process. If ranks fail, write the list of failed ranks to a file for the launcher."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _end_with_parent()
    os.environ[PARENT] = str(os.getpid())
    folder = Path(os.environ[FOLDER])
    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        failed = []
        for rank, failure in error.failures.items():
            path = folder / f"error-{rank}"  # written at the failure; the process may have ended much later
            time = path.stat().st_mtime if path.exists() else failure.timestamp
            failed.append({"rank": rank, "pid": failure.pid, "code": failure.exitcode, "time": time})
        (folder / _FAILED).write_text(json.dumps(failed))
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
