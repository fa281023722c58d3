"""Amdahl's bound on the speedup of a step by a faster block of experts, and the reached fraction of this bound.

Let s be the share of the block (router to combine) in a step with the other layer, and let our block by itself be f
times as fast. By Amdahl's law, a step can then be 1 / ((1 - s) + s / f) times as fast.
"""

from dataclasses import dataclass

from bench.intervals import Interval
from bench.layer.goals import Goal

LEAST = 0.9  # goal, as a fraction of the bound


@dataclass(frozen=True)
class Comparison:
    """Our layer compared with another one.

    Attributes:
        label: label of the row.
        ours, other: contenders.
        share: share of the block in the other's step.
        alone: time of the other's block / time of our block, each by itself.
        step: time of the other's step / time of ours.
    """

    label: str
    ours: str
    other: str
    share: float
    alone: Interval
    step: Interval

    @property
    def allowed(self) -> float:
        """Amdahl's bound."""
        return bound(self.share, self.alone.estimate)

    def goal(self) -> Goal:
        """The goal, as a fraction of the bound of the estimates."""
        reached = self.step.estimate / self.allowed
        return Goal(
            f"{self.label}: the step with {self.ours} is {self.step} times as fast as with {self.other}; the block of "
            f"experts takes {self.share:.1%} of the latter; ours is, alone, {self.alone} times as fast, which allows "
            f"{self.allowed:.3f}: {reached:.3f} of this bound is reached (at least {LEAST})",
            reached >= LEAST,
        )


def bound(share: float, speedup: float) -> float:
    """Return Amdahl's bound."""
    return 1 / ((1 - share) + share / speedup)
