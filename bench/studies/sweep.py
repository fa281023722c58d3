"""Sweep of learning rates, widened until the best one is not at an end, and statistics over seeds at that rate."""

import math
import statistics
from collections.abc import Mapping, Sequence

Losses = Mapping[float, float | None]  # by learning rate; None for a run that diverged

FACTOR = 2.0  # between neighboring rates


def best(losses: Losses) -> float | None:
    """Return the rate with the lowest loss, the lowest of equally good rates; None if every run diverged."""
    finite = {rate: loss for rate, loss in losses.items() if _is_finite(loss)}
    return min(sorted(finite), key=finite.__getitem__) if finite else None


def is_inside(losses: Losses) -> bool:
    """Return whether the best rate is neither the lowest nor the highest."""
    rate = best(losses)
    return rate is not None and min(losses) < rate < max(losses)


def missing(rates: Sequence[float], losses: Losses, *, most: int) -> list[float]:
    """Return the rates to run next: those of the list; then, while the best is at an end, the next one beyond it (below
    the lowest if every run diverged); none if the best is inside or ``most`` rates were added.

    Args:
        rates: initial rates, the same number for every contender.
        losses: losses of the rates that were run already.
        most: number of rates that may be added beyond the list.
    """
    begun = [rate for rate in rates if rate not in losses]
    if begun or is_inside(losses) or len(losses) >= len(rates) + most:
        return begun
    lowest = best(losses)
    beyond = min(losses) / FACTOR if lowest is None or lowest == min(losses) else max(losses) * FACTOR
    return [beyond]


def mean_and_spread(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Return mean and sample standard deviation (0 for a single value); None if a run diverged or there are no runs."""
    if not values or not all(map(_is_finite, values)):
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def gap(losses: Mapping[int, float | None], reference: Mapping[int, float | None]) -> tuple[float, float] | None:
    """Return mean and spread of the differences to the reference, seed by seed, over common seeds; None as above."""
    pairs = [(losses[seed], reference[seed]) for seed in losses if seed in reference]
    if not pairs or not all(_is_finite(value) for pair in pairs for value in pair):
        return None
    return mean_and_spread([loss - other for loss, other in pairs])


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)
