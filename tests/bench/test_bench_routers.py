"""The probe of routers: what random experts cost, and gradients by loss."""

from dataclasses import replace

import numpy as np
import pytest
from forks import only

from bench.studies import routers
from pretrain.config import AttentionConfig, ModelConfig, MoEConfig, Recipe, TrainConfig

RECIPE = Recipe(
    model=ModelConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=16,
        sequence_length=16,
        vocab_size=64,
        init_std=0.5,
        attention=AttentionConfig(num_heads=2),
        moe=MoEConfig(num_experts=4, top_k=2, gate="naive", eval_capacity_factor=None),
    ),
    train=TrainConfig(micro_batch=2),
)
SAMPLES = np.random.default_rng(1).integers(64, size=(4, 17))


def measure(cases):
    """The reports of new models: of a recipe, with experts that are alike or not."""
    from megatron_patch import MegatronMoE, cpu

    cpu.install()
    from pretrain.engine import init_parallel
    from pretrain.engine.model import build_model

    init_parallel(RECIPE)
    reports = []
    for recipe, are_alike in cases:
        model = build_model(recipe).eval()
        for layer in (m for m in model.modules() if isinstance(m, MegatronMoE)):
            for weight in layer.experts.parameters() if are_alike else ():
                weight.data.copy_(weight.data[:1].expand_as(weight).clone())
        reports.append(routers.measure("run", model, recipe, SAMPLES, 4))
    return reports


@pytest.fixture(scope="module")
def reports(forks):
    """Reports of the recipe, of the same with all experts alike, and with twice the balance loss."""
    twice = replace(RECIPE, model=RECIPE.model.with_values({"moe.balance_loss": 2 * RECIPE.model.moe.balance_loss}))
    return only(forks.run(1, measure, [(RECIPE, False), (RECIPE, True), (twice, False)]))


@pytest.mark.slow
def test_random_experts_cost_something_unless_all_are_alike(reports):
    others, alike, _ = reports
    assert alike.random_loss == pytest.approx(alike.loss, rel=1e-6)
    assert abs(others.random_loss - others.loss) > 1e-3
    for number in (1, 2):
        assert abs(alike.layers[number]["random experts"]) < 1e-5
        assert abs(others.layers[number]["random experts"]) > 1e-4
        assert abs(alike.layers[number]["no experts"]) > 1e-4
