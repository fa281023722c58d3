"""Training with the exchanges `deepep` and `symmetric`, over stand-ins for their libraries, equals one process."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import STEADY, STEPS, figures
from exchange_libraries import sent, with_libraries
from forks import only, values

from pretrain.config import ParallelConfig, rules

SPLITS = {
    "expert": {"expert": 2},
    "tensor and expert": {"tensor": 2, "expert": 4},
    "expert tensor": {"tensor": 2, "expert_tensor": 2, "expert": 2},
    "context": {"context": 2, "expert": 2},
    "pipeline": {"pipeline": 2, "expert": 2},
    "recomputed": {"expert": 2, "recompute": "full"},
    "data": {"expert": 2, "data": 2},
}


def losses(recipe, exchange):
    rules._CHECKS = tuple(check for check in rules._CHECKS if check is not rules._deepep)  # float32 compares exactly
    found = figures(recipe)
    assert recipe.parallel.expert == 1 or sent["calls"] >= 4 * STEPS  # there and back, forward and backward
    return [found[f"loss {step}"] for step in range(STEPS)], [found[f"gradient norm {step}"] for step in range(STEPS)]


@pytest.fixture(scope="module")
def alone(forks):
    recipe = replace(STEADY, train=replace(STEADY.train, micro_batch=8))
    return only(forks.run(1, losses, recipe, "all_to_all"))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["deepep", "symmetric"])
@pytest.mark.parametrize("split", SPLITS)
def test_splits(forks, alone, split, exchange):
    parallel = ParallelConfig(**SPLITS[split], exchange=exchange)
    recipe = replace(STEADY, parallel=parallel)
    for found in values(forks.run(parallel.world_size, with_libraries, torch.float32, losses, recipe, exchange)):
        np.testing.assert_allclose(found, alone, rtol=1e-5)


@pytest.mark.slow
def test_a_missing_library_is_one_line(forks, write_tiny_recipe, tmp_path):
    recipe = write_tiny_recipe(tmp_path / "recipe.toml")
    options = ["--parallel.expert", "2", "--parallel.wire", "bf16", "--run.folder", tmp_path / "run"]
    for exchange, words in (("deepep", "needs the package deep_ep"), ("symmetric", "is unavailable")):
        ends = forks.command("pretrain", recipe, *options, "--parallel.exchange", exchange, size=2)
        assert [end.code for end in ends] == [2, 2], ends
        assert all(f"exchange='{exchange}' {words}" in end.err for end in ends if end.err)
        (end,) = forks.command("pretrain.start.launch", recipe, *options, "--parallel.exchange", exchange, "--dry-run")
        assert end.code == 0, end.err
