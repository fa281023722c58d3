"""Properties of gates over many tokens: balance, distributions, estimates."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe.auxiliary import AuxLosses
from fmoe.gates import build_gate
from fmoe.gates.noisy import chance_of_choice
from fmoe.routing import RoutingGroups

WIDTH, EXPERTS = 16, 8


def skewed_tokens(count, seed=0):
    """Tokens with a common part, which sends most of them to the same experts."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(WIDTH, generator=torch.Generator().manual_seed(99))
    return torch.randn(count, WIDTH, generator=generator) + 1.5 * common


def build(name, top_k=None, **options):
    torch.manual_seed(0)
    gate = build_gate(name, WIDTH, EXPERTS, top_k, **options)
    with torch.no_grad():
        if hasattr(gate, "weight"):
            gate.weight.copy_(torch.randn(EXPERTS, WIDTH) * 0.5)
    return gate


def variation(load):
    load = load.double()
    return (load.std(-1, correction=0) / load.mean(-1)).max().item()


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_bias_alone_balances_skewed_load(micro_batches):
    """From a load CV above 0.8 to one below 0.1 within 300 steps of 0.002, the router untouched."""
    gate = build("sigmoid", 2, bias_step=0.002)
    variations = []
    for step in range(300):
        x, load_E = skewed_tokens(2048, seed=step), 0
        for part in x.chunk(micro_batches):
            with torch.no_grad():
                routing = gate(part, RoutingGroups(len(part) // 128, 128))
            gate.record(routing)
            load_E = load_E + routing.stats.load_E
        gate.end_step()
        variations.append(variation(load_E))
    assert variations[0] > 0.8
    assert max(variations[-20:]) < 0.1
    assert gate.expert_bias_E.abs().max() > 0.1


def test_bias_counts_a_step_once_under_accumulation_and_recomputation():
    gate = build("sigmoid", 2)
    x = skewed_tokens(64).requires_grad_()
    aux = AuxLosses(EXPERTS)
    aux.observer = gate.record

    def forward(part):
        routing = gate(part, RoutingGroups(1, len(part)))
        weight_TK = aux.attach(routing, 1.0, training=True)
        (out_TK,) = aux.count(routing, weight_TK, [weight_TK * 2], training=True, observer=None)
        return out_TK

    for part in x.chunk(2):
        checkpoint(forward, part, use_reentrant=False).sum().backward()
    assert gate._load_E.sum() == 64 * 2
    gate.end_step()
    assert not gate._load_E.any()
    moved = gate.expert_bias_E.clone()
    gate.end_step()  # nothing was counted
    assert torch.equal(gate.expert_bias_E, moved)


def test_the_layer_counts_and_the_optimizer_ends_the_step():
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, d_hidden=8, gate="sigmoid", seed=0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    handle = fmoe.attach_end_step(optimizer, layer)
    for _ in range(2):
        layer(skewed_tokens(64).view(2, 32, WIDTH)).sum().backward()
    load_E = fmoe.metrics(layer)[""].load
    optimizer.step()
    expected = [0.0 if v == 1 / EXPERTS else 1e-3 if v < 1 / EXPERTS else -1e-3 for v in load_E]
    assert layer.gate.expert_bias_E.tolist() == pytest.approx(expected)
    handle.remove()
    layer(skewed_tokens(64).view(2, 32, WIDTH)).sum().backward()
    optimizer.step()
    assert layer.gate.expert_bias_E.tolist() == pytest.approx(expected)
    fmoe.end_step(layer)
    assert layer.gate.expert_bias_E.tolist() == pytest.approx([2 * v for v in expected])


@pytest.mark.parametrize("top_k", [1, 2, 7])
def test_noisy_load_is_what_monte_carlo_finds(top_k):
    """P(x, i) of equation 9: how often expert i is among the K best when its own noise is drawn anew."""
    generator, draws = torch.Generator().manual_seed(1), 20000
    clean = torch.randn(5, EXPERTS, generator=generator, dtype=torch.float64)
    std = torch.rand(5, EXPERTS, generator=generator, dtype=torch.float64) + 0.3
    noisy = clean + std * torch.randn(5, EXPERTS, generator=generator, dtype=torch.float64)
    chance = chance_of_choice(clean, noisy, std, noisy.topk(top_k + 1).values)
    for i in range(EXPERTS):
        redrawn = noisy.repeat(draws, 1, 1)
        redrawn[:, :, i] = clean[:, i] + std[:, i] * torch.randn(draws, 5, generator=generator, dtype=torch.float64)
        found = (redrawn.topk(top_k).indices == i).any(-1).double().mean(0)
        assert (found - chance[:, i]).abs().max() < 5 * 0.5 / draws**0.5


def test_normal_noise_is_normal():
    noise = RoutingGroups(64, 256, noise_key=lambda: 3).normal(8, "p", torch.device("cpu")).flatten()
    assert noise.isfinite().all()
    ordered = noise.double().sort().values
    reached = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    expected = 0.5 * (1 + torch.erf(ordered / 2**0.5))
    assert (reached - expected).abs().max() < 1.95 / len(ordered) ** 0.5  # Kolmogorov's 0.1% bound
    whole = RoutingGroups(4, 8, noise_key=lambda: 3).normal(2, "p", torch.device("cpu")).view(4, 8, 2)
    part = RoutingGroups(2, 8, first_group=2, noise_key=lambda: 3).normal(2, "p", torch.device("cpu")).view(2, 8, 2)
    assert torch.equal(whole[2:], part)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("name", ["random", "hash"])
def test_lots_fall_evenly(name, top_k):
    """Chi-square of experts, and of pairs of first and second choice, within five standard deviations."""
    count = 8192
    groups = RoutingGroups(8, count // 8, token_ids_T=torch.arange(count), noise_key=lambda: 1)
    expert_TK = build(name, top_k)(torch.zeros(count, WIDTH), groups).expert_TK
    for k in range(top_k):
        assert chi_square(torch.bincount(expert_TK[:, k], minlength=EXPERTS)) < 5
    if top_k > 1:
        pairs = torch.bincount(expert_TK[:, 0] * EXPERTS + expert_TK[:, 1], minlength=EXPERTS**2).view(EXPERTS, EXPERTS)
        assert pairs.diag().sum() == 0
        assert chi_square(pairs[~torch.eye(EXPERTS, dtype=torch.bool)]) < 5


def chi_square(counts):
    """In standard deviations above its mean."""
    expected, freedom = counts.double().mean(), len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("experts", [3, 8, 64])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("kind", ["one token", "one that is no padding", "equal tokens"])
def test_sinkhorn_takes_the_raw_scores_where_all_balanced_ones_are_equal(experts, top_k, kind):
    torch.manual_seed(0)
    x = 3 * torch.randn(256, WIDTH)
    gate = build_gate("sinkhorn", WIDTH, experts, top_k)
    with torch.no_grad():
        gate.weight.normal_()
    best_TK = gate.logits(x, RoutingGroups(256, 1)).topk(top_k).indices
    size, mask_T = 1, None
    if kind != "one token":
        size = 4
        x = x.repeat_interleave(size, 0)
        if kind == "one that is no padding":
            mask_T = torch.arange(len(x)) % size == 2
    expert_TK = gate(x, RoutingGroups(256, size, mask_T=mask_T)).expert_TK
    expert_TK = expert_TK[mask_T] if mask_T is not None else expert_TK[::size]
    assert torch.equal(expert_TK, best_TK)
