"""The study of large batches: which runs it asks for, and what it makes of them."""

import pytest

from bench.studies import sweep
from bench.studies.large_batch import CONTENDERS, Size, Study


@pytest.mark.parametrize(
    ("losses", "best", "is_inside"),
    [
        ({1.0: 3.0, 2.0: 2.5, 4.0: 2.7}, 2.0, True),
        ({1.0: 2.4, 2.0: 2.5, 4.0: 2.7}, 1.0, False),
        ({1.0: 3.0, 2.0: 2.5}, 2.0, False),
        ({1.0: 3.0, 2.0: 2.5, 4.0: None}, 2.0, True),
        ({1.0: 2.5, 2.0: 2.5, 4.0: float("nan")}, 1.0, False),
        ({1.0: None, 2.0: None}, None, False),
        ({}, None, False),
    ],
    ids=["inside", "low end", "high end", "diverged neighbour", "equal losses", "all diverged", "none"],
)
def test_the_best_rate(losses, best, is_inside):
    assert sweep.best(losses) == best
    assert sweep.is_inside(losses) is is_inside


@pytest.mark.parametrize(
    ("losses", "missing"),
    [
        ({}, [1.0, 2.0, 4.0]),
        ({2.0: 2.5}, [1.0, 4.0]),
        ({1.0: 3.0, 2.0: 2.5, 4.0: 2.7}, []),
        ({1.0: 2.4, 2.0: 2.5, 4.0: 2.7}, [0.5]),
        ({1.0: 3.0, 2.0: 2.5, 4.0: 2.4}, [8.0]),
        ({1.0: None, 2.0: None, 4.0: None}, [0.5]),
        ({0.5: 2.3, 1.0: 2.4, 2.0: 2.5, 4.0: 2.7}, [0.25]),
        ({0.25: 2.2, 0.5: 2.3, 1.0: 2.4, 2.0: 2.5, 4.0: 2.7}, []),
    ],
    ids=["nothing", "one", "inside", "low end", "high end", "all diverged", "further", "enough"],
)
def test_the_rates_to_run_next(losses, missing):
    assert sweep.missing((1.0, 2.0, 4.0), losses, most=2) == missing


def test_means_and_gaps():
    mean, spread = sweep.mean_and_spread([2.0, 3.0, 4.0])
    assert (mean, spread) == (3.0, 1.0)
    assert sweep.mean_and_spread([2.5]) == (2.5, 0.0)
    assert sweep.mean_and_spread([2.0, None]) is None
    assert sweep.mean_and_spread([]) is None
    # Seeds 1 and 2 are in both: 0.5 and 0.25.
    assert sweep.gap({1: 3.0, 2: 3.0, 3: 9.0}, {1: 2.5, 2: 2.75}) == pytest.approx((0.375, 0.125 * 2**0.5))
    assert sweep.gap({1: 3.0}, {2: 2.5}) is None
    assert sweep.gap({1: None}, {1: 2.5}) is None


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_all_contenders_see_the_same_tokens(tmp_path, contender):
    recipe = Study(tmp_path, Size(), threads=1)._recipe(contender, 4e-3, 1)
    assert recipe.train.steps * recipe.train.global_batch == 6400 * 4
    assert recipe.warmup_steps * recipe.train.global_batch == 640 * 4
    factor = {"adamw-linear": 32, "adamw-sqrt": 32**0.5}.get(contender.name, 1)
    assert recipe.max_lr == pytest.approx(4e-3 * factor)
    assert recipe.min_lr == 0
