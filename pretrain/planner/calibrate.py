"""``fmoe plan calibrate``: measure the operations and collectives of these machines, and write a cluster file."""

import itertools
import json
import operator
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fmoe.cli import Parser, run
from fmoe.errors import UserError
from fmoe.experts import FFNExperts
from fmoe.experts.call import ExpertCall
from fmoe.runtime import launcher
from fmoe.runtime.collectives import run as run_collective
from megatron_patch import bf16_linear
from pretrain.config import Recipe
from pretrain.config.load import to_toml
from pretrain.files import refuse_existing, replacing
from pretrain.models.config import DTYPES
from pretrain.planner.cluster import Cluster, Device, Kind, Link, Points
from pretrain.planner.in_step import in_steps
from pretrain.planner.timer import Step, Timer, idle_seconds
from pretrain.start import process, ranks
from pretrain.start.job import Job
from pretrain.start.launch import rendezvous

_PROGRAM = "fmoe plan calibrate"
_BYTES_COPIED = 1 << 28  # more than the caches of most processors hold
_WIDTHS = (64, 128, 256, 512, 1024, 2048)  # these and others on a CPU; a GPU takes larger sizes
_ROWS = (8, 32, 128, 512, 2048)
_STEP_WIDTHS = (32, 96, 192, 512)  # of models that are trained
_LOOK = 10.0  # seconds in which the speed of the idle machine is found
_PATIENCE = 120.0  # seconds that may be lost while other programs slow the machine
_BYTES = [4**power for power in range(5, 14)]  # 1 KiB to 64 MiB


def main(argv: Sequence[str]) -> int:
    """Measure these machines, write a cluster file, and return the exit code; see docs/planner.md.

    Starts ranks on this machine, unless torchrun has started them.

    Raises:
        UserError: an option is invalid, the file cannot be written, or there are fewer GPUs than ranks.
    """
    parser = Parser(
        prog=_PROGRAM,
        description="Time products, attention, experts, memory and collectives on this machine, and write the figures "
        "to a cluster file. Other work on the machine spoils them. Under torchrun, all machines of the job take part.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the cluster file to write (TOML)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing FILE")
    default = torch.cuda.device_count() or 2
    parser.add_argument(
        "--ranks", type=int, default=default, metavar="N", help="number of ranks (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats: a minute on two cores")
    arguments = parser.parse_args(argv)
    if arguments.ranks < 1:
        raise UserError(f"--ranks {arguments.ranks} must be at least 1")
    refuse_existing([arguments.out], arguments.overwrite)
    if launcher.is_launched() or arguments.ranks == 1:
        return process.run_rank(lambda: _measure(arguments.out, arguments.quick))
    job = Job(_PROGRAM, Recipe(), tuple(argv), processes_per_node=arguments.ranks, program=_PROGRAM)
    with rendezvous(job) as environment:
        return ranks.run(job, environment, command=(sys.executable, "-m", "pretrain.planner.calibrate"))


@torch.no_grad()
def _measure(out: Path, quick: bool) -> int:
    device = process.start().device
    if quick:
        timer = Timer(idle_seconds(_LOOK / 10), device, repeats=5, min_seconds=0.002, patience=_PATIENCE / 10)
    else:
        timer = Timer(idle_seconds(_LOOK), device, repeats=9, min_seconds=0.005, patience=_PATIENCE)
    stride = 2 if quick else 1
    points = partial(_points, timer, stride)
    # Some collectives wait for the system's scheduler: their mean counts, over many calls and in any state.
    of_many = Timer(timer.idle, device, repeats=timer.repeats, min_seconds=20 * timer.min_seconds, patience=0.0)
    local_size = launcher.number("LOCAL_WORLD_SIZE", 1)
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
        memory = torch.cuda.mem_get_info()[1]
    else:
        name = f"{torch.get_num_threads()} thread(s) of a CPU, {platform.processor() or platform.machine()},"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_size
    collectives = _collectives(partial(_points, of_many, stride), device)
    cluster = Cluster(
        name=out.stem,
        source=f"measured on {name} with torch {torch.__version__} and {dist.get_backend()}",
        num_ranks=dist.get_world_size(),
        device=_device(points, timer, memory),
        links=_links(collectives["send"], local_size),
        collectives=collectives,
    )
    widths = [4 * width if device.type == "cuda" else width for width in _STEP_WIDTHS[::stride]]
    cluster = replace(cluster, device=in_steps(timer, cluster, widths, _say))
    if dist.get_rank() == 0:
        with replacing(out) as [file]:
            file.write(cluster_text(cluster).encode())
    _say(f"wrote {out}")
    return 0


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        sys.stderr.write(f"{_PROGRAM}: {line}\n")


def _points(timer: Timer, stride: int, name: str, make: Callable[..., Step], *axes: Sequence[int]) -> Points:
    """Return the points of a grid of every ``stride``-th of the sizes, of which ``make(*sizes)`` returns the step."""
    _say(name)
    points: list[tuple[float, ...]] = []
    for sizes in itertools.product(*(axis[::stride] for axis in axes)):
        seconds, spread = timer(make(*sizes))
        # Noise must not make a larger operation faster than a smaller one.
        smaller = [point[-2] for point in points if all(map(operator.le, point, sizes))]
        points.append((*sizes, max([seconds, *smaller]), spread))
    return tuple(points)


def _device(points: Callable[..., Points], timer: Timer, memory: int) -> Device:
    is_gpu = timer.device.type == "cuda"
    new = partial(torch.ones, dtype=torch.float32, device=timer.device)
    one = new(1)
    launch, launch_spread = timer(lambda: one.add_(1))
    a = new(_BYTES_COPIED // 4)
    b = torch.ones_like(a)
    c = torch.ones_like(a)
    moved, moved_spread = timer(lambda: torch.add(a.copy_(b), b, out=c))  # a copy of two and a sum of three tensors
    widths = [4 * width if is_gpu else width for width in _WIDTHS]
    rows = [8 * number if is_gpu else number for number in _ROWS]
    operations: dict[Any, tuple[Any, ...]] = {
        "gemm": (_gemm, rows, widths, widths),
        "attention": (_attention, (1, 4, 16), rows[1:], (32, 64, 128)),
        "attention_backward": (partial(_backward, _attention), (1, 4, 16), rows[1:], (32, 64, 128)),
        "experts": (_experts, (2, 4, 8), rows[:3], widths[:4], widths[1:]),
        "experts_backward": (partial(_backward, _experts), (2, 4, 8), rows[:3], widths[:4], widths[1:]),
        "move": (_move, _BYTES),
    }
    measured: dict[Any, dict[Any, Points]] = {name: {} for name in operations}
    for dtype in ("fp32", "bf16", "fp16") if is_gpu else ("fp32", "bf16"):  # fp16 takes CPUs forty times as long
        values = partial(torch.rand, dtype=DTYPES[dtype], device=timer.device)
        for name, (make, *axes) in operations.items():
            measured[name][dtype] = points(f"{name}, {dtype}", partial(make, values), *axes)
    return Device(
        memory=memory,
        peak={
            dtype: max(2 * m * k * n / seconds for m, k, n, seconds, _ in points)
            for dtype, points in measured["gemm"].items()
        },
        efficiency=1.0,
        bandwidth=5 * a.nbytes / moved,
        launch=launch,
        asynchronous=is_gpu,
        measured=measured,
        spread={"bandwidth": moved_spread, "launch": launch_spread},
    )


def _gemm(values: Callable[..., Tensor], m: int, k: int, n: int) -> Step:
    x = values(m, k)
    weight = values(n, k)
    if x.dtype == torch.bfloat16 and bf16_linear.is_needed():  # as in training
        return partial(bf16_linear.product, x, weight.t())
    return partial(F.linear, x, weight)


def _backward(make: Callable[..., Any], *arguments: Any) -> Step:
    """Return a step that runs the backward pass of another one, with the gradients of all that it needs."""
    with torch.enable_grad():
        output = make(*arguments)()
        inputs = [x for x in _leaves(output.grad_fn, set()) if x.requires_grad]
        grad = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True, allow_unused=True)


def _leaves(node: Any, seen: set[Any]) -> list[Tensor]:
    """Return the leaf tensors of an autograd graph."""
    if node is None or node in seen:
        return []
    seen.add(node)
    if hasattr(node, "variable"):
        return [node.variable]
    return [leaf for following, _ in node.next_functions for leaf in _leaves(following, seen)]


def _attention(values: Callable[..., Tensor], heads: int, length: int, width: int) -> Step:
    x = values(1, heads, length, width).requires_grad_()
    return partial(F.scaled_dot_product_attention, x, x, x, is_causal=True)


def _experts(values: Callable[..., Tensor], num_experts: int, rows: int, d_model: int, d_hidden: int) -> Step:
    x = values(num_experts * rows, d_model).requires_grad_()
    with x.device:
        experts = FFNExperts(num_experts, d_model, d_hidden).to(x.dtype)
    for parameter in experts.parameters():  # as in training
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    @torch.enable_grad()
    def step() -> Tensor:
        return ExpertCall(experts, "experts", x, training=True).rows([x], [rows] * num_experts)[0]

    return step


def _move(values: Callable[..., Tensor], num_bytes: int) -> Step:
    x = values(num_bytes // 3 // values(1).element_size())
    return lambda: x + x  # into new memory, as most operations of a step


def _collectives(points: Callable[..., Points], device: torch.device) -> dict[Any, dict[int, Points]]:
    """Return the points of each kind, by the size of groups that all run at the same time."""
    world_size = dist.get_world_size()
    curves: dict[Any, dict[int, Points]] = {kind: {} for kind in get_args(Kind)}
    for size in range(2, world_size + 1):
        if world_size % size == 0:
            group, _ = dist.new_subgroups(size)
            unit = 4 * size  # bytes of a number for each rank
            num_bytes = sorted({unit * max(1, number // unit) for number in _BYTES})
            for kind in curves:
                make = partial(_collective, kind, group, device)
                curves[kind][size] = points(f"{kind}, {size} ranks", make, num_bytes)
    return curves


def _collective(kind: str, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Step:
    whole = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    part = whole[: len(whole) // group.size()].clone()
    last = group.size() - 1
    if kind == "send":
        if group.rank() == 0:
            return partial(dist.send, whole, group=group, group_dst=last)
        return partial(dist.recv, whole, group=group, group_src=0) if group.rank() == last else lambda: None
    calls: dict[str, Any] = {
        "all_reduce": partial(dist.all_reduce, whole),
        "all_gather": partial(dist.all_gather_into_tensor, whole, part),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
        "all_to_all": partial(dist.all_to_all_single, torch.empty_like(whole), whole),
    }
    return partial(run_collective, calls[kind], group=group)


def _links(sends: Mapping[int, Points], local_size: int) -> tuple[Link, ...]:
    """Return the levels within and between machines, by the time of messages over them."""
    links = []
    for size in sorted(sends.keys() & {local_size, dist.get_world_size()}):
        bandwidth = max(num_bytes / seconds for num_bytes, seconds, _ in sends[size])
        links.append(Link(size=size, bandwidth=bandwidth, latency=sends[size][0][1]))
    return tuple(links)


def cluster_text(cluster: Cluster) -> str:
    """Return the TOML text of a cluster, which `pretrain.planner.cluster.load_cluster` reads."""
    values = json.loads(json.dumps(asdict(cluster)))  # whose keys are strings
    lines = [f"{key} = {to_toml(value)}\n" for key, value in values.items() if value is not None]
    return "".join(lines).replace("], [", "],\n    [")


if __name__ == "__main__":  # a rank
    job = ranks.launched_job()
    sys.exit(run(_PROGRAM, lambda: main(sys.argv[1:] if job is None else job.argv)))
