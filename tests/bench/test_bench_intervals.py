import math
import random

import numpy as np
import pytest

from bench.intervals import quartiles, student_t, trimmed_mean_interval


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.3027),
        (0.95, 5, 2.5706),
        (0.99, 10, 3.1693),
        (0.95, 29, 2.0452),
        (0.9, 120, 1.6577),
    ],
)
def test_student_t_is_that_of_the_printed_tables(confidence, degrees, expected):
    assert student_t(confidence, degrees) == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_quartiles_are_numpys(count):
    values = np.random.default_rng(count).random(count)
    assert quartiles(list(values)) == pytest.approx(np.percentile(values, [25, 50, 75]))


def test_interval_without_trimming_is_students():
    # Below 5 values nothing is cut. Mean 2, standard error 1 / sqrt(3), t with 2 degrees of freedom 4.3027.
    interval = trimmed_mean_interval([[1.0, 2.0, 3.0]])
    half = 4.30265 / math.sqrt(3)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((2, 2 - half, 2 + half), rel=1e-5)


def test_interval_trims_a_fifth_on_either_side():
    # Of 10 values the 2 lowest and 2 highest are cut: mean of 3..8, winsorized to 3 3 3 4 5 6 7 8 8 8.
    values = [float(v) for v in (1, -1000, 3, 4, 5, 6, 7, 8, 9, 1000)]
    interval = trimmed_mean_interval([values])
    winsorized = np.array([3, 3, 3, 4, 5, 6, 7, 8, 8, 8])
    half = 2.570582 * math.sqrt(winsorized.var(ddof=1) * 9 / (6 * 5))
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((5.5, 5.5 - half, 5.5 + half), rel=1e-6)


def test_interval_of_several_rows_is_welchs():
    rows = [[1.0, 2.0, 3.0], [10.0, 10.5, 11.0, 11.5]]
    interval = trimmed_mean_interval(rows)
    variances = np.array([np.var(row, ddof=1) / len(row) for row in rows])
    degrees = variances.sum() ** 2 / (variances**2 / np.array([2, 3])).sum()
    half = student_t(0.95, degrees) * math.sqrt(variances.sum()) / 2
    assert interval.estimate == pytest.approx((2 + 10.75) / 2)
    assert interval.high - interval.estimate == pytest.approx(half)


def test_swapping_the_contenders_inverts_the_interval():
    logs = [random.Random(0).gauss(0.3, 0.1) for _ in range(10)]
    there = trimmed_mean_interval([logs]).exp()
    back = trimmed_mean_interval([[-value for value in logs]]).exp()
    assert (1 / back.estimate, 1 / back.high, 1 / back.low) == pytest.approx((there.estimate, there.low, there.high))
