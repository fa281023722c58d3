"""Real processes with a gloo group between them, started once and given functions to run."""

import ctypes
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIED = "died"  # the result of a rank whose process is gone
TIMEOUT = 240  # seconds for one call on all ranks: a hang fails the test instead of blocking it
START = 300  # seconds for the processes to import torch and meet, on a machine that does other things too
READY = "ready"


def warm_context() -> Any:
    """Processes that begin with torch and fmoe imported: forks of one process of this one's, that runs nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "fmoe"])
    return context


def die_with_parent() -> None:
    """SIGKILL for this process when its parent is gone, however it went: a killed test run leaves nobody behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h


@dataclass(frozen=True)
class Raised:
    """An exception that a rank's function raised: class, message, traceback."""

    kind: type
    message: str
    trace: str


class RankPool:
    """``with RankPool(2, tmp_path) as pool: results = pool.run(function, *args)``; one result a rank.

    A function that raises gives a `Raised`, a process that ends `DIED`. Functions travel by their module and name.
    """

    def __init__(self, size: int, folder: Path):
        context = warm_context()
        self._pipes = []
        self._processes = []
        self._sent = 0
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, folder / "rendezvous", theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(START) or pipe.recv() != READY:
                raise TimeoutError(f"rank {rank} did not start in {START} s")

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self._sent += 1
        for pipe in self._pipes:
            pipe.send((self._sent, function, args))
        return [self._result(rank, pipe) for rank, pipe in enumerate(self._pipes)]

    def _result(self, rank: int, pipe: Any) -> Any:
        end = time.monotonic() + TIMEOUT
        while pipe.poll(max(0.0, end - time.monotonic())):
            try:
                number, result = pipe.recv()
            except EOFError:
                return DIED
            if number == self._sent:  # others are of calls that a timeout of their test interrupted
                return result
        raise TimeoutError(f"rank {rank} did not answer in {TIMEOUT} s")

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, size: int, rendezvous: Path, pipe) -> None:
    die_with_parent()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    share_gloo_device()
    # A file, not a port: nothing to be taken by another test.
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    meshes = _counted_meshes()
    kept = {dist.group.WORLD}
    pipe.send(READY)
    while True:
        try:
            number, function, args = pipe.recv()
        except EOFError:
            break
        # Not at the end of the call that made them: another rank may still connect to this one.
        _destroy_groups(kept)
        meshes.clear()
        try:
            result = function(*args)
        except Exception as error:
            result = Raised(type(error), str(error), traceback.format_exc())
        if meshes:  # DTensor caches them with the names of their groups
            kept.update(dist.distributed_c10d._world.pg_map)
        pipe.send((number, result))
    dist.destroy_process_group()


def share_gloo_device() -> None:
    """Give all gloo groups of this process one device: each has a thread that polls a hundred times a second."""
    from torch.distributed import ProcessGroupGloo as Gloo

    init = Gloo.__init__
    devices = []

    def with_device(self, store, rank, size, timeout, **later):
        if not devices:
            devices.append(Gloo.create_default_device())
        options = Gloo._Options()
        options._devices = devices
        options._timeout = timeout
        for name, value in later.items():  # enable_reconfigure, since torch 2.14
            setattr(options, name, value)
        init(self, store, rank, size, options)

    Gloo.__init__ = with_device


def _counted_meshes() -> list[None]:
    """Return a list that grows with every DeviceMesh."""
    from torch.distributed.device_mesh import DeviceMesh

    made = []
    init = DeviceMesh.__init__

    def counted(self, *args, **options):
        made.append(None)
        init(self, *args, **options)

    DeviceMesh.__init__ = counted
    return made


def _destroy_groups(kept: set) -> None:
    """Destroy the groups that a call made: each gloo group has a thread that wakes up a hundred times a second."""
    import torch.distributed as dist

    from fmoe.exchange import hierarchical

    hierarchical._subgroups.clear()
    world = dist.distributed_c10d._world
    for group in [group for group in world.pg_map if group not in kept]:
        dist.destroy_process_group(group)
        world.pg_names[object()] = ""  # torch makes names from their number, and the store keeps those of before
