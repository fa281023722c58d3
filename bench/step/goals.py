"""What a faster block of experts can do for a step, and how much of it is there.

With s the share of the block (router to combine) in the step of another layer, and f how many times as fast ours is
alone, Amdahl's law allows a step 1 / ((1 - s) + s / f) times as fast.
"""

from dataclasses import dataclass

from bench.intervals import Interval
from bench.layer.goals import Goal

LEAST = 0.9  # of what is allowed


@dataclass(frozen=True)
class Comparison:
    """Ours with another layer.

    Attributes:
        label: of the row.
        ours, other: contenders.
        share: of the block in the other's step.
        alone: time of the other's block / time of ours, alone.
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
        """Of the bound, as of the estimates."""
        reached = self.step.estimate / self.allowed
        return Goal(
            f"{self.label}: the step with {self.ours} {self.step} times as fast as with {self.other}; the block of "
            f"experts is {self.share:.1%} of the latter and alone {self.alone} times as fast, which allows "
            f"{self.allowed:.3f}: {reached:.3f} of that (at least {LEAST})",
            reached >= LEAST,
        )


def bound(share: float, speedup: float) -> float:
    """Amdahl's law."""
    return 1 / ((1 - share) + share / speedup)
