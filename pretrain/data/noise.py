"""Random numbers of a sample: a function of (seed, n) alone, in whole numbers.

Raw Philox words (numpy keeps that stream, NEP 19) under a key that no order of samples has (`pretrain.data.samples`).
What is made of them is integer arithmetic, so that a sample is the same on every machine and under every numpy.
"""

from fractions import Fraction

import numpy as np

_CORRUPTION = 1 << 63  # of the second half of a key; orders of samples stay below it


def words(seed: int, n: int, count: int) -> np.ndarray:
    """Random words of sample ``n``, uint64 [count]."""
    key = np.array([seed, _CORRUPTION | n], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def choose(random_words: np.ndarray, count: int) -> np.ndarray:
    """``count`` different places of as many as there are words, in rising order, int64 [count]."""
    return np.sort(np.argsort(random_words, kind="stable")[:count])


def share(count: int, density: float) -> int:
    """``count * density`` to the nearest whole number, halves to the even one; the density as it is written."""
    return round(count * Fraction(repr(density)))
