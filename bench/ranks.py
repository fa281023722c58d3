"""Ranks of a benchmark: processes with a gloo group, which end when the benchmark ends for any reason."""

import json
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from pretrain.config import Recipe
from pretrain.start.ranks import die_with_parent

TIMEOUT = timedelta(minutes=2)  # of a collective, which bounds the wait for a rank that failed


def run(size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` on ``size`` ranks of one thread each; return the result of rank 0, in JSON types.

    If a rank raises, the others are ended and its traceback is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (size, folder, function, args), nprocs=size)
        return json.loads((Path(folder) / "result.json").read_text())


def _rank(rank: int, size: int, folder: str, function: Callable[..., Any], args: tuple) -> None:
    die_with_parent()  # torch asks for SIGINT, which background jobs of a shell ignore
    torch.set_num_threads(1)
    # A file instead of a port, which another program could take.
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=TIMEOUT)
    result = function(*args)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def start_parallel(recipe: Recipe) -> Any:
    """Set up Megatron-core on this rank for a recipe on the CPU, without its warnings; return what `Engine` needs."""
    from megatron_patch import cpu

    cpu.install()
    from pretrain.engine import init_parallel
    from pretrain.start.process import Processes

    for module in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=module)
    init_parallel(recipe)
    return Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def slowest(seconds: float) -> float:
    """Return the maximum of a number over the ranks, on every rank."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()
