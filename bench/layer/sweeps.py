"""Sweeps of the time along one axis: number of experts at equal rows, tokens, skew, or experts per token.

If times at several values are compared with each other, ours is timed again with all values interleaved, because rows
are measured one after the other, and the speed of the machine changes from minute to minute.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from bench import frame
from bench.layer import contenders, limits
from bench.layer.problem import Problem, Shape, skewed_counts
from bench.layer.rows import Row, Settings, speedup
from fmoe.errors import UserError


@dataclass(frozen=True)
class Sweep:
    """An axis.

    Args:
        title: title of the axis.
        values: default values.
        shape_at: returns the shape at a value, given the initial shape.
        is_forced: whether the value is the skew of given choices.
    """

    title: str
    values: tuple[float, ...]
    shape_at: Callable[[Shape, float], Shape]
    is_forced: bool = False

    def problem(self, shape: Shape, dtype, value: float, seed: int) -> Problem:
        """Return the problem at a value.

        Raises:
            UserError: the value is invalid for this axis or shape.
        """
        if value < 1 or not (self.is_forced or float(value).is_integer()):
            raise UserError(
                f"--values={value:g} must be {'at least 1' if self.is_forced else 'a positive whole number'}"
            )
        at = self.shape_at(shape, value)
        if at.top_k > at.num_experts:
            raise UserError(f"--values={value:g}: {at} has more experts per token than experts")
        skew = value if self.is_forced else None
        if skew is not None:
            skewed_counts(at, skew)
        return Problem(at, dtype, skew, seed)


SWEEPS = {
    "experts": Sweep(
        "experts", (8, 16, 32, 64, 128, 256, 512), lambda shape, value: replace(shape, num_experts=int(value))
    ),
    "tokens": Sweep("tokens", (256, 1024, 4096, 16384, 65536), lambda shape, value: replace(shape, tokens=int(value))),
    "skew": Sweep("load of the hottest expert over the even one", (1, 2, 4), lambda shape, _: shape, is_forced=True),
    "top_k": Sweep("experts per token", (1, 2, 4, 8), lambda shape, value: replace(shape, top_k=int(value))),
}


@dataclass(frozen=True)
class Line:
    """``seconds = fixed + per_token * tokens``, the largest relative residual, and the tokens at which it occurs."""

    fixed: float
    per_token: float
    worst: float
    worst_at: float


def fit_line(tokens: Sequence[float], seconds: Sequence[float]) -> Line:
    """Return the line with the least sum of squared relative residuals, so that short times weigh as much as long ones.

    Args:
        tokens, seconds: at least two different numbers of tokens.
    """
    # Weighted least squares with weights 1 / seconds^2.
    weights = [second**-2 for second in seconds]
    total = math.fsum(weights)
    mean_x = math.fsum(w * x for w, x in zip(weights, tokens, strict=True)) / total
    mean_y = math.fsum(w * y for w, y in zip(weights, seconds, strict=True)) / total
    spread = math.fsum(w * (x - mean_x) ** 2 for w, x in zip(weights, tokens, strict=True))
    both = math.fsum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, tokens, seconds, strict=True))
    slope = both / spread
    fixed = mean_y - slope * mean_x
    residuals = [(y - fixed - slope * x) / y for x, y in zip(tokens, seconds, strict=True)]
    worst = max(range(len(residuals)), key=lambda i: abs(residuals[i]))
    return Line(fixed, slope, residuals[worst], tokens[worst])


def same_curve(rows: Sequence[Row]) -> list[list[Row]]:
    """Group the rows of one sweep by shape, precision, pass and threads."""
    curves: dict[tuple, list[Row]] = {}
    for row in rows:
        point = row.point
        key = (point.problem.shape.name, point.precision, point.passes, point.threads)
        curves.setdefault(key, []).append(row)
    return list(curves.values())


def curve_label(curve: Sequence[Row]) -> str:
    """Return the properties that the rows of a curve share."""
    point = curve[0].point
    return f"{point.problem.shape.name}, {point.precision}, {point.passes}, threads {point.threads}"


def seconds_of(row: Row, name: str) -> float | None:
    """Return the median of a contender, in whichever measurement it was timed."""
    for measured in (row.timed, row.slow):
        if measured is not None and name in measured.seconds:
            return measured.median(name)
    return None


@dataclass(frozen=True)
class Along:
    """One of our backends at all values of a curve, interleaved.

    Attributes:
        curve: rows of the curve.
        name: name of the contender.
        timed: its times; contenders are the values, and the first value is the reference.
    """

    curve: Sequence[Row]
    name: str
    timed: frame.Measurement

    @property
    def label(self) -> str:
        return curve_label(self.curve)

    def medians(self) -> Mapping[float, float]:
        """Return the seconds by value."""
        return {row.point.value: self.timed.median(_at(row.point.value)) for row in self.curve}

    def over_first(self) -> Mapping[float, float]:
        """Return the time relative to the first value, by value, from the paired ratios."""
        return {row.point.value: 1 / self.timed.ratio(_at(row.point.value)).estimate for row in self.curve}


INTERLEAVED = ("tokens", "skew")  # whose values are compared with each other


def along(sweep: str | None, rows: Sequence[Row], settings: Settings) -> list[Along]:
    """Time our backends at all values of each curve, interleaved; only for the sweeps of `INTERLEAVED`."""
    if sweep not in INTERLEAVED:
        return []
    found = []
    for curve in same_curve(rows):
        name = curve[0].ours
        points = [row.point for row in curve]
        if len(points) < 2 or any(row.ours != name for row in curve) or name is None:
            continue
        torch.set_num_threads(points[0].threads)
        entries = [
            frame.Contender(
                _at(point.value),
                functools.partial(contenders.layer_step, settings.layers[name], replace(point.problem), point.backward),
                point.problem.shape.tokens,
            )
            for point in points
        ]
        timed = frame.measure(
            entries,
            rounds=settings.rounds,
            warmup=settings.warmup,
            reference=_at(points[0].value),
            seed=settings.seed,
            max_seconds=settings.seconds,
            min_seconds=settings.device.min_seconds,
            clock=settings.device.clock,
            label=f"{curve_label(curve)}, {name}, by {sweep}",
        )
        if not timed.failures:
            found.append(Along(curve, name, timed))
    return found


def _at(value: float) -> str:
    return f"{value:g}"


def lines(sweep: str, rows: Sequence[Row], interleaved: Sequence[Along] = ()) -> list[str]:
    """Return lines with the results of a sweep along its axis, by contender."""
    found = []
    for one in interleaved:
        head = f"* {one.label}: {one.name}, values interleaved: "
        if sweep == "tokens":
            medians = one.medians()
            line = fit_line(list(medians), list(medians.values()))
            found.append(
                f"{head}{line.fixed * 1e3:.3f} ms + {line.per_token * 1e6:.4f} ms per thousand tokens, "
                f"worst residual {line.worst:+.1%} at {line.worst_at:g} tokens"
            )
        else:
            times = (f"{value:g}x {ratio:.3f}" for value, ratio in one.over_first().items())
            found.append(f"{head}time over that at {one.curve[0].point.value:g}x: {', '.join(times)}")
    for curve in same_curve(rows):
        head = f"* {curve_label(curve)}: "
        done = {one.name for one in interleaved if one.label == curve_label(curve)}
        names = [name for name in curve[0].timed.seconds if name != limits.DENSE and name not in done]
        for name in names:
            there = [row for row in curve if name in row.timed.seconds]
            if sweep == "tokens" and len(there) >= 2:
                line = fit_line([row.point.value for row in there], [row.timed.median(name) for row in there])
                found.append(
                    f"{head}{name}: {line.fixed * 1e3:.3f} ms + {line.per_token * 1e6:.4f} ms per thousand tokens, "
                    f"worst residual {line.worst:+.1%} at {line.worst_at:g} tokens"
                )
            elif sweep == "skew" and len(there) >= 2 and name != limits.SPLIT:
                first = there[0].timed.median(name)
                times = (f"{row.point.value:g}x {row.timed.median(name) / first:.3f}" for row in there)
                found.append(f"{head}{name}: time over that at {there[0].point.value:g}x: {', '.join(times)}")
            elif sweep in ("experts", "top_k") and name != limits.SPLIT:
                ratios = [(row.point.value, speedup(row.timed, name, limits.SPLIT)) for row in there]
                times = (f"{value:g}: {1 / ratio.estimate:.3f}" for value, ratio in ratios if ratio is not None)
                found.append(f"{head}{name}: time over the {limits.SPLIT}, by {sweep}: {', '.join(times)}")
    return found


def order(name: str) -> int:
    """Return the position of a contender in a legend: limits, ours, the others."""
    names = (limits.DENSE, limits.SPLIT, *contenders.ALL_OURS)
    return names.index(name) if name in names else len(names)
