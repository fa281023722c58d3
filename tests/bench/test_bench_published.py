"""The benchmark of published points: models of the published sizes, and predictions of cheap points."""

import pytest
import torch.distributed as dist
from forks import only

from bench.studies import published

POINTS = published.points()


def _row(number):
    dist.destroy_process_group()  # a trace needs a process without groups
    return published.predict(published.points()[number])


def _number(start):
    return next(number for number, point in enumerate(POINTS) if point.name.startswith(start))


@pytest.mark.parametrize(
    ("start", "billions"),
    [
        ("Mixtral 8x7B", 46.7),
        ("Mixtral 8x22B", 140.6),
        ("Qwen3-235B", 235),
        ("DeepSeek-V2", 236),
        ("DeepSeek-V3", 671),
        ("GPT 145.6B", 145.6),
        ("GPT 1008B", 1008),
        ("GPT 530B", 529.6),
        ("GPT 462B", 462),
        ("GPipe, Transformer of 1663", 83.9),
        ("ZeRO", 7.5),
    ],
)
def test_models_have_the_published_number_of_parameters(start, billions):
    recipe = POINTS[_number(start)].recipe
    assert recipe.num_params() == pytest.approx(billions * 1e9, rel=0.01)


def test_splits_have_the_ranks_of_their_clusters():
    for point in POINTS:
        assert point.recipe.parallel.world_size <= published.cluster_of(point).num_ranks, point.name
        if point.cluster not in published.CLUSTER_TEXTS:
            assert point.cluster.endswith(f"-{point.recipe.parallel.world_size}"), point.name


def test_states_without_shards_take_18_bytes_per_parameter(forks):
    number = _number("ZeRO, 7.5B parameters on 64 GPUs, shard=none")
    row = only(forks.run(1, _row, number))
    params = POINTS[number].recipe.num_params()
    assert row["predicted"] == pytest.approx(18 * params / 1e9, rel=0.001)
    assert row["error"] == pytest.approx(row["predicted"] / 120 - 1)


def test_error_of_a_rate_is_that_of_the_time(forks):
    row = only(forks.run(1, _row, _number("GPT 1.7B, 48 H100")))
    assert 0 < row["predicted"] < 989
    assert row["error"] == pytest.approx(408.8 / row["predicted"] - 1)


def test_table_has_the_median_factor_and_the_sources():
    row = {"point": "a", "unit": "s", "published": 2.0, "source": "GShard", "seconds": 4.0}
    row |= {"terms": {"gemm": 3.0, "memory": 1.0}}
    text = published.table([row | {"predicted": 1.0, "error": -0.5}, row | {"predicted": 4.0, "error": 1.0}])
    assert "| a | s | 2 | 1 | -50% | gemm 75% | GShard |" in text
    assert "the two: 2.00\n" in text
    assert text.count(published.SOURCES["GShard"]) == 1


def test_every_source_is_described():
    assert {point.source for point in POINTS} == set(published.SOURCES)
