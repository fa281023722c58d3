"""Medians, quartiles and intervals, with only the standard library.

The estimate of a ratio is the 20% trimmed mean of the logarithms of the paired ratios, i.e. their geometric mean
without the lowest and the highest fifth, and its interval is Student's t for that mean (Tukey and McLaughlin 1963;
Yuen 1974). Reasons:

* Logarithms: with the other contender as the reference, the interval is the inverse, as it must be.
* Trimming: now and then something else on the machine interrupts a run, which is no property of the contender. If one
  run in ten is interrupted, the interval of the untrimmed mean of 20 rounds is eight times as wide. Without
  interruptions, trimming widens it by a tenth. (The median would widen it by a quarter, and its interval has steps.)
* No bootstrap: benchmarks have 10 to 30 rounds, for which its percentile interval is too narrow. The 95% interval used
  here contains the true value in 94% to 96% of cases from 5 rounds up, with and without interruptions, because the
  random order within pairs makes the noise symmetric.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles, variance

TRIMMED = 0.2  # share of the values that is cut at either end


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float

    def exp(self) -> "Interval":
        """Convert logarithms back to ratios."""
        return Interval(math.exp(self.estimate), math.exp(self.low), math.exp(self.high))

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median, third quartile, interpolated linearly (NumPy's default)."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, median, third = quantiles(values, n=4, method="inclusive")
    return first, median, third


def trimmed_mean_interval(rows: Sequence[Sequence[float]], confidence: float = 0.95) -> Interval:
    """Return the mean of the rows' trimmed means, with an interval for the variation within the rows.

    Each row's mean has a variance of its own; the degrees of freedom of their sum are Welch's and Satterthwaite's.

    Args:
        rows: at least one, of at least two independent values each.
        confidence: how often the interval contains the true mean.
    """
    means, variances, degrees = zip(*(_trimmed_mean(row) for row in rows), strict=True)
    estimate = fmean(means)
    total = math.fsum(variances)
    if total == 0:
        return Interval(estimate, estimate, estimate)
    joint_degrees = total**2 / math.fsum(v**2 / d for v, d in zip(variances, degrees, strict=True))
    half = student_t(confidence, joint_degrees) * math.sqrt(total) / len(rows)
    return Interval(estimate, estimate - half, estimate + half)


def _trimmed_mean(values: Sequence[float]) -> tuple[float, float, int]:
    """Return the trimmed mean, the variance of that mean, and its degrees of freedom."""
    ordered = sorted(values)
    num_values = len(ordered)
    num_cut = int(len(ordered) * TRIMMED)
    kept = ordered[num_cut : num_values - num_cut]
    # The variance is that of the winsorized values: what is cut counts as the nearest value that is kept.
    winsorized = [kept[0]] * num_cut + kept + [kept[-1]] * num_cut
    mean_variance = variance(winsorized) * (num_values - 1) / (len(kept) * (len(kept) - 1))
    return fmean(kept), mean_variance, len(kept) - 1


def student_t(confidence: float, degrees: float) -> float:
    """Return the t for which Student's distribution has ``confidence`` of its mass between -t and t.

    Fractional degrees of freedom are rounded down, which is the safe side.
    """
    degrees = max(1, math.floor(degrees + 1e-9))
    low = 0.0
    high = 1.0
    while _mass(high, degrees) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _mass(middle, degrees) < confidence else (low, middle)
    return high


def _mass(t: float, degrees: int) -> float:
    """Return the mass between -t and t, in closed form for integer degrees of freedom (Abramowitz & Stegun 26.7.3,
    26.7.4).
    """
    theta = math.atan(t / math.sqrt(degrees))
    cosine_squared = math.cos(theta) ** 2
    is_odd = degrees % 2 == 1
    # The sum of the formula: 1 + 1/2 cos^2 + (1*3)/(2*4) cos^4 ... (even), cos + 2/3 cos^3 + ... (odd).
    term = math.cos(theta) if is_odd else 1.0
    total = 0.0
    for k in range(1 if is_odd else 0, degrees - 1, 2):
        total += term
        term *= cosine_squared * (k + 1) / (k + 2)
    if is_odd:
        return 2 / math.pi * (theta + math.sin(theta) * total)
    return math.sin(theta) * total
