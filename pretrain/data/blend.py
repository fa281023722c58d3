"""Blends: several corpora in given proportions."""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from fmoe.errors import UserError
from pretrain.data.samples import Samples

_LONGEST_PERIOD = 1_000_000


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers in the proportions of ``weights``: (0.7, 0.3) and (70, 30) give (7, 3).

    Weights are taken as decimals: 0.1 is exactly a tenth.

    Raises:
        UserError: a weight is not a finite positive number, or the integers add up to more than a million.
    """
    for weight in weights:
        if not 0 < weight < math.inf:
            raise UserError(f"weights={list(weights)}: {weight} is not a finite positive number")
    exact = [Fraction(repr(weight)) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * unit) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) > _LONGEST_PERIOD:
        raise UserError(
            f"weights={list(weights)} are {':'.join(map(str, whole))} in integers, whose sum exceeds "
            f"{_LONGEST_PERIOD:,}: round the weights"
        )
    return tuple(whole)


class Blend:
    """Blend of the samples of several corpora (members). Member i has the share ``weights[i] / sum(weights)``.

    Sample n depends only on n. Among the first n samples, for every n, a member's count differs from its exact share by
    less than one. Each member keeps its own order. A small member may begin its next epoch while others are in their
    first.

    Args:
        members: the samples or blocks of each corpus, one member per weight.
        weights: positive, in any unit.

    Attributes:
        members: the members.
        samples_per_epoch: total over the members.

    Raises:
        UserError: see `whole_weights`.
    """

    def __init__(self, members: Sequence[Samples], weights: Sequence[float]):
        self.samples_per_epoch = sum(member.samples_per_epoch for member in members)
        self.members = members
        self._weights = whole_weights(weights)
        self._order = _order(self._weights)
        self._rank = np.empty_like(self._order)  # index among the samples of the same member in the period
        for member, weight in enumerate(self._weights):
            self._rank[self._order == member] = np.arange(weight)

    def place(self, n: int) -> tuple[int, int]:
        """Return the index of sample ``n``'s member, and the sample's index in that member."""
        period, slot = divmod(n, len(self._order))
        member = int(self._order[slot])
        return member, period * self._weights[member] + int(self._rank[slot])

    @property
    def epochs_per_sample(self) -> tuple[float, ...]:
        """The average share of each member's epoch that one sample of the blend uses."""
        total = sum(self._weights)
        pairs = zip(self._weights, self.members, strict=True)
        return tuple(weight / total / member.samples_per_epoch for weight, member in pairs)

    def __getitem__(self, n: int) -> Any:
        """Return sample ``n``.

        Raises:
            IndexError: ``n`` is negative.
        """
        if n < 0:
            raise IndexError(f"sample {n} is negative")
        member, place = self.place(int(n))
        return self.members[member][place]


def _order(weights: Sequence[int]) -> np.ndarray:
    """Return the member index of each sample in one period of the blend, int32 [sum(weights)]."""
    # Earliest-deadline-first scheduling keeps each member's count within one of its share (Baruah et al. 1996,
    # Proportionate progress, with a single resource).
    # With W the sum of the weights, sample j (from 0) of member i must not be among the first floor(j W / w_i) samples,
    # and must be among the first ceil((j + 1) W / w_i). All deadlines are met, because the shares fill every position.
    total = sum(weights)
    order = np.empty(total, dtype=np.int32)
    waiting = [(0, member, 0) for member in range(len(weights))]  # (earliest position, member, j)
    ready: list[tuple[int, int, int]] = []  # (deadline, member, j)
    heapq.heapify(waiting)
    for place in range(total):
        while waiting and waiting[0][0] <= place:
            _, member, j = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(j + 1) * total // weights[member]), member, j))
        deadline, member, j = heapq.heappop(ready)
        assert place < deadline
        order[place] = member
        heapq.heappush(waiting, ((j + 1) * total // weights[member], member, j + 1))
    return order
