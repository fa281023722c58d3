"""Pipeline stages with different numbers of layers: equal to one process; chosen by cost; checkpoints across them."""

import itertools
from dataclasses import replace

import pytest
from engines import RECIPE, Split, assert_figures, assert_split_equals_one, chained, figures
from forks import only, values

from pretrain.config import ParallelConfig, load_recipe
from pretrain.config.counts import balanced_stages

DEEP = replace(RECIPE, model=replace(RECIPE.model, num_layers=5))


def with_parallel(parallel, base=DEEP):
    return replace(base, parallel=ParallelConfig(**parallel))


@pytest.mark.by_default(0, 2)
@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline": 2, "stage_layers": (4, 1)},
        {"pipeline": 2, "stage_layers": (2, 3), "schedule": "gpipe"},
        {"pipeline": 2, "virtual_pipeline": 2, "stage_layers": (2, 1, 1, 1)},
        {"pipeline": 4, "stage_layers": (1, 2, 1, 1)},
        {"pipeline": 2, "stage_layers": (2, 3), "expert": 2, "shard": "parameters"},
        {"pipeline": 2, "balance_stages": True, "recompute": "full"},
    ],
    ids=range(6),
)
def test_unequal_stages_equal_one_process(forks, parallel):
    recipe = with_parallel(parallel)
    expected = only(forks.run(1, figures, replace(recipe, parallel=ParallelConfig()), False))
    assert_figures(values(forks.run(recipe.parallel.world_size, figures, recipe, False)), expected, tolerance=1e-6)


@pytest.mark.slow
def test_weights_and_moments_too(forks):
    recipe = with_parallel({"pipeline": 2, "stage_layers": (3, 2)})
    assert_split_equals_one(forks, recipe, replace(recipe, parallel=ParallelConfig()), "layers")


@pytest.mark.slow
def test_multi_token_prediction_layers_are_on_the_last_stage(forks):
    model = replace(DEEP.model, mtp_layers=1, moe=replace(DEEP.model.moe, capacity_factor=None))
    recipe = with_parallel({"pipeline": 2, "stage_layers": (4, 1)}, replace(DEEP, model=model))
    expected = only(forks.run(1, figures, replace(recipe, parallel=ParallelConfig()), False))
    assert_figures(values(forks.run(2, figures, recipe, False)), expected, tolerance=1e-6)


class Unequal(Split):
    """A split whose two stages have four layers and one."""

    @property
    def parallel(self):
        return replace(super().parallel, stage_layers=(4, 1))


@pytest.mark.slow
def test_checkpoints_pass_between_unequal_stages_and_other_splits(forks, tmp_path, monkeypatch):
    import engines

    of = Split.of
    unequal = Unequal(pipeline=2)
    monkeypatch.setattr(engines.Split, "of", lambda text: unequal if text.strip() == "unequal" else of(text))
    chained(forks, tmp_path, "EP2, unequal, one", DEEP, {"fp32": 1e-5})


def test_balanced_stages_are_the_best_of_all():
    """Against every division, for a model whose layers with experts and output layer cost more than others."""
    base = load_recipe("quickstart").model.with_values({"num_layers": 7, "moe.layers": (2, 5), "moe.top_k": 2})
    for vocab_size in (256, 8192, 65536):
        model = replace(base, vocab_size=vocab_size)
        heads = model.attention.num_heads * 2 * model.head_width * model.sequence_length
        attention = 4 * model.hidden_size * model.head_width * model.attention.num_heads + heads
        block = (3 if model.gated else 2) * model.hidden_size
        router = model.hidden_size * model.moe.num_experts
        sparse = 2 * block * model.ffn_hidden_size + router
        costs = [attention + (sparse if n in (2, 5) else block * model.dense_width) for n in range(1, 8)]
        for stages in (2, 3, 4):
            every = []
            for cuts in itertools.combinations(range(1, 7), stages - 1):
                bounds = (0, *cuts, 7)
                loads = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
                loads[-1] += vocab_size * model.hidden_size
                every.append((max(loads), tuple(b - a for a, b in itertools.pairwise(bounds))))
            chosen = balanced_stages(model, stages)
            assert min(every)[0] == next(load for load, numbers in every if numbers == chosen)
    assert balanced_stages(replace(base, vocab_size=65536), 2)[1] == 1, "the output layer is worth many layers"
