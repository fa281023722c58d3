"""Pipeline stages of a T5: equal to one process; checkpoints pass to other splits."""

from dataclasses import replace

import pytest
from engines import assert_figures, engine_of, figures, load, save
from forks import only, values
from model_kinds import recipe_of, samples_of

from pretrain.config import ParallelConfig


def staged(kind, parallel):
    recipe = recipe_of(kind)
    return replace(
        recipe,
        model=recipe.model.with_values({"num_layers": 3, "num_decoder_layers": 3, "dropout": 0.1}),
        parallel=ParallelConfig(**parallel),
    )


def train(recipe):
    return figures(recipe, with_weights=False, make_samples=samples_of)


RELATIVE = "t5, relative positions"


@pytest.mark.by_default(0, 1)
@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        (RELATIVE, {"pipeline": 2, "expert": 2}),
        ("t5", {"pipeline": 4, "stage_layers": (1, 2, 1, 2)}),
        ("t5", {"pipeline": 2, "stage_layers": (1, 5), "tensor": 2}),
        ("t5", {"pipeline": 2, "stage_layers": (5, 1), "schedule": "zero_bubble"}),
        ("t5", {"pipeline": 2, "stage_layers": (2, 4), "schedule": "gpipe", "recompute": "full"}),
        ("t5", {"pipeline": 2, "data": 2, "shard": "optimizer", "overlap_gradients": True}),
        ("t5", {"pipeline": 2, "expert": 2, "shard": "parameters"}),
        (RELATIVE, {"pipeline": 2, "stage_layers": (1, 5), "data": 2, "shard": "optimizer"}),
        (RELATIVE, {"pipeline": 4, "stage_layers": (2, 2, 1, 1), "schedule": "zero_bubble"}),
    ],
    ids=range(9),
)
def test_stages_equal_one_process(forks, kind, parallel):
    recipe = staged(kind, parallel)
    expected = only(forks.run(1, train, replace(recipe, parallel=ParallelConfig())))
    assert_figures(values(forks.run(recipe.parallel.world_size, train, recipe)), expected, tolerance=1e-6)


def resumed(folder, recipe, step):
    """Two steps on from a checkpoint after ``step``, a checkpoint, and one step more: the losses and norms."""
    engine = engine_of(recipe)
    samples = samples_of(recipe)
    if step:
        load(engine, folder / f"step-{step:08d}")
    results = [engine.train_step(step + number, samples) for number in range(2)]
    save(engine, folder, step + 2, recipe=recipe.values())
    results.append(engine.train_step(step + 2, samples))
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RELATIVE, "t5"])
def test_checkpoints_pass_to_other_splits_and_resume(forks, tmp_path, kind):
    splits = (
        {"pipeline": 2, "stage_layers": (2, 4)},
        {"pipeline": 2, "stage_layers": (2, 4)},
        {"expert": 2},
        {"pipeline": 4, "stage_layers": (1, 2, 1, 2), "shard": "optimizer"},
        {},
    )
    expected = None
    for number, parallel in enumerate(splits):
        recipe = staged(kind, parallel)
        recipe = replace(recipe, train=replace(recipe.train, steps=20))
        figures_of_rank = values(forks.run(recipe.parallel.world_size, resumed, tmp_path, recipe, 2 * number))[0]
        if expected is not None:
            tolerance = 0.0 if number == 1 else 1e-5
            assert figures_of_rank[0] == pytest.approx(expected, rel=tolerance), f"{parallel}"
        expected = figures_of_rank[-1]
