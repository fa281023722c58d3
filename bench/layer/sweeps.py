"""What the time does along one axis: experts at equal rows, tokens, the load of the hottest expert, experts a token."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.layer import contenders, limits
from bench.layer.problem import Problem, Shape, skewed_counts
from bench.layer.rows import Row, speedup
from fmoe.errors import UserError


@dataclass(frozen=True)
class Sweep:
    """An axis.

    Args:
        title: of the axis.
        values: by default.
        problem: from the shape it begins with, a precision and a value.
    """

    title: str
    values: tuple[float, ...]
    shape_at: Callable[[Shape, float], Shape]
    is_forced: bool = False

    def problem(self, shape: Shape, dtype, value: float, seed: int) -> Problem:
        """At a value.

        Raises:
            UserError: there is none.
        """
        if value < 1 or not (self.is_forced or float(value).is_integer()):
            raise UserError(
                f"--values {value:g} is not {'at least 1' if self.is_forced else 'a positive whole number'}"
            )
        at = self.shape_at(shape, value)
        if at.top_k > at.num_experts:
            raise UserError(f"--values {value:g}: {at} has more experts a token than experts")
        skew = value if self.is_forced else None
        if skew is not None:
            skewed_counts(at, skew)
        return Problem(at, dtype, skew, seed)


SWEEPS = {
    "experts": Sweep("experts", (8, 16, 32, 64, 128, 256), lambda shape, value: replace(shape, num_experts=int(value))),
    "tokens": Sweep("tokens", (256, 1024, 4096, 16384, 65536), lambda shape, value: replace(shape, tokens=int(value))),
    "skew": Sweep("load of the hottest expert over the even one", (1, 2, 4), lambda shape, _: shape, is_forced=True),
    "top_k": Sweep("experts a token", (1, 2, 4, 8), lambda shape, value: replace(shape, top_k=int(value))),
}


@dataclass(frozen=True)
class Line:
    """``seconds = fixed + per_token * tokens``, and the measured time that is farthest from it, in its own parts."""

    fixed: float
    per_token: float
    worst: float
    worst_at: float


def fit_line(tokens: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least sum of squares of relative residuals: the shortest time weighs as much as the longest.

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
    """Rows of one sweep by what they have in common: shape, precision, pass, threads."""
    curves: dict[tuple, list[Row]] = {}
    for row in rows:
        point = row.point
        key = (point.problem.shape.name, point.precision, point.passes, point.threads)
        curves.setdefault(key, []).append(row)
    return list(curves.values())


def curve_label(curve: Sequence[Row]) -> str:
    """What the rows of a curve have in common."""
    point = curve[0].point
    return f"{point.problem.shape.name}, {point.precision}, {point.passes}, threads {point.threads}"


def seconds_of(row: Row, name: str) -> float | None:
    """Median of a contender, wherever it was timed."""
    for measured in (row.timed, row.slow):
        if measured is not None and name in measured.seconds:
            return measured.median(name)
    return None


def lines(sweep: str, rows: Sequence[Row]) -> list[str]:
    """What a sweep comes to, by contender."""
    found = []
    for curve in same_curve(rows):
        head = f"* {curve_label(curve)}: "
        names = [name for name in curve[0].timed.seconds if name != limits.DENSE]
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
    """In tables and legends: limits, ours, the others."""
    names = (limits.DENSE, limits.SPLIT, *contenders.ALL_OURS)
    return names.index(name) if name in names else len(names)
