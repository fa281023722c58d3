"""The benchmark of recomputation on a tiny model."""

from types import SimpleNamespace

import pytest
import torch
from forks import values
from torch.utils.checkpoint import checkpoint

from bench.studies import recompute
from pretrain.config import AttentionConfig, ModelConfig, MoEConfig, Recipe, TrainConfig


def tiny():
    import torch

    from pretrain.start.process import Processes

    model = ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        sequence_length=32,
        vocab_size=64,
        attention=AttentionConfig(num_heads=2),
        moe=MoEConfig(num_experts=2),
    )
    recipe = Recipe(model=model, train=TrainConfig(global_batch=4, micro_batch=2))
    arguments = SimpleNamespace(rounds=2, warmup=0, seed=0, precision=["fp32"], budget_mb=1.0, threads=1, clock="cpu")
    (row,) = recompute.measure(recipe, Processes(0, 1, torch.device("cpu")), arguments)
    return row.facts, sorted(row.seconds), row.failures


@pytest.mark.parametrize(("fixed", "slope", "curve"), [(0, 10, 0), (30, 10, 0), (0, 10, 0.1), (5, 20, -0.01)])
def test_the_largest_that_fits(fixed, slope, curve):
    def peak(count):
        return fixed + slope * count + curve * count**2

    for budget in (slope + fixed + curve, 237, 1000.0):
        found = recompute.largest(peak, budget)
        assert peak(found) <= budget < peak(found + 1)
    assert recompute.largest(peak, 9) == 0


def test_held_bytes_by_hand():
    """Saved are the outputs of exp (40 bytes each) and, from the sum on, none; a recomputation holds its own."""
    model = torch.nn.Linear(10, 1)
    x = torch.ones(10, requires_grad=True)
    held = recompute.Held(model)
    with held:
        first = x.exp()
        assert held.peak == 40
        second = first.exp()
        second.exp().sum().backward()
        assert held.peak == 3 * 40, "each is held once, though the next operation may use it too"
        model(torch.ones(10)).backward()  # its input, and no parameter
        assert held.peak == 3 * 40
    held = recompute.Held(model)
    with held:
        checkpoint(lambda x: x.exp().exp().exp(), x, use_reentrant=True).sum().backward()
        assert held.peak == 40 + 3 * 40, "the input, and in the backward pass what was recomputed"


@pytest.mark.slow
def test_recomputation_keeps_less(forks):
    ((facts, timed, failures),) = values(forks.run(1, tiny))
    assert not failures and set(timed) >= set(recompute.MODES)
    none, selective, full = (float(facts[mode]["kept, bytes per token"].replace(",", "")) for mode in recompute.MODES)
    assert full < selective < none
    sizes = [int(facts[mode]["largest micro batch in 1 MB"]) for mode in recompute.MODES]
    assert 0 < sizes[0] < sizes[1] < sizes[2] and facts["full"]["ratio to none"] == f"{sizes[2] / sizes[0]:.2f}"
    # Full: the input of each layer, and what lies before and after the layers: embeddings, logits.
    assert full >= 2 * 32 * 4
