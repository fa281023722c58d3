"""Ranks that end through the interpreter's finalization while threads of gloo still hold works of collectives."""

import ctypes
import gc
import os
import resource
import shutil
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe import FMoE, parallel

_FAILED = 99


def exit_codes(runs: int, scripts: list[str], provocation: str, is_whole: bool = False) -> dict[int, int]:
    """Fork ``runs`` times two ranks, which run one of ``scripts`` each time; return how many ended with which code.

    Args:
        scripts: names of functions below.
        provocation: "idle": threads of gloo run only when nothing else does, on one CPU with the main thread; a third
            of the runs abort then without `fmoe.runtime.collectives`. "none".
        is_whole: finalize to the end, which takes most of a second, not only until the first module is freed.
    """
    if dist.is_initialized():
        dist.destroy_process_group()  # ends the threads of the process that forks
    gc.collect()
    gc.freeze()
    codes: Counter[int] = Counter()
    folder = tempfile.mkdtemp()
    for run in range(runs):
        script = globals()[scripts[run % len(scripts)]]
        pids = [_fork(rank, f"{folder}/{run}", script, provocation, is_whole) for rank in range(2)]
        codes.update(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    shutil.rmtree(folder)
    return dict(codes)


def _fork(rank: int, rendezvous: str, script: Callable, provocation: str, is_whole: bool) -> int:
    if pid := os.fork():
        return pid
    try:
        shutil.rmtree = lambda *_, **__: None  # exit handlers of modules (wandb's) would remove the parent's folders
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
        layer = FMoE(d_model=8, num_experts=4, top_k=2, d_hidden=8, moe_group=dist.group.WORLD, seed=1)
        x = torch.randn(6, 8, requires_grad=True)
        trained(layer, x)  # connects, and starts all threads
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _provoke(provocation, rank)
        script(layer, x)
        if not is_whole:
            module = sys.modules["_freed_first"] = types.ModuleType("_freed_first")
            module.end = _End()
            del module
    except BaseException:
        os._exit(_FAILED)
    ctypes.pythonapi.Py_Exit(0)  # finalizes as the end of a script does


class _End:
    """Ends the process, once the threads that wait for the interpreter's lock have had it."""

    def __del__(self, sleep=time.sleep, end=os._exit):
        sleep(0.02)
        end(0)


def _provoke(provocation: str, rank: int) -> None:
    if provocation == "idle":
        cpus = sorted(os.sched_getaffinity(0))
        for thread in map(int, os.listdir("/proc/self/task")):
            os.sched_setaffinity(thread, {cpus[rank % len(cpus)]})
            if thread != os.getpid():
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def trained(layer: FMoE, x: Tensor) -> None:
    layer(x).sum().backward()


def with_hooks(layer: FMoE, x: Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):  # works capture the hooks
        layer(x)


def evaluated(layer: FMoE, x: Tensor) -> None:
    with torch.inference_mode():
        layer(x)


def averaged(layer: FMoE, x: Tensor) -> None:
    trained(layer, x)
    parallel.average_gradients(layer, dist.group.WORLD)
    parallel.clip_grad_norm_(layer.parameters(), 1.0, dist.group.WORLD)


def group_destroyed(layer: FMoE, x: Tensor) -> None:
    trained(layer, x)
    layer.keep = layer  # the layer outlives the call, and with it the group
    dist.destroy_process_group()


def plain(layer: FMoE, x: Tensor) -> None:
    out = torch.empty(8, 4)
    dist.all_to_all_single(out, torch.zeros(8, 4))
    dist.all_gather_into_tensor(torch.empty(16, 4), out)


def not_waited_for(layer: FMoE, x: Tensor) -> None:
    layer.keep = dist.all_reduce(torch.zeros(3), async_op=True)


def alone(layer: FMoE, x: Tensor) -> None:
    if dist.get_rank() == 0:  # the other one never joins, and ends
        layer.keep = dist.all_reduce(torch.zeros(3), async_op=True)
