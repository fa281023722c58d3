"""Keys of [model] for other families' attention and shared experts: every split equals one process."""

from dataclasses import replace

import pytest
from compare import assert_close
from forks import values
from test_run_optim import assembled, trained
from test_run_split_engine import STEADY

from pretrain.config import ParallelConfig

OPTIONS = {"norm": "rms", "num_heads": 4, "num_query_groups": 2, "qkv_bias": True, "rotary_fraction": 0.5}
ENGINE = replace(STEADY, model=replace(STEADY.model, **OPTIONS))


def recipe_of(optimizer, distributed=False, **parallel):
    options = {"adamw": {}, "lamb": {"lr": 2e-2, "max_trust": 20.0}, "muon": {}}[optimizer]
    optimizer = replace(ENGINE.optimizer, name=optimizer, distributed=distributed, **options)
    return replace(ENGINE, optimizer=optimizer, parallel=ParallelConfig(**parallel))


SPLITS = {
    "adamw, TP2": recipe_of("adamw", tensor=2, sequence=False),
    "adamw, TP2 SP": recipe_of("adamw", True, tensor=2),
    "adamw, EP2": recipe_of("adamw", True, expert=2, recompute="full"),
    "adamw, PP2": recipe_of("adamw", pipeline=2),
    "muon, TP2 SP": recipe_of("muon", True, tensor=2),
    "lamb, TP2 SP": recipe_of("lamb", tensor=2),
}


@pytest.mark.by_default("adamw, TP2", "muon, TP2 SP")
@pytest.mark.parametrize("case", SPLITS)
def test_splits_equal_one_process(forks, case):
    """Losses, gradient norms, weights and moments."""
    recipe = SPLITS[case]
    alone = recipe_of(recipe.optimizer.name)
    expected = values(forks.run(1, trained, replace(alone, train=replace(alone.train, micro_batch=8))))
    ranks = values(forks.run(2, trained, recipe))
    for losses, _, _ in ranks:
        for found, wanted in zip(losses, expected[0][0], strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
    found, wanted = assembled(ranks), assembled(expected)
    assert found.keys() == wanted.keys() and any("linear_qkv.bias" in key for key in found)
    for key, value in wanted.items():
        assert_close(found[key], value, 3e-5, key)
    assert expected[0][0][-1][0] < expected[0][0][0][0], "the loss did not fall"
