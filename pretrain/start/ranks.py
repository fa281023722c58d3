"""The ranks of a run on this node: one process each, its signals, restarts and exit codes.

The launcher sends a signal to one of its ranks. All ranks then stop after the same step, with the same exit code. The
ranks of a dead launcher get SIGTERM from the kernel.

torchrun does not fit: it passes signals to all ranks, kills them after a timeout, and loses their exit codes. Its
variables are set, so that a rank does not depend on who started it.

Launcher and ranks share a temporary folder with the job, the file ``began`` once a rank runs, and ``error-RANK``, the
traceback of a rank that failed.
"""

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fmoe.errors import EXIT_USAGE, UserError, ranks_text
from pretrain.start import lock
from pretrain.start.codes import EXIT_DIVERGED, EXIT_HANG, EXIT_REQUEUE
from pretrain.start.job import Job, load

COMMAND = (sys.executable, "-m", "pretrain.__main__")
"""Command line of a rank."""

_FOLDER = "FMOE_LAUNCHER"  # environment variable of ranks: the folder that they share with their launcher
_JOB = "job.json"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_SECONDS_TO_STOP = 120  # for a rank that gets SIGTERM: a step and a save, if a scheduler signals all processes
_SECONDS_TO_REFUSE = 10  # for the other ranks, when a rank finds invalid input: one of them prints the error
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # here: hardly anything is safe between fork and exec


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies, for any reason. Linux only."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def launched_job() -> Job | None:
    """Return the job of this rank; None if a user started it."""
    if _FOLDER not in os.environ:
        return None
    folder = Path(os.environ[_FOLDER])
    (folder / "began").touch()
    return load(folder / _JOB)


def is_launched() -> bool:
    """Return whether `run` started this rank, so that its launcher holds the launcher's lock."""
    return _FOLDER in os.environ


def keep_error(text: str) -> bool:
    """Write the traceback of this rank for its launcher, which prints that of the rank that failed first.

    Returns:
        False without a launcher.
    """
    if _FOLDER not in os.environ:
        return False
    with contextlib.suppress(OSError):  # the launcher is gone
        (Path(os.environ[_FOLDER]) / f"error-{os.environ['RANK']}").write_text(text)
    return True


def is_first_to_refuse() -> bool:
    """Return True for the first rank of the launcher that calls it, or without a launcher."""
    if _FOLDER not in os.environ:
        return True
    try:
        (Path(os.environ[_FOLDER]) / "refused").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # the launcher is gone
        return True
    return True


def run(job: Job, environment: Mapping[str, str], log: Path | None = None, command: Sequence[str] = COMMAND) -> int:
    """Run this node's ranks until they end, and return the run's exit code.

    If a rank fails, ends the others, prints the rank that failed first with its traceback, and starts the ranks again,
    at most ``job.max_restarts`` times. Codes 2, 65 and 75 end the run.

    The first SIGTERM, SIGUSR1 or SIGINT stops the run between two steps. A rank that does not train yet ends at once.
    A later SIGINT kills all ranks. SIGUSR2 is passed on to all ranks, which then profile some steps.

    Args:
        environment: variables of the ranks, with MASTER_ADDR and MASTER_PORT of a store.
        log: file to which the tracebacks of all failed ranks except the first are appended.

    Raises:
        UserError: the command succeeded, but its processes did not run this package.
    """
    received: list[int] = []
    ranks: list[subprocess.Popen] = []

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        lock.ending()
        if len(received) == 1:
            for rank in ranks[:1]:
                rank.terminate()
        elif number == signal.SIGINT:
            for rank in ranks:
                rank.kill()

    def profile(number: int, _frame: object) -> None:
        for rank in ranks:
            rank.send_signal(number)

    with tempfile.TemporaryDirectory(prefix="fmoe-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        job.save(folder / _JOB)
        for number in _SIGNALS:
            stack.callback(signal.signal, number, signal.signal(number, forward))
        signal.signal(signal.SIGUSR2, profile)
        stack.callback(signal.signal, signal.SIGUSR2, signal.SIG_IGN)  # a late one must not kill the launcher
        for restarts in range(job.max_restarts + 1):
            ranks.clear()
            for local_rank in range(job.processes_per_node):
                variables = _variables(job, local_rank, restarts) | {_FOLDER: name}
                ranks.append(_start(command, {**environment, **variables}))
            if received:
                ranks[0].terminate()
            ended = _wait(ranks)
            codes = [rank.returncode for rank in ranks]
            has_failed = not {0, EXIT_DIVERGED, EXIT_REQUEUE}.issuperset(codes)
            if not has_failed or received or EXIT_USAGE in codes:
                break
            if EXIT_HANG not in codes:  # else the ranks have printed it
                _explain(job, folder, log, ranks, ended)
        for code in (EXIT_USAGE, EXIT_DIVERGED, EXIT_HANG, EXIT_REQUEUE):
            if code in codes:
                return code
        if has_failed and received:
            cause = signal.Signals(received[0]).name
            is_training = job.program == "fmoe train"
            lost = ", which saved nothing since its newest checkpoint" if is_training else ""
            sys.stderr.write(f"{job.program}: {cause} ended the run{lost}\n")
            return EXIT_REQUEUE if is_training and received[0] != signal.SIGINT else 128 + received[0]
        if not has_failed and not (folder / "began").exists():
            raise UserError(
                "nothing was done: the started processes ran another module called pretrain; check PYTHONPATH="
                f"{environment.get('PYTHONPATH', '')!r}"
            )
    return int(has_failed)


def _variables(job: Job, local_rank: int, restarts: int) -> dict[str, str]:
    """Return the environment variables of a rank, as torchrun sets them."""
    values = {
        "RANK": job.node_rank * job.processes_per_node + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": job.nodes * job.processes_per_node,
        "LOCAL_WORLD_SIZE": job.processes_per_node,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the ranks do not host the store
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }
    return {name: str(value) for name, value in values.items()}


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen:
    launcher = os.getpid()

    def before_exec() -> None:
        die_with_parent()
        if os.getppid() != launcher:  # it died before
            os._exit(1)
        # A scheduler may send SIGUSR1 to every process: it would end a rank that has no handler yet. So would SIGUSR2.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    # In a session of its own: Ctrl-C in a terminal would otherwise reach the ranks too.
    return subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=before_exec)


def _wait(ranks: Sequence[subprocess.Popen]) -> set[int]:
    """Wait until all ranks have ended. If a rank fails, end the others.

    Returns:
        Local ranks that were ended.
    """
    deadline = None
    while None in (codes := [rank.poll() for rank in ranks]):
        failed = set(codes) - {None, 0, EXIT_DIVERGED, EXIT_REQUEUE}
        if failed and deadline is None:
            deadline = time.monotonic() + (_SECONDS_TO_REFUSE if failed == {EXIT_USAGE} else 0)
        if deadline is not None and time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    alive = {local for local, rank in enumerate(ranks) if rank.poll() is None}
    for local in alive:
        ranks[local].terminate()
    deadline = time.monotonic() + _SECONDS_TO_STOP
    for local in alive:
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks[local].wait(max(0.0, deadline - time.monotonic()))
        ranks[local].kill()
        ranks[local].wait()
    return alive


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


def _explain(job: Job, folder: Path, log: Path | None, ranks: Sequence[subprocess.Popen], ended: set[int]) -> None:
    """Print the rank that failed first, and the cause; add the tracebacks of other ranks to the log.

    Args:
        ended: local ranks that `_wait` ended.
    """
    failures: list[tuple[bool, bool, float, int, str, str]] = []
    for local_rank, process in enumerate(ranks):
        rank = job.node_rank * job.processes_per_node + local_rank
        path = folder / f"error-{rank}"
        failed_at = math.inf
        traceback = ""
        with contextlib.suppress(OSError):
            failed_at = path.stat().st_mtime  # its process may have ended much later
            traceback = path.read_text()
            path.unlink()
        code = process.returncode
        if code:
            # Killed ranks first: other ranks fail because they lose the connection to them.
            ending = f"rank {rank} (process {process.pid}) {_ending_of(code)}"
            failures.append((local_rank in ended and code < 0, code > 0, failed_at, rank, ending, traceback))
    (*_, ending, traceback), *others = sorted(failures)
    lines = [f"{job.program}: error: {ending}"]
    if traceback:
        lines.insert(0, traceback.rstrip())
    if others:
        lines.append(f"  ended after it     {ranks_text([rank for *_, rank, _, _ in others])}")
    tracebacks = [traceback for *_, traceback in others if traceback]
    if tracebacks and log is not None:
        with contextlib.suppress(OSError), log.open("a") as file:
            file.writelines(tracebacks)
            lines.append(f"  their tracebacks   {log}")
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()
