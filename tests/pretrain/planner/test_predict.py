"""Predictions composed of kinds of layers, against traces and dry runs of whole models."""

from dataclasses import replace

import pytest
import torch.distributed as dist
from engines import RECIPE, Split
from forks import only

from pretrain.config import AttentionConfig
from pretrain.planner.predict import Piece
from pretrain.planner.schedule import Times

MOE = replace(RECIPE.model.moe, capacity_factor=None, jitter=0.0)
GPT = replace(RECIPE, model=replace(RECIPE.model, num_layers=4, moe=MOE))
SPARSE = replace(GPT, model=replace(GPT.model, moe=replace(MOE, every=2)))
WINDOW = replace(
    GPT, model=replace(GPT.model, attention=AttentionConfig(num_heads=2, sliding_window=4, sliding_layers=(1, 3)))
)
T5 = replace(RECIPE, model=replace(RECIPE.model, kind="t5", num_layers=3, moe=MOE))
BERT = replace(GPT, model=replace(GPT.model, kind="bert"))
MODELS = {"gpt": GPT, "sparse": SPARSE, "window": WINDOW, "t5": T5, "bert": BERT}


def _predicted(recipe):
    from pretrain.planner.cluster import load_cluster
    from pretrain.planner.loads import of_slowest, uniform
    from pretrain.planner.predict import Predictor

    dist.destroy_process_group()
    return Predictor(load_cluster("h100-64"), of_slowest(uniform(4))).predict(recipe)


def _compared(recipe):
    """The prediction, and saved bytes and peak of a whole trace of the same rank."""
    from pretrain.planner.loads import of_slowest, uniform
    from pretrain.planner.trace import trace_step

    predicted = _predicted(recipe)
    stage_size = recipe.parallel.world_size // recipe.parallel.pipeline
    whole = trace_step(recipe, predicted.stage * stage_size, of_slowest(uniform(4)))
    return predicted, whole


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("gpt", "one"),
        ("sparse", "one bf16"),
        ("window", "TP2"),
        ("t5", "EP2"),
        ("bert", "DP2"),
        ("gpt", "PP2"),
        ("gpt", "CP2"),
    ],
)
def test_activations_are_those_of_the_whole_model(forks, model, text):
    recipe = Split.of(text).recipe(MODELS[model])
    predicted, whole = only(forks.run(1, _compared, recipe))
    assert predicted.memory["activations"] == pytest.approx(whole.saved, rel=0.01)
    assert predicted.memory["activations"] + predicted.memory["transient"] == pytest.approx(whole.peak, rel=0.05)


def _held(recipe):
    from pretrain import dryrun

    return _predicted(recipe), [kind.holding for kind in dryrun.make_plan(recipe).kinds]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("gpt", "one"),
        ("sparse", "EP2 DP2"),
        ("gpt", "EP2 DP2 ZeRO1 bf16"),
        ("gpt", "PP2 DP2 ZeRO1"),
        ("t5", "EP2 bf16"),
    ],
)
def test_weights_and_optimizer_are_those_of_the_dry_run(forks, model, text, optimizer):
    recipe = Split.of(text).recipe(MODELS[model])
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, name=optimizer))
    predicted, holdings = only(forks.run(1, _held, recipe))
    held = holdings[min(predicted.stage, len(holdings) - 1)]
    assert predicted.memory["weights"] == pytest.approx(held.weights, rel=0.02)
    assert predicted.memory["gradients"] == pytest.approx(held.gradients, rel=0.03)
    assert predicted.memory["optimizer"] == pytest.approx(held.masters + held.moments, rel=0.03)


def test_terms_and_phases_add_up(forks):
    predicted = only(forks.run(1, _predicted, Split.of("PP2 EP2 DP2 ZeRO1").recipe(SPARSE)))
    assert predicted.seconds == pytest.approx(sum(predicted.terms.values()))
    assert predicted.seconds == pytest.approx(sum(predicted.phases.values()))
    for term in ("gemm", "attention", "experts", "memory", "exchange", "bubble", "reduction", "optimizer"):
        assert predicted.terms[term] > 0, term


def _seconds(recipe, *shares):
    import numpy as np

    from pretrain.planner.cluster import load_cluster
    from pretrain.planner.loads import of_slowest
    from pretrain.planner.predict import Predictor

    dist.destroy_process_group()
    cluster = load_cluster("h100-64")
    return [Predictor(cluster, of_slowest(np.array([[share]]))).predict(recipe) for share in shares]


def test_a_hot_expert_costs_time_and_memory(forks):
    recipe = Split.of("EP2").recipe(replace(GPT, model=replace(GPT.model, hidden_size=256, ffn_hidden_size=512)))
    even, hot = only(forks.run(1, _seconds, recipe, [0.25] * 4, [0.85, 0.05, 0.05, 0.05]))
    assert hot.terms["experts"] > even.terms["experts"]
    assert hot.memory["activations"] > even.memory["activations"]


def test_a_gpu_hides_the_host_and_chunks_hide_the_exchange():
    terms = {"gemm": 3.0, "experts": 1.0, "exchange": 2.0, "host": 9.0}
    piece = Piece({name: dict(terms) for name in ("forward", "backward")}, {"host": 1.0}, 0.0, 0, 0)
    whole = piece.overlapped(1)
    assert whole.passes["forward"] == {**terms, "host": 9.0 - 6.0}
    assert whole.once == {"host": 0.0}
    halves = piece.overlapped(2).passes["forward"]
    assert halves["exchange"] == 2.0 - 0.5  # half of the experts' second
    assert halves["host"] == 9.0 - 5.5
    idle = replace(piece, passes={**piece.passes, "forward": {**terms, "host": 2.0}}).overlapped(1)
    assert idle.passes["forward"]["host"] == 0.0


def test_zero_bubble_divides_the_backward_pass():
    piece = Piece({"forward": {"gemm": 3.0}, "backward": {"gemm": 6.0, "memory": 1.0}}, {}, 0.0, 0, 0)
    assert piece.times(False) == Times(3.0, 7.0)
    assert piece.times(True) == Times(3.0, 4.0, 3.0)
