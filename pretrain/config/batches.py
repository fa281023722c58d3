"""Samples of each step, with a global batch that may grow."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Batches:
    """The global batch of every step, in sequences. A sample is one sequence.

    The batch grows from ``start`` to ``size`` by ``increment`` at a time, at equal intervals over the first
    ``ramp_samples`` samples. Step n continues after the last sample of step n - 1.
    """

    size: int
    start: int
    increment: int
    ramp_samples: int

    @cached_property
    def _levels(self) -> list[tuple[int, int, int]]:
        """Return (first step, first sample of that step, sequences per step) for each batch size."""
        levels = []
        step = 0
        sample = 0
        count = (self.size - self.start) // self.increment
        for level in range(count):
            # The next size begins at the first sample with count * sample // ramp_samples > level.
            end = -(-(level + 1) * self.ramp_samples // count)
            batch = self.start + level * self.increment
            if sample < end:
                levels.append((step, sample, batch))
                steps = -(-(end - sample) // batch)
                step += steps
                sample += steps * batch
        return [*levels, (step, sample, self.size)]

    def sequences(self, step: int) -> int:
        """Return the number of sequences in a step; steps count from 0."""
        return self._level(step)[2]

    def first(self, step: int) -> int:
        """Return the index of a step's first sample, which is the number of samples before it."""
        first_step, first_sample, batch = self._level(step)
        return first_sample + (step - first_step) * batch

    def steps_of(self, samples: int) -> int:
        """Return the smallest number of steps that take at least ``samples`` samples."""
        index = bisect_right(self._levels, samples, key=lambda level: level[1]) - 1
        first_step, first_sample, batch = self._levels[index]
        steps = first_step + -(-(samples - first_sample) // batch)
        following = self._levels[index + 1 : index + 2]
        return min([steps, *(level[0] for level in following)])

    def _level(self, step: int) -> tuple[int, int, int]:
        return self._levels[bisect_right(self._levels, step, key=lambda level: level[0]) - 1]
