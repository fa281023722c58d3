"""Blends: proportions, order and place, for every number of samples."""

import numpy as np
import pytest

from fmoe.errors import UserError
from pretrain.data.blend import Blend, whole_weights


class Counter:
    """Sample n is (member, n)."""

    def __init__(self, member, samples_per_epoch=5):
        self.member = member
        self.samples_per_epoch = samples_per_epoch

    def __getitem__(self, n):
        return np.array([self.member, n])


def blend(weights):
    return Blend([Counter(i) for i in range(len(weights))], weights)


WEIGHTS = [(0.7, 0.3), (1,), (1, 1, 1), (5, 3, 1, 1, 1), (1, 999), (0.5, 0.25, 0.125, 0.125), (3, 7, 11, 13, 17, 2, 1)]


@pytest.mark.parametrize(
    "weights", [*WEIGHTS, tuple(range(1, 40))], ids=lambda weights: f"{len(weights)}:{weights[:3]}"
)
def test_the_error_is_less_than_one_sample_always(weights):
    whole = whole_weights(weights)
    total = sum(whole)
    samples = blend(weights)
    counts = np.zeros(len(weights), dtype=np.int64)
    for n in range(2 * total + 5):
        member, place = samples[n]
        assert place == counts[member], "a member's own order"
        counts[member] += 1
        error = abs(counts * total - (n + 1) * np.array(whole))
        assert error.max() < total, f"after {n + 1} samples: {counts}"


def test_the_place_follows_from_the_number_alone():
    samples = blend((0.7, 0.3))
    again = blend((70, 30))
    forward = [samples[n].tolist() for n in range(1000)]
    assert [again[n].tolist() for n in reversed(range(1000))] == forward[::-1]
    member, place = samples[10**15 + 3]
    assert (member, place) == (samples[3][0], samples[3][1] + 10**14 * (7 if member == 0 else 3))
    with pytest.raises(IndexError):
        samples[-1]


def test_members_are_asked_beyond_their_epoch():
    """They are endless, and shuffle their next epoch themselves."""
    samples = Blend([Counter(0, 3), Counter(1, 1000)], (1, 1))
    assert samples.samples_per_epoch == 1003
    assert max(samples[n][1] for n in range(100) if samples[n][0] == 0) == 49


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ((0.7, 0.3), (7, 3)),
        ((0.1, 0.2), (1, 2)),
        ((2.0, 4), (1, 2)),
        ((1e-3, 1), (1, 1000)),
        ((0.30, 0.45), (2, 3)),
        ((1 / 3, 2 / 3), (1, 2)),
    ],
)
def test_weights_in_whole_numbers(weights, whole):
    assert whole_weights(weights) == whole


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ((0.7, 0.0), r"weights=\[0.7, 0.0\]: 0.0 is not a finite positive number"),
        ((0.7, -0.3), "-0.3 is not a finite positive number"),
        ((float("nan"), 1.0), "nan is not a finite positive number"),
        ((float("inf"), 1.0), "inf is not a finite positive number"),
        ((1 / 3, 0.67), "whose sum exceeds 1,000,000: round the weights"),
        ((1, 1_000_000), "1:1000000 in integers, whose sum exceeds"),
    ],
    ids=str,
)
def test_weights_that_cannot_be(weights, says):
    with pytest.raises(UserError, match=says):
        whole_weights(weights)
