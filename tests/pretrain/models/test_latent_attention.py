"""Multi-latent attention against the equations of DeepSeek-V2 (arXiv 2405.04434 section 2.1), and its checks."""

from dataclasses import replace

import pytest
from compare import assert_close
from engines import assert_split_equals_one
from forks import only
from latent_reference import ENGINE, both

from pretrain.config import ParallelConfig


@pytest.mark.parametrize("rank", [None, 12], ids=["full queries", "compressed queries"])
def test_output_and_gradients_are_those_of_the_paper(forks, rank):
    ours, expected = only(forks.run(1, both, rank))
    assert len(ours) == (7 if rank is None else 9)
    for name, value in expected.items():
        assert_close(ours[name].double(), value, 1e-5, name)


def recipe_of(optimizer, **parallel):
    options = {"adamw": {}, "lamb": {"lr": 2e-2, "max_trust": 20.0}, "muon": {}}
    optimizer = replace(ENGINE.optimizer, name=optimizer, **options[optimizer])
    return replace(ENGINE, optimizer=optimizer, parallel=ParallelConfig(**parallel))


SPLITS = {
    "adamw, EP2": recipe_of("adamw", shard="optimizer", expert=2, recompute="full"),
    "muon, TP2 SP": recipe_of("muon", shard="optimizer", tensor=2),
    "lamb, TP2": recipe_of("lamb", shard="optimizer", tensor=2, sequence=False),
}


@pytest.mark.by_default("muon, TP2 SP")
@pytest.mark.parametrize("case", SPLITS)
def test_splits_equal_one_process(forks, case):
    """Losses, gradient norms, weights and moments; see tests/conformance/test_megatron_matrix.py for more splits."""
    recipe = SPLITS[case]
    assert_split_equals_one(forks, recipe, recipe_of(recipe.optimizer.name), "linear_q_down_proj")
