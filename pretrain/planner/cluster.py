"""Clusters for the planner: device, links and collectives, from published figures or from ``fmoe plan calibrate``.

A table of measured points has a row for each point: its sizes, the seconds, and the spread of the seconds (distance
of the quartiles / median).
"""

import itertools
import json
import math
import reprlib
import tomllib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval, MinLen

from fmoe.errors import UserError, known_names
from pretrain.config.keys import Name, NotNegativeFloat, Positive, PositiveFloat, check_path
from pretrain.config.validation import limit_of

CLUSTERS = Path(__file__).parent / "clusters"
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

_BACKWARD = {"attention": 2.5, "experts": 2.0}  # FLOPs of a backward pass, in forward passes
Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
Measured = Literal["gemm", "attention", "attention_backward", "experts", "experts_backward", "move"]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Points = tuple[tuple[NotNegativeFloat, ...], ...]
# Sizes of the tables of an operation, with the power in which its work grows with each.
_POWERS = {
    "gemm": (1, 1, 1),  # m, k, n of [m, k] @ [k, n]
    "attention": (1, 2, 1),  # heads of all sequences, length, width of a head
    "experts": (1, 1, 1, 1),  # experts, rows of each, d_model, d_hidden
    "attention_backward": (1, 2, 1),
    "experts_backward": (1, 1, 1, 1),
    "move": (1,),  # bytes
}


class _Table:
    __pydantic_config__ = {"strict": True, "extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012 - pydantic's name


@dataclass(frozen=True, kw_only=True)
class Link(_Table):
    """A level of the network: the ranks of a node, of a rack, of the cluster.

    Attributes:
        size: number of consecutive ranks that this level connects.
        bandwidth: bytes per second of each rank, in each direction.
        latency: seconds of a message without bytes.
    """

    size: Positive
    bandwidth: PositiveFloat
    latency: NotNegativeFloat


@dataclass(frozen=True, kw_only=True)
class Device(_Table):
    """The device of a rank.

    Attributes:
        memory: bytes.
        peak: FLOP/s by dtype.
        efficiency: largest share of ``peak`` that a product reaches, for operations that are not measured.
        bandwidth: bytes per second, read and written together.
        launch: seconds of an operation without work.
        host, host_backward: seconds in which the host prepares an operation of a training step: modules in Python, and
            autograd in backward passes.
        asynchronous: whether the host prepares operations while the device runs others, as with GPUs. The host's
            seconds then count only beyond the device's.
        measured: tables of points by operation and dtype: gemm (m, k, n), attention (heads of all sequences, length,
            width of a head), experts (experts, rows of each, d_model, d_hidden), and move (bytes read and written by
            an operation that computes little). Attention is causal. Forward and backward passes are separate:
            attention_backward, experts_backward.
        operations: tables of points (bytes, seconds, spread) of other operations within training steps, by torch's name
            and dtype.
        in_step: tables of points (bytes, factor, spread) of the operations of ``measured``, by torch's name and dtype:
            how many times as long they take within training steps.
        spread: spread of ``bandwidth`` and ``launch``, if measured.
    """

    memory: PositiveFloat
    peak: Annotated[Mapping[Dtype, PositiveFloat], MinLen(1)]
    efficiency: Annotated[float, Interval(gt=0, le=1)]
    bandwidth: PositiveFloat
    launch: NotNegativeFloat
    host: NotNegativeFloat = 0.0
    host_backward: NotNegativeFloat = 0.0
    asynchronous: bool = False
    measured: Mapping[Measured, Mapping[Dtype, Points]] = field(default_factory=dict)
    operations: Mapping[Name, Mapping[Dtype, Points]] = field(default_factory=dict)
    in_step: Mapping[Name, Mapping[Dtype, Points]] = field(default_factory=dict)
    spread: Mapping[Literal["bandwidth", "launch"], NotNegativeFloat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tables in self.measured.items():
            for dtype, points in tables.items():
                _check_points(f"device.measured.{name}.{dtype}", points, len(_POWERS[name]))
        for field_name in ("operations", "in_step"):
            for operation, tables in getattr(self, field_name).items():
                for dtype, points in tables.items():
                    _check_points(f"device.{field_name}.{operation}.{dtype}", points, 1)


@dataclass(frozen=True, kw_only=True)
class Price(_Table):
    """Price of one rank for one hour."""

    per_rank_hour: PositiveFloat
    currency: Name


@dataclass(frozen=True, kw_only=True)
class Cluster(_Table):
    """A cluster of equal devices, and the seconds of their operations.

    Attributes:
        source: where the figures come from, as a sentence.
        num_ranks: largest number of ranks of a plan.
        links: levels of the network, from the inside out; empty for a single rank.
        collectives: measured points (bytes, seconds, spread) by kind and number of consecutive ranks. Bytes are those
            of `collective_seconds`.
    """

    name: Name
    source: Name
    num_ranks: Positive
    links: tuple[Link, ...] = ()
    device: Device
    collectives: Mapping[Kind, Mapping[Positive, Points]] = field(default_factory=dict)
    price: Price | None = None

    def __post_init__(self) -> None:
        for index, (inner, outer) in enumerate(itertools.pairwise(self.links), 1):
            if outer.size == inner.size or outer.size % inner.size:
                raise UserError(f"links.{index}.size={outer.size} must be a larger multiple of {inner.size}")
        reach = self.links[-1].size if self.links else 1
        if self.num_ranks > reach:
            raise UserError(f"num_ranks={self.num_ranks} must be at most {reach}, the size of the last of links")
        for kind, curves in self.collectives.items():
            for size, points in curves.items():
                _check_points(f"collectives.{kind}.{size}", points, 1)

    def gemm_seconds(self, m: float, k: float, n: float, dtype: str, batch: int = 1) -> float:
        """Return the seconds of a product [m, k] @ [k, n], or of a batch of products in one operation.

        Raises:
            UserError: the cluster has no figures for the dtype. All methods with a dtype raise it.
        """
        seconds = self._measured("gemm", dtype, m, k, n)
        if seconds is None:
            return self._unmeasured(batch * 2 * m * k * n, batch * (m * k + k * n + m * n), dtype)
        return seconds + (batch - 1) * max(0.0, seconds - self.device.launch)

    def attention_seconds(
        self, heads: float, length: float, head_dim: float, dtype: str, backward: bool = False
    ) -> float:
        """Return the seconds of a pass of causal attention, over the ``heads`` of all sequences together."""
        seconds = self._pass("attention", backward, dtype, heads, length, head_dim)
        if seconds is None:
            seconds = self._unmeasured(2 * heads * length**2 * head_dim, 4 * heads * length * head_dim, dtype)
            seconds *= _BACKWARD["attention"] if backward else 1
        return seconds

    def experts_seconds(
        self, num_experts: int, rows: float, d_model: float, d_hidden: float, dtype: str, backward: bool = False
    ) -> float:
        """Return the seconds of a pass of a rank's experts, which have two products.

        Args:
            rows: mean rows per expert.
            d_hidden: hidden width; 1.5 times that of gated experts, which have three products.
        """
        seconds = self._pass("experts", backward, dtype, num_experts, rows, d_model, d_hidden)
        if seconds is None:
            seconds = 2 * self.gemm_seconds(rows, d_model, d_hidden, dtype, num_experts)
            seconds *= _BACKWARD["experts"] if backward else 1
        return seconds

    def move_seconds(self, num_bytes: float, dtype: str = "fp32") -> float:
        """Return the seconds of an operation that computes little and reads and writes ``num_bytes`` together."""
        seconds = self._measured("move", dtype, num_bytes) if num_bytes else None
        if seconds is not None:
            return seconds
        return self.device.launch + num_bytes / self.device.bandwidth

    def operation_seconds(self, name: str, num_bytes: float, dtype: str) -> float:
        """Return the seconds of an operation that computes little, by torch's name and by what it reads and writes."""
        tables: Mapping[Any, Points] = self.device.operations.get(name, {})
        if dtype in tables:
            return _interpolated(_tree(tables[dtype]), (num_bytes,), (1,))
        return self.move_seconds(num_bytes, dtype)

    def in_step(self, name: str, num_bytes: float, dtype: str) -> float:
        """Return how many times as long as in ``measured`` an operation takes within a training step."""
        tables: Mapping[Any, Points] = self.device.in_step.get(name, {})
        return _interpolated(_tree(tables[dtype]), (num_bytes,), (0,)) if dtype in tables else 1.0

    def collective_seconds(self, kind: str, group_size: int, span: int, num_bytes: float) -> float:
        """Return the seconds of a collective while all groups of its size run it.

        A measurement counts for groups of the same size and the same outermost link. Without one, the levels of the
        network work one after the other, from the inside out, each on what the levels inside have left to a rank
        ("BlueConnect", Cho et al., 2019). A level takes bytes / bandwidth + steps * latency (Thakur et al., 2005,
        "Optimization of Collective Communication Operations in MPICH"): log2 p steps of recursive halving or
        doubling, and p - 1 of pairwise exchange for all-to-all. The arithmetic of a reduction is left out.

        Args:
            kind: all_reduce, all_gather, reduce_scatter, all_to_all, or send, from one rank to another.
            group_size: number of ranks.
            span: number of consecutive ranks over which the group stretches evenly, from ``group_size`` to the size
                of the last link.
            num_bytes: bytes of the tensor that is reduced, scattered or sent, or of the gathered one. For all_to_all,
                bytes of all rows of a rank, also those that it keeps.
        """
        assert 1 <= group_size <= span
        if group_size == 1:
            return 0.0
        links = self._links_within(span)
        points = self.collectives.get(kind, {}).get(group_size)  # type: ignore[call-overload]
        if points is not None and len(self._links_within(group_size)) == len(links):
            return _interpolated(_tree(points), (num_bytes,), (1,))
        if kind == "send":
            return links[-1].latency + num_bytes / links[-1].bandwidth
        seconds = 0.0
        inside = 1
        for link in links:
            reached = max(inside, min(group_size, link.size * group_size // span))
            if kind == "all_to_all":
                steps = reached - inside
                share = steps / group_size
            else:
                steps = math.ceil(math.log2(reached / inside))
                share = 1 / inside - 1 / reached
            seconds += steps * link.latency + share * num_bytes / link.bandwidth
            inside = reached
        return 2 * seconds if kind == "all_reduce" else seconds

    def _links_within(self, span: int) -> Sequence[Link]:
        sizes = [link.size for link in self.links]
        return self.links[: bisect_left(sizes, span) + 1]

    def _measured(self, operation: str, dtype: str, *sizes: float) -> float | None:
        tables: Mapping[Any, Mapping[Any, Points]] = self.device.measured
        points = tables.get(operation, {}).get(dtype)
        return _interpolated(_tree(points), sizes, _POWERS[operation]) if points else None

    def _pass(self, operation: str, backward: bool, dtype: str, *sizes: float) -> float | None:
        if not backward:
            return self._measured(operation, dtype, *sizes)
        seconds = self._measured(f"{operation}_backward", dtype, *sizes)
        if seconds is None:
            seconds = self._measured(operation, dtype, *sizes)
            return None if seconds is None else _BACKWARD[operation] * seconds
        return seconds

    def _unmeasured(self, work: float, numbers: float, dtype: str) -> float:
        """Return the seconds of ``work`` FLOPs on ``numbers`` numbers that are read or written: the roofline."""
        device = self.device
        peaks: Mapping[Any, float] = device.peak
        if dtype not in peaks:
            raise UserError(f"cluster {self.name} has no device.peak for {dtype}; {known_names(dtype, peaks)}")
        moved = numbers * DTYPE_BYTES[dtype] / device.bandwidth
        return device.launch + max(work / (peaks[dtype] * device.efficiency), moved)


def load_cluster(name: str) -> Cluster:
    """Return the cluster of a TOML file, or a shipped one with a number of ranks, such as ``h100-2048``.

    Raises:
        UserError: there is no such cluster; the file cannot be read; a key is unknown or missing; or a figure is
            impossible. The message names file, key, value and limit.
    """
    check_path("cluster", name)
    if Path(name).is_file():
        return _read(Path(name))
    base, _, ranks = name.rpartition("-")
    shipped = [path.stem for path in sorted(CLUSTERS.glob("*.toml"))]
    if base not in shipped or not ranks.isdecimal():
        names = known_names(name, [f"{stem}-RANKS" for stem in shipped])
        raise UserError(f"cluster {name!r} is neither a file nor a shipped cluster; {names}")
    cluster = _read(CLUSTERS / f"{base}.toml")
    if not 1 <= int(ranks) <= cluster.num_ranks:
        raise UserError(f"cluster {name!r}: the number of ranks must be 1 to {cluster.num_ranks}")
    return replace(cluster, name=name, num_ranks=int(ranks))


def _read(path: Path) -> Cluster:
    from pydantic import TypeAdapter, ValidationError

    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"cluster {path} cannot be read: {error}") from error
    try:  # JSON: of Python's dictionaries, a strict validator builds no dataclasses
        return TypeAdapter(Cluster).validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise UserError(f"cluster {path}: {_message(error.errors(include_url=False)[0])}") from error


def _message(error: Mapping[str, Any]) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "unexpected_keyword_argument":
        return f"unknown key {key}"
    if error["type"] == "missing":
        return f"{key} is missing"
    return f"{key}={reprlib.repr(error['input'])} {limit_of(error)}"


def _check_points(key: str, points: Points, num_sizes: int) -> None:
    if not points:
        raise UserError(f"{key}=[] must have at least 1 point")
    for point in points:
        if len(point) != num_sizes + 2 or 0 in point[:-1]:
            raise UserError(f"{key}: {list(point)} must be {num_sizes} sizes and seconds above 0, and a spread")


@cache
def _tree(points: Points) -> dict[float, Any]:
    """Return the seconds by first size, second size and so on, in ascending order."""
    tree: dict[float, Any] = {}
    for *sizes, last, seconds, _ in sorted(points):
        branch = tree
        for size in sizes:
            branch = branch.setdefault(size, {})
        branch[last] = seconds
    return tree


def _interpolated(tree: Any, sizes: Sequence[float], powers: Sequence[int]) -> float:
    """Return the seconds at ``sizes``, linear between points in the logarithms of sizes and seconds.

    A size below its first point counts as the first. Above the last, the seconds grow with the power of the size.
    """
    if not sizes:
        return tree
    axis = list(tree)
    scale = max(1.0, sizes[0] / axis[-1]) ** powers[0]
    size = min(max(sizes[0], axis[0]), axis[-1])
    above = bisect_left(axis, size)
    upper = _interpolated(tree[axis[above]], sizes[1:], powers[1:])
    if axis[above] == size:
        return scale * upper
    lower = _interpolated(tree[axis[above - 1]], sizes[1:], powers[1:])
    share = math.log(size / axis[above - 1]) / math.log(axis[above] / axis[above - 1])
    return scale * lower * (upper / lower) ** share
