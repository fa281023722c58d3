"""Random numbers of a sample: integer functions of (seed, n) alone.

They derive from raw Philox words, a stream that numpy does not change (NEP 19). Their key differs from the keys of all
orders of samples (`pretrain.data.samples`). All computation on the words is integer arithmetic, so that a sample is the
same on every machine and numpy version.
"""

from fractions import Fraction

import numpy as np

_CORRUPTION = 1 << 63  # set in the second word of a key; the keys of sample orders stay below it


def words(seed: int, n: int, count: int) -> np.ndarray:
    """Return random 64-bit integers for sample ``n``, uint64 [count]."""
    key = np.array([seed, _CORRUPTION | n], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def choose(random_words: np.ndarray, count: int) -> np.ndarray:
    """Return ``count`` indices into ``random_words``, drawn uniformly without replacement, ascending, int64.

    If there are fewer words than ``count``, return all indices.
    """
    return np.sort(np.argsort(random_words, kind="stable")[:count])


def share(count: int, density: float) -> int:
    """Round ``count * density`` to an integer, halves to even.

    The density is taken as a decimal: 0.15 is exactly 15/100.
    """
    return round(count * Fraction(repr(density)))
