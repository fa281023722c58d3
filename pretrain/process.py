"""The processes of a run: who I am, on which device, and leaving without anybody waiting."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fmoe.errors import UserError

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Processes:
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes what is written once."""
        return self.rank == 0


def world_size() -> int:
    """Processes that the launcher (torchrun) started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number on its machine; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def timeout(hang_minutes: float = 0.0) -> timedelta:
    """How long a process waits for another: longer than the watchdog does, which has more to say."""
    return max(_TIMEOUT, timedelta(minutes=hang_minutes + 2))


def start(limit: timedelta = _TIMEOUT) -> Processes:
    """Joins the other processes: nccl where torch sees GPUs, else gloo.

    Args:
        limit: how long one waits for another.

    Raises:
        UserError: more processes on this machine than it has GPUs.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank() >= torch.cuda.device_count():
            raise UserError(
                f"local rank {local_rank()} has no GPU: this machine has {torch.cuda.device_count()}; "
                "start fewer processes on it (the splits of [parallel])"
            )
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))
        # torchrun's store outlives the workers that it restarts: the addresses of the dead are not for these.
        store = dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    else:  # alone: no port, no environment variables
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def stop() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
