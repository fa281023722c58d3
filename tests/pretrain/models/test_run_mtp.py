"""Multi-token prediction: equal to DeepSeek-V3's equations 21 to 25 in float64, and the same at every split."""

from dataclasses import replace

import pytest
import torch
from engines import RECIPE as SPLIT_RECIPE
from engines import Samples, assert_figures, engine_of, figures, in_one_micro_batch
from forks import only, values
from mtp_reference import assert_losses_and_gradients

from pretrain.config import ParallelConfig


def test_losses_and_gradients_are_those_of_the_equations(forks):
    assert_losses_and_gradients(forks)


RECIPE = replace(SPLIT_RECIPE, model=replace(SPLIT_RECIPE.model, mtp_layers=2, mtp_loss=0.5, num_layers=2))


@pytest.fixture(scope="module")
def alone(forks):
    return only(forks.run(1, figures, in_one_micro_batch(RECIPE), False))


@pytest.mark.by_default("pipeline=2 shard=optimizer")
@pytest.mark.parametrize(
    "parallel",
    [{}, {"data": 2, "shard": "optimizer"}, {"expert": 2}, {"tensor": 2}, {"pipeline": 2, "shard": "optimizer"}],
    ids=lambda x: " ".join(f"{k}={v}" for k, v in x.items()),
)
def test_micro_batches_and_splits_change_nothing(forks, alone, parallel):
    recipe = replace(RECIPE, parallel=ParallelConfig(**parallel))
    assert_figures(values(forks.run(recipe.parallel.world_size, figures, recipe, False)), alone)


def without_modules(recipe):
    """Validation and logits of the model with MTP modules, and of one with its other weights alone."""
    from pretrain.engine import Engine
    from pretrain.models.gpt import forward

    engine = engine_of(recipe)
    plain = Engine(replace(recipe, model=replace(recipe.model, mtp_layers=0, mtp_loss=0.3)), engine.processes)
    weights = engine.gpt.state_dict()
    plain.gpt.load_state_dict({name: value for name, value in weights.items() if not name.startswith("mtp.")})
    tokens = torch.as_tensor(Samples()[3]).unsqueeze(0)
    seen = [(e.evaluate(Samples(), 8), forward(e.gpt.eval(), {"tokens": tokens}).detach()) for e in (engine, plain)]
    assert any(name.startswith("mtp.") for name in weights)
    assert engine.config.mtp_num_layers == 2
    return seen


def test_evaluation_and_logits_ignore_the_modules(forks):
    (loss, logits), (expected, plain) = only(forks.run(1, without_modules, RECIPE))
    assert loss == expected
    assert torch.equal(logits, plain)


def small_then_deep(recipe):
    """Losses of a step of a model, after one of a model with fewer layers in the same process."""
    from pretrain.engine import stop_parallel

    small = replace(
        recipe, model=recipe.model.with_values({"num_layers": 1, "moe.layers": (1,), "mtp_layers": 0, "mtp_loss": 0.3})
    )
    seen = []
    for one in (small, recipe):
        seen.append(engine_of(one).train_step(0, Samples()).loss)
        stop_parallel()
    return seen


def test_a_model_may_follow_one_with_fewer_layers(forks, alone):
    """Megatron's tracker of auxiliary losses is sized for the first model of a process."""
    assert only(forks.run(1, small_then_deep, RECIPE))[1] == pytest.approx(alone["loss 0"], rel=1e-6)
