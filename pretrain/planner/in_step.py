"""Times of operations within training steps on this machine.

Within a step, tensors have other strides than in measurements of single operations, and come from memory rather than
from caches. So small models are trained, and each call of torch's operators is timed.
"""

import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fmoe.runtime import phases
from megatron_patch import cpu
from pretrain.config import AttentionConfig, ModelConfig, MoEConfig, ParallelConfig, Recipe, TrainConfig
from pretrain.dryrun.holding import hold
from pretrain.engine import Engine, init_parallel
from pretrain.models.config import DTYPES
from pretrain.planner.cluster import Cluster, Device
from pretrain.planner.prices import dtype_name, operation_seconds, update_bytes
from pretrain.planner.timer import Step, Timer, rounded
from pretrain.planner.trace import Operation, operation_of
from pretrain.start.process import Processes


class _Calls(TorchDispatchMode):
    """Times all calls of torch's operators.

    Attributes:
        seconds: of each call.
        operations: the operation of each call; None for a collective, and for a call that makes and changes no tensor.
    """

    def __init__(self, wait: Callable[[], None], is_named: bool):
        super().__init__()
        self.seconds: list[float] = []
        self.operations: list[Operation | None] = []
        self._wait = wait
        self._is_named = is_named

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._wait()
        self.seconds.append(time.perf_counter() - begin)
        if self._is_named:
            self.operations.append(self._operation(func, args, kwargs or {}, result))
        return result

    def _operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> Operation | None:
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        outputs = {x.untyped_storage().data_ptr() for x in tree_leaves(result) if isinstance(x, Tensor)}
        is_view = outputs <= inputs and not func._schema.is_mutable
        return None if is_view or not outputs or func.namespace == "c10d" else operation_of(func, args, kwargs, result)


@torch.enable_grad()
def in_steps(timer: Timer, cluster: Cluster, widths: Sequence[int], say: Callable[[str], None]) -> Device:
    """Return the cluster's device with the times of operations within steps, and the host's time for each.

    Collective.

    Args:
        cluster: measured operations and collectives of this job's ranks.
        widths: hidden sizes of the models.
        say: takes a line of progress.
    """
    cpu.install()
    init_parallel(Recipe(parallel=ParallelConfig(data=cluster.num_ranks)))
    overhead = _overhead(timer)
    figures = _Figures()
    for precision, width in itertools.product(cluster.device.measured["gemm"], widths):
        say(f"operations of a step, {precision}, {width} wide")
        engine = _engine(timer.device, width, precision)
        tokens = _tokens(engine.recipe)
        calls = _timed(timer, partial(engine.backward, 0, tokens), overhead)
        phase_seconds = _phases(timer, partial(engine.train_step, 0, tokens))
        figures.add(cluster, calls, phase_seconds)
        held = hold(engine)
        moved = update_bytes(precision, held.weights / DTYPES[precision].itemsize, held.masters + held.moments)
        figures.add_one("operations", "optimizer", precision, moved, phase_seconds["optimizer"])
    return replace(
        cluster.device,
        host=rounded(statistics.median(figures.hosts[False])),
        host_backward=rounded(statistics.median(figures.hosts[True])),
        operations=figures.points("operations"),
        in_step=figures.points("in_step"),
    )


class _Figures:
    """What the steps of several models gave.

    Attributes:
        hosts: the host's seconds of an operation of each model, by whether it is in the backward pass.
    """

    def __init__(self) -> None:
        self.hosts: dict[bool, list[float]] = {False: [], True: []}
        # By table, operation and dtype, and by the binary digits of the bytes: bytes and figure.
        self._found: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))

    def add(
        self, cluster: Cluster, calls: Sequence[tuple[Operation, float]], phase_seconds: Mapping[str, float]
    ) -> None:
        """Add a model's operations with their seconds, and the host's share of its passes."""
        left = {
            False: sum(phase_seconds[name] for name in ("forward", "experts", "other")),
            True: phase_seconds["backward"],
        }
        for operation, seconds in calls:
            term, alone = operation_seconds(cluster, operation)
            if not alone or not operation.moved:
                continue
            left[operation.is_backward] -= seconds
            key = (operation.name, dtype_name(operation), operation.moved)
            if term == "memory":
                self.add_one("operations", *key, seconds)
            else:
                self.add_one("in_step", *key, seconds / alone)
        counts = Counter(operation.is_backward for operation, _ in calls)
        for is_backward, seconds in left.items():
            self.hosts[is_backward].append(max(0.0, seconds / counts[is_backward]))

    def add_one(self, table: str, name: str, dtype: str, moved: float, figure: float) -> None:
        """Add a figure of an operation that moves some bytes."""
        self._found[table][name, dtype][int(moved).bit_length()].append((moved, figure))

    def points(self, table: str) -> dict[Any, Any]:
        """Return the table's points by operation and dtype."""
        points: dict[Any, Any] = defaultdict(dict)
        for (name, dtype), sizes in self._found[table].items():
            points[name][dtype] = tuple(_point(sizes[digits]) for digits in sorted(sizes))
        return dict(points)


def _point(calls: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the mean size and figure of calls of one operation, and the spread of the figure."""
    sizes, figures = zip(*calls, strict=True)
    figure = statistics.fmean(figures)
    first, _, third = statistics.quantiles([*figures, figure], n=4, method="inclusive")
    return rounded(statistics.fmean(sizes)), rounded(figure), rounded((third - first) / figure)


def _phases(timer: Timer, step: Step) -> dict[str, float]:
    """Return the seconds of a step's phases."""

    def milliseconds() -> dict[str, float]:
        phases.start(timer.device, (schedules, "backward_step"))
        step()
        return phases.stop()

    steps = timer.while_idle(milliseconds)
    return {name: statistics.median(of_step[name] for of_step in steps) / 1e3 for name in steps[0]}


def _overhead(timer: Timer) -> float:
    """Return the seconds that `_Calls` adds to a call."""
    tiny = torch.ones(1, dtype=torch.float32, device=timer.device)
    alone, _ = timer(lambda: tiny.add_(1))

    def seconds() -> float:
        with _Calls(timer.wait, is_named=False) as calls:
            for _ in range(100):
                tiny.add_(1)
        return statistics.median(calls.seconds)

    return statistics.median(timer.while_idle(seconds)) - alone


def _timed(timer: Timer, step: Step, overhead: float) -> list[tuple[Operation, float]]:
    """Return the operations of a step, and their seconds."""
    step()  # warms up
    step()
    with _Calls(timer.wait, is_named=True) as named:
        step()

    def seconds() -> list[float]:
        with _Calls(timer.wait, is_named=False) as calls:
            step()
        return calls.seconds

    passes = timer.while_idle(seconds)
    operations = []
    for operation, *of_call in zip(named.operations, *passes, strict=True):
        if operation:
            operations.append((operation, max(1e-8, statistics.median(of_call) - overhead)))
    return operations


def _engine(device: torch.device, width: int, precision: Any) -> Engine:
    """Return the engine of a model whose sequences are about as long as it is wide."""
    num_ranks = dist.get_world_size()
    model = ModelConfig(
        num_layers=2,
        hidden_size=width,
        ffn_hidden_size=4 * width,
        sequence_length=max(16, width // 2),
        vocab_size=8 * width,
        attention=AttentionConfig(num_heads=max(1, width // 64)),
        moe=MoEConfig(num_experts=4, top_k=2, gate="naive", capacity_factor=None, eval_capacity_factor=None),
    )
    train = TrainConfig(global_batch=8 * num_ranks, micro_batch=2, precision=precision)
    recipe = Recipe(model=model, parallel=ParallelConfig(data=num_ranks), train=train)
    return Engine(recipe, Processes(dist.get_rank(), num_ranks, device))


def _tokens(recipe: Recipe) -> Any:
    """Return samples that are all the same, so that all ranks route alike."""
    tokens = np.random.default_rng(0).integers(recipe.model.vocab_size, size=recipe.model.sequence_length + 1)
    return defaultdict(lambda: tokens)
