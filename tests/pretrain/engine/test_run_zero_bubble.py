"""The zero-bubble schedule: equal to one process, with all weight gradients computed once and late."""

from dataclasses import replace

import pytest
from engines import RECIPE, Samples, Split, assert_figures, assert_split_equals_one, chained, engine_of, figures
from forks import only, values

from pretrain.config import ParallelConfig

DEEP = replace(RECIPE, model=replace(RECIPE.model, num_layers=4))


def with_parallel(parallel, base=DEEP):
    return replace(base, parallel=ParallelConfig(**{"schedule": "zero_bubble", **parallel}))


@pytest.mark.by_default(0, 1)
@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline": 2, "expert": 2},
        {"pipeline": 4},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "tensor": 2, "sequence": False},
        {"pipeline": 2, "data": 2, "shard": "optimizer", "overlap_gradients": True, "overlap_parameters": True},
        {"pipeline": 2, "expert": 2, "chunks": 2, "shadow": 1},
        {"pipeline": 2, "stage_layers": (1, 3), "context": 2},
    ],
    ids=range(7),
)
def test_equals_one_process(forks, parallel):
    recipe = with_parallel(parallel)
    expected = only(forks.run(1, figures, replace(recipe, parallel=ParallelConfig()), False))
    assert_figures(values(forks.run(recipe.parallel.world_size, figures, recipe, False)), expected, tolerance=1e-6)


def deferred_weights(recipe):
    """Names of the weights in matrices, and of the deferred ones in each micro batch of a step."""
    from pretrain.engine import pipeline

    engine = engine_of(recipe)
    names = {p: name for name, p in engine.gpt.named_parameters()}
    deferred = []
    split = pipeline.backward_inputs

    def recorded(*arguments):
        remaining = split(*arguments)
        deferred.append({names[p] for p in remaining.weights})
        return remaining

    pipeline.backward_inputs = recorded
    engine.train_step(0, Samples())
    return {name for p, name in names.items() if p.dim() > 1}, deferred


@pytest.mark.slow
def test_weights_of_products_with_constants_get_their_gradients(forks):
    # Transformer-XL projects encodings of distances, which have no gradient.
    model = DEEP.model.with_values({"num_layers": 2, "position.encoding": "transformer_xl"})
    recipe = with_parallel({"pipeline": 2}, replace(DEEP, model=model))
    expected = only(forks.run(1, figures, replace(recipe, parallel=ParallelConfig()), False))
    assert_figures(values(forks.run(2, figures, recipe, False)), expected, tolerance=1e-6)


@pytest.mark.slow
def test_all_matrices_but_routers_are_deferred(forks):
    first, last = values(forks.run(2, deferred_weights, with_parallel({"pipeline": 2})))
    assert first[1] == [], "no stage waits for the first"
    matrices, deferred = last
    assert len(deferred) == 4
    assert all(names >= {name for name in matrices if ".gate." not in name} for names in deferred)


@pytest.mark.slow
def test_weights_and_moments_too(forks):
    recipe = with_parallel({"pipeline": 2})
    assert_split_equals_one(forks, recipe, replace(recipe, parallel=ParallelConfig()), "layers", "experts")


class ZeroBubble(Split):
    """A split into two stages with the zero-bubble schedule."""

    @property
    def parallel(self):
        return replace(super().parallel, schedule="zero_bubble")


@pytest.mark.slow
@pytest.mark.parametrize(("chain", "tolerance"), [("EP2, bubble, one", 1e-5), ("bubble, bubble", 0.0)])
def test_checkpoints_pass_to_other_splits_and_resume(forks, tmp_path, monkeypatch, chain, tolerance):
    import engines

    of = Split.of
    bubble = ZeroBubble(pipeline=2)
    monkeypatch.setattr(engines.Split, "of", lambda text: bubble if text.strip() == "bubble" else of(text))
    chained(forks, tmp_path, chain, DEEP, {"fp32": tolerance})
