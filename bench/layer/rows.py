"""Rows of the benchmark: all contenders at one shape, precision, pass and number of threads.

Slow contenders (`Layer.is_slow`) are measured separately, with only the limit and ours, in few rounds, and are left out
if a step takes long.
"""

import functools
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from bench import frame
from bench.intervals import Interval, trimmed_mean_interval
from bench.layer import contenders, limits
from bench.layer.contenders import Layer
from bench.layer.device import Cpu, Cuda
from bench.layer.memory import Saved, saved_for_backward
from bench.layer.problem import Problem

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = {"forward": False, "forward+backward": True}
_SLOW_ROUNDS = 3
_PART = 4  # the first probe of a slow contender has one in this many of the experts and of the tokens


@dataclass(frozen=True)
class Point:
    """A point to measure.

    Args:
        value: value in the sweep that the point belongs to; None outside of sweeps.
    """

    problem: Problem
    precision: str
    passes: str
    threads: int
    value: float | None = None

    @property
    def label(self) -> str:
        skew = "" if self.problem.skew is None else f" skew {self.problem.skew:g}"
        where = f"threads {self.threads}" if self.problem.device == "cpu" else self.problem.device
        return f"{self.problem.shape}{skew}, {self.precision}, {self.passes}, {where}"

    @property
    def backward(self) -> bool:
        return PASSES[self.passes]

    @property
    def flops(self) -> int:
        """FLOPs of the experts' GEMMs."""
        shape = self.problem.shape
        return (6 if self.backward else 2) * shape.rows * shape.d_model * (shape.height + shape.d_hidden)


@dataclass(frozen=True)
class Row:
    """The measurement at a point.

    Attributes:
        timed: the limits and the contenders.
        slow: the contenders measured separately, with the GEMM limit and ours; None without such contenders.
        dropless: the dropless peers; ours is compared with the best of them.
        saved: saved memory by contender; only with a backward pass.
        peak: bytes by contender, if measured.
        told: facts about a contender that the device reports (`bench.layer.device`).
        left_out: lines about contenders that were left out.
    """

    point: Point
    timed: frame.Measurement
    slow: frame.Measurement | None
    dropless: Sequence[str]
    saved: Mapping[str, Saved]
    peak: Mapping[str, int]
    left_out: Sequence[str]
    told: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def ours(self) -> str | None:
        """Our contender to which the goals apply: native or cuda, if the run has it."""
        return next((name for name in contenders.ALL_OURS if name in self.timed.seconds), None)

    @property
    def best_peer(self) -> str | None:
        """The fastest dropless contender that is not ours."""
        peers = [name for name in self.dropless if name in self.timed.seconds]
        return min(peers, key=self.timed.median, default=None)

    def measurements(self) -> list[frame.Measurement]:
        """Return the measurements for the report, with the row's other figures as columns."""
        timed = self._with_facts(self.timed, self.timed.seconds)
        if self.slow is None:
            return [timed]
        return [timed, self._with_facts(self.slow, self.slow.seconds.keys() - self.timed.seconds.keys())]

    def _with_facts(self, measured: frame.Measurement, names: Collection[str]) -> frame.Measurement:
        shape = self.point.problem.shape
        facts = {}
        unit = shape.rows * shape.height * self.point.problem.dtype.itemsize
        for name in names:
            facts[name] = {
                "of the limit over E": _shown(speedup(measured, name, limits.SPLIT)),
                "over the best dropless peer": _shown(speedup(measured, name, self.best_peer)),
            }
            if measured is self.slow:
                facts[name]["ours over it"] = _shown(speedup(measured, self.ours, name)) if self.ours else ""
            if name in self.saved:
                total = self.saved[name].total
                facts[name] |= {"saved, MB": f"{total / 1e6:.2f}", "saved / (T K P)": f"{total / unit:.3f}"}
            if name in self.peak:
                facts[name]["peak, MB"] = f"{self.peak[name] / 1e6:.1f}"
            if self.point.problem.device != "cpu":
                facts[name]["TFLOP/s"] = f"{self.point.flops / measured.median(name) / 1e12:.1f}"
            facts[name] |= self.told.get(name, {})
        return replace(measured, facts=facts)


def speedup(measured: frame.Measurement, name: str, over: str | None) -> Interval | None:
    """Return the paired ratio of two contenders, time of ``over`` / time of ``name``; None if one is missing."""
    if name not in measured.seconds or over not in measured.seconds:
        return None
    pairs = zip(measured.seconds[over], measured.seconds[name], strict=True)
    return trimmed_mean_interval([[math.log(a / b) for a, b in pairs]]).exp()


def _shown(interval: Interval | None) -> str:
    return "" if interval is None else str(interval)


@dataclass
class Settings:
    """Settings of the measurement of rows.

    Args:
        rounds, warmup, seed: see `frame.measure`.
        seconds: approximate upper bound on the time of a row's rounds.
        patience: seconds of a step beyond which a slow contender is left out.
        without: contenders to leave out.
        only: the contenders to measure; None for all.
        device: device that runs the contenders, and measures peak memory if requested.
        layers: contenders by name; None for those of the device.
    """

    rounds: int = 10
    warmup: int = 1
    seed: int = 0
    seconds: float = 60.0
    patience: float = 15.0
    without: Sequence[str] = ()
    only: Sequence[str] | None = None
    device: Cpu | Cuda = field(default_factory=Cpu)
    layers: Mapping[str, Layer] | None = None

    def __post_init__(self):
        if self.layers is None:
            self.layers = self.device.layers()


def measure(point: Point, settings: Settings) -> Row:
    """Measure one row, with the point's number of threads."""
    torch.set_num_threads(point.threads)
    asked = point
    point = replace(point, problem=replace(point.problem))  # a copy, whose tensors end with the row
    left_out = []
    quick = {}
    slow = {}
    for name, layer in settings.layers.items():
        reason = _reason(name, layer, point, settings)
        if reason is None:
            (slow if layer.is_slow else quick)[name] = layer
        elif reason:
            left_out.append(reason)
    timed = _measure(point, settings, quick, {limits.DENSE: limits.dense, limits.SPLIT: limits.split}, settings.rounds)
    of_ours = dict([(name, layer) for name, layer in quick.items() if name in timed.seconds][:1])
    apart = None
    if slow:
        apart = _measure(
            point, settings, of_ours | slow, {limits.DENSE: limits.dense}, min(_SLOW_ROUNDS, settings.rounds)
        )
        apart = replace(apart, label=f"{point.label} (apart)")
    alive = {n: l for n, l in (quick | slow).items() if n in timed.seconds or (apart and n in apart.seconds)}
    saved = {}
    peak = {}
    told = {}
    for name, layer in alive.items():
        if point.backward:
            saved[name] = saved_for_backward(layer.build(point.problem).train(), point.problem.x_TD)
        measured = settings.device.peak(name, point.problem, point.backward, point.threads)
        if measured is not None:
            peak[name] = measured
        told[name] = settings.device.facts(layer, point.problem, point.backward)
    dropless = [n for n, l in (quick | slow).items() if l.is_dropless and n not in contenders.ALL_OURS]
    return Row(asked, timed, apart, dropless, saved, peak, left_out, told)


def _reason(name: str, layer: Layer, point: Point, settings: Settings) -> str | None:
    """Return why a contender is left out; "" if that needs no line, None if it is measured."""
    if name in settings.without or (settings.only and name not in settings.only):
        return ""
    if not layer.is_installed():
        return f"{name} is left out: {layer.needs} is not installed"
    if point.problem.skew is not None and not layer.takes_choices:
        return f"{name} is left out where choices are given: it cannot use given choices"
    if not layer.is_slow:
        return None
    slow = _too_slow(layer, point, settings.patience)
    return None if slow is None else f"{point.label}: {name} is left out: {slow}"


def _too_slow(layer: Layer, point: Point, patience: float) -> str | None:
    """Return why a step takes too long, or None. Time a part first: the whole takes at least `_PART` times as long."""
    shape = point.problem.shape
    part = replace(
        shape,
        tokens=max(shape.tokens // _PART, 1),
        num_experts=max(shape.num_experts // _PART, shape.top_k),
    )
    for tried, factor in ((part, _PART), (shape, 1)):
        try:
            problem = point.problem if tried is shape else replace(point.problem, shape=tried, skew=None)
            step = contenders.layer_step(layer, problem, point.backward)
            begin = time.perf_counter()
            step()
            if problem.device != "cpu":
                torch.cuda.synchronize()
        except Exception:  # `frame.measure` meets and reports it
            return None
        seconds = factor * (time.perf_counter() - begin)
        if seconds > patience:
            return f"a step takes {'at least ' * (factor > 1)}{seconds:.1f} s, more than --patience {patience:g}"
    return None


def _measure(
    point: Point, settings: Settings, layers: Mapping[str, Layer], bounds: Mapping, rounds: int
) -> frame.Measurement:
    tokens = point.problem.shape.tokens
    problem = point.problem
    entries = [
        frame.Contender(name, functools.partial(setup, problem, point.backward), tokens)
        for name, setup in bounds.items()
    ]
    entries += [
        frame.Contender(name, functools.partial(contenders.layer_step, layer, problem, point.backward), tokens)
        for name, layer in layers.items()
    ]
    return frame.measure(
        entries,
        rounds=rounds,
        warmup=settings.warmup,
        reference=limits.DENSE,
        seed=settings.seed,
        max_seconds=settings.seconds,
        min_seconds=settings.device.min_seconds,
        clock=settings.device.clock,
        label=point.label,
    )
