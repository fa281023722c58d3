"""Blends: several corpora in given proportions."""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fmoe.errors import UserError
from pretrain.data.samples import Blocks

_LONGEST_PERIOD = 1_000_000


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportions of ``weights``: (0.7, 0.3) and (70, 30) are (7, 3).

    A weight is what is written, 0.1 a tenth.

    Raises:
        UserError: a weight that is not positive or no number; proportions so odd that the order of samples would repeat
            only after more than a million.
    """
    for weight in weights:
        if not 0 < weight < math.inf:
            raise UserError(f"weights={list(weights)}: {weight} is not a positive number")
    exact = [Fraction(repr(weight)) for weight in weights]
    unit = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * unit) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) > _LONGEST_PERIOD:
        raise UserError(
            f"weights={list(weights)} are in whole numbers {':'.join(map(str, whole))}, whose sum is more than "
            f"{_LONGEST_PERIOD:,}: round them"
        )
    return tuple(whole)


class Blend:
    """Samples of several members, of member i ``weights[i] / sum(weights)`` of them.

    Sample n is a function of n alone. Among the first n, for every n, a member's number differs from its exact share by
    less than one. A member's samples come in its own order; a small one begins its next epoch while others are in
    their first.

    Args:
        members: as many as weights, each endless.
        weights: positive, in any unit.

    Attributes:
        samples_per_epoch: samples of all members in one epoch of each.

    Raises:
        UserError: see `whole_weights`.
    """

    def __init__(self, members: Sequence[Blocks], weights: Sequence[float]):
        self.samples_per_epoch = sum(member.samples_per_epoch for member in members)
        self._members, self._weights = members, whole_weights(weights)
        self._order = _order(self._weights)
        self._rank = np.empty_like(self._order)  # how many of the same member come before it in the period
        for member, weight in enumerate(self._weights):
            self._rank[self._order == member] = np.arange(weight)

    def place(self, n: int) -> tuple[int, int]:
        """The member that sample ``n`` is of, and which of its samples it is."""
        period, slot = divmod(n, len(self._order))
        member = int(self._order[slot])
        return member, period * self._weights[member] + int(self._rank[slot])

    def __getitem__(self, n: int) -> np.ndarray:
        """Sample ``n``.

        Raises:
            IndexError: ``n`` is negative.
        """
        if n < 0:
            raise IndexError(f"sample {n} is negative")
        member, place = self.place(int(n))
        return self._members[member][place]


def _order(weights: Sequence[int]) -> np.ndarray:
    """The member of each sample of a period, int32 [sum(weights)].

    Member i's share of the first t samples is t w_i / W, with W the sum. Its j-th sample (from 0) keeps its number
    within one of that if it is none of the first floor(j W / w_i) samples and one of the first ceil((j + 1) W / w_i).
    Of those that may come, the one that must come first does: that meets every deadline, because the shares fill every
    place (earliest deadline first on one processor: Baruah et al. 1996, Proportionate progress, for one resource).
    """
    total = sum(weights)
    order = np.empty(total, dtype=np.int32)
    waiting = [(0, member, 0) for member in range(len(weights))]  # (earliest place, member, j)
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
