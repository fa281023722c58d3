"""``train.activations``: exact encodings train the same bit for bit, rounded ones nearly so; all hold fewer bytes."""

from dataclasses import replace

import pytest
from engines import STEADY, Samples, engine_of
from forks import only, values

from pretrain.config import ParallelConfig


def recipe_with(activations, parallel=None, **options):
    sizes = {"hidden_size": 64, "ffn_hidden_size": 96, "dropout": 0.5, "activation": "relu"}
    model = STEADY.model.with_values(sizes | options)
    return replace(
        STEADY,
        model=model,
        parallel=ParallelConfig(**(parallel or {})),
        train=replace(STEADY.train, activations=activations),
    )


def trained(recipe, steps):
    """Losses and gradient norms, and the largest number of bytes of activations at a time."""
    engine = engine_of(recipe)
    results = [engine.train_step(step, Samples()) for step in range(steps)]
    assert engine.activations is None or engine.activations.held == 0
    return [(r.loss, r.grad_norm) for r in results], None if engine.activations is None else engine.activations.peak


@pytest.mark.by_default(0, 1)
@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"expert": 2},
        {"pipeline": 2},
        {"expert": 2, "shard": "parameters"},
        {"tensor": 2},
        {"recompute": "selective"},
        {"recompute": "full"},
    ],
    ids=str,
)
def test_exact_encodings_change_nothing(forks, parallel):
    size = ParallelConfig(**parallel).world_size
    expected = values(forks.run(size, trained, recipe_with("full", parallel), 5))
    for mode in ("mask", "offload"):
        for (found, peak), (wanted, _) in zip(
            values(forks.run(size, trained, recipe_with(mode, parallel), 5)), expected, strict=True
        ):
            assert found == wanted and peak > 0


@pytest.mark.by_default(1)
@pytest.mark.parametrize("parallel", [{}, {"expert": 2}, {"expert": 2, "shard": "parameters"}], ids=str)
def test_rounded_encodings_train_nearly_the_same_in_fewer_bytes(forks, parallel):
    size = ParallelConfig(**parallel).world_size
    expected = values(forks.run(size, trained, recipe_with("full", parallel), 20))[0][0]
    peaks = {}
    for mode in ("offload", "mask", "bf16", "int8"):
        found, peaks[mode] = values(forks.run(size, trained, recipe_with(mode, parallel), 20))[0]
        last = sum(loss for loss, _ in found[-5:])
        assert last == pytest.approx(sum(loss for loss, _ in expected[-5:]), rel=0.03), mode
        assert found[0][0] == expected[0][0], "the forward pass is as before"
    assert peaks["int8"] < peaks["bf16"] < peaks["offload"]
    assert peaks["mask"] <= peaks["offload"]


def test_one_model_has_the_bytes_of_the_largest_micro_batch_only(forks):
    """What a micro batch holds is freed by its backward pass."""
    recipe = recipe_with("offload")
    train = replace(recipe.train, micro_batch=1)
    _, small = only(forks.run(1, trained, replace(recipe, train=train), 1))
    _, large = only(forks.run(1, trained, recipe, 1))
    assert small * 1.5 < large <= small * 2.1
