"""The ranks of a run: device, rendezvous, process group, errors."""

import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fmoe.cli import refusal
from fmoe.errors import EXIT_USAGE, UserError
from fmoe.runtime import launcher
from pretrain.start import lock, ranks

_DRIVER = Path("/dev/nvidiactl")  # exists where the driver is loaded, in a container only if it gets GPUs
_TIMEOUT = timedelta(minutes=10)
_TIMEOUT_FIRST = timedelta(seconds=lock.WAIT) + _TIMEOUT  # rank 0 may wait for the run folder
_SECONDS_TO_HEAR = 10
_SECONDS_FOR_THE_FIRST = 30  # time for another rank to print the error and end


class Diverged(RuntimeError):
    """Error that ends a diverged run. All ranks raise it at the same step. The message is one line."""


@dataclass(frozen=True)
class Processes:
    """Rank, world size and device of this process."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes shared files."""
        return self.rank == 0


def timeout(hang_minutes: float = 0.0) -> timedelta:
    """Return the timeout of collectives: 10 minutes, or two minutes more than ``hang_minutes`` if that is longer.

    The watchdog, which waits for ``hang_minutes``, thus reports a hang first. Its report has more detail.
    """
    return max(_TIMEOUT, timedelta(minutes=hang_minutes + 2))


class RefusedElsewhere(UserError):
    """Error on all other ranks when rank 0 refuses to start. Rank 0 prints the reason."""


@dataclass(frozen=True)
class Meeting:
    """Connection of a run's ranks before they have a process group."""

    store: dist.Store
    rank: int
    size: int

    def first(self, action: Callable[[], object]) -> None:
        """Call ``action`` on rank 0 before any rank continues.

        Raises:
            UserError: on rank 0, if ``action`` raised it; then the other ranks raise `RefusedElsewhere`.
        """
        if self.rank > 0:
            self.store.wait(["first"], _TIMEOUT_FIRST)
            answer = self.store.get("first")
            self.store.add("heard", 1)
            if answer == b"refused":
                raise RefusedElsewhere("rank 0 refuses to start")
            return
        try:
            action()
            self.store.set("first", "begins")
        except UserError:
            self.store.set("first", "refused")
            deadline = time.monotonic() + _SECONDS_TO_HEAR  # the store may end with this process
            while self.store.add("heard", 0) < self.size - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
            raise


def meet(limit: timedelta = _TIMEOUT) -> Meeting:
    """Connect to the other ranks of the run.

    Args:
        limit: maximum time to wait for another rank.

    Raises:
        UserError: the launcher's environment variables are incomplete or invalid, or the ranks cannot meet.
    """
    if not launcher.is_launched():  # a single rank: no port
        return Meeting(dist.HashStore(), 0, 1)
    with launcher.meeting():
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))
    # torchrun's store outlives the ranks that it restarts: addresses of dead ranks must not be reused.
    return Meeting(dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store), rank, size)


def start(limit: timedelta = _TIMEOUT, meeting: Meeting | None = None) -> Processes:
    """Join the process group of the run: nccl if torch finds GPUs, else gloo.

    Args:
        limit: maximum time to wait for another rank.
        meeting: rendezvous of the ranks, from `meet`; None for a new one.

    Raises:
        UserError: this machine has fewer GPUs than ranks, or GPUs that torch cannot use.
    """
    if (reason := unusable_gpu()) is not None:
        raise UserError(reason)
    gpu = None
    if torch.cuda.is_available():
        number = launcher.local_rank()
        if number >= torch.cuda.device_count():
            raise UserError(
                f"local rank {number} has no GPU: torch finds {torch.cuda.device_count()} on this machine; "
                "start at most that many processes on it, with more nodes or smaller sizes in [parallel]"
            )
        gpu = torch.device("cuda", number)
        torch.cuda.set_device(gpu)
    meeting = meeting or meet(limit)
    dist.init_process_group(
        "gloo" if gpu is None else "nccl",
        store=meeting.store,
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=limit,
        device_id=gpu,  # without it nccl guesses the GPU from the rank
    )
    return Processes(dist.get_rank(), dist.get_world_size(), gpu or torch.device("cpu"))


def unusable_gpu() -> str | None:
    """Return an error message if this machine has an NVIDIA GPU that torch cannot use; else None.

    Without this check, training would silently run on the CPU. An empty CUDA_VISIBLE_DEVICES, or -1, selects the CPU on
    purpose: the result is then None.
    """
    if torch.cuda.is_available() or not _DRIVER.exists() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        torch.cuda.init()
        reason = "no device is visible"
    except (AssertionError, RuntimeError) as error:  # raised by a torch without CUDA, and for an old driver
        reason = str(error).splitlines()[0].rstrip(".")
    return (
        f"this machine has a GPU that torch {torch.__version__} (CUDA {torch.version.cuda or 'none'}) cannot use: "
        f"{reason}. Install a torch whose CUDA the driver supports (nvidia-smi prints the newest), correct "
        "CUDA_VISIBLE_DEVICES if it is set, or set CUDA_VISIBLE_DEVICES= to use the CPU"
    )


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def run_rank(work: Callable[[], int]) -> int:
    """Call ``work`` on a rank, leave the process group, and return the rank's exit code.

    The launcher prints the traceback of the rank that failed first. A process without launcher raises its error.

    Raises:
        UserError: as ``work`` did, on the rank that prints it. The other ranks return `EXIT_USAGE`.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until steps can be profiled: it would kill the process
    try:
        return work()
    except Exception as error:
        message = refusal(error) if isinstance(error, OSError) else None
        if message is None and not isinstance(error, UserError | ModuleNotFoundError):
            if not ranks.keep_error(traceback.format_exc()):
                raise
            return 1
        # Before the ranks have met, all ranks of a machine find the same error. Later, several may: one prints it.
        prints = ranks.is_first_to_refuse() if dist.is_initialized() else launcher.local_rank() == 0
        if prints and not isinstance(error, RefusedElsewhere):
            raise
        if "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(_SECONDS_FOR_THE_FIRST)  # torchrun ends all ranks when the first one ends
        return EXIT_USAGE
    finally:
        stop()
