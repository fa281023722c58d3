"""Random numbers of a sample: a function of (seed, n) alone, in integers.

Raw Philox words (numpy keeps that stream, NEP 19) under a key that no order of samples uses (`pretrain.data.samples`).
All computation on them is integer arithmetic, so that a sample is the same on every machine and numpy version.
"""

from fractions import Fraction

import numpy as np

_CORRUPTION = 1 << 63  # in the second half of a key; orders of samples stay below it


def words(seed: int, n: int, count: int) -> np.ndarray:
    """Return random words of sample ``n``, uint64 [count]."""
    key = np.array([seed, _CORRUPTION | n], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def choose(random_words: np.ndarray, count: int) -> np.ndarray:
    """Choose ``count`` of as many positions as there are words, ascending, int64 [count]."""
    return np.sort(np.argsort(random_words, kind="stable")[:count])


def share(count: int, density: float) -> int:
    """Round ``count * density`` to an integer, halves to even, taking the density as a decimal."""
    return round(count * Fraction(repr(density)))
