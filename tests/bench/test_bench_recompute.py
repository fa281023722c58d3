"""The benchmark of recomputation on a tiny model."""

from types import SimpleNamespace

import pytest
from forks import values

from bench import recompute
from pretrain.config import ModelConfig, Recipe, TrainConfig


def tiny():
    import torch

    from pretrain.process import Processes

    model = ModelConfig(
        num_layers=2, hidden_size=32, num_heads=2, ffn_hidden_size=64, sequence_length=32, vocab_size=64, num_experts=2
    )
    recipe = Recipe(model=model, train=TrainConfig(global_batch=4, micro_batch=2))
    arguments = SimpleNamespace(rounds=2, warmup=0, seed=0, precision=["fp32"])
    (row,) = recompute.measure(recipe, Processes(0, 1, torch.device("cpu")), arguments)
    return row.facts, sorted(row.seconds), row.failures


@pytest.mark.slow
def test_recomputation_keeps_less(forks):
    ((facts, timed, failures),) = values(forks.run(1, tiny))
    assert not failures and timed == sorted(recompute.MODES)
    none, selective, full = (float(facts[mode]["kept, bytes per token"].replace(",", "")) for mode in recompute.MODES)
    assert full < selective < none
    # Full: the input of each layer, and what lies before and after the layers: embeddings, logits.
    assert full >= 2 * 32 * 4
