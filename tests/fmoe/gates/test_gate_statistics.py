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


def loads(routing, num_groups):
    """[G, E]."""
    return torch.stack(
        [torch.bincount(part[part >= 0], minlength=EXPERTS) for part in routing.expert_TK.chunk(num_groups)]
    )


def variation(load):
    load = load.double()
    return (load.std(-1, correction=0) / load.mean(-1)).max().item()


def test_the_input_is_skewed():
    x = skewed_tokens(512)
    assert variation(build("naive", 1)(x, RoutingGroups(1, 512)).stats.load_E) > 1.0


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize(("length", "spread"), [(128, 0), (125, 1)], ids=["divisible", "not divisible"])
def test_base_is_balanced_in_every_group(length, spread, top_k):
    gate, x = build("base", top_k), skewed_tokens(4 * length)
    load_GE = loads(gate(x, RoutingGroups(4, length)), 4)
    assert (load_GE.amax(1) - load_GE.amin(1)).max() <= spread
    assert load_GE.sum() == 4 * length * top_k
    gate.eval()
    assert variation(gate(x, RoutingGroups(4, length)).stats.load_E) > 0.2


def test_base_assigns_better_than_chance_and_worse_than_greed():
    gate, x = build("base"), skewed_tokens(256)
    groups = RoutingGroups(1, 256)
    balanced, greedy = (gate.train(t)(x, groups).weight_TK.sum() for t in (True, False))
    chance = gate.logits(x, groups).sigmoid().mean() * 256
    assert chance < balanced < greedy


def test_swipe_fills_an_even_share():
    gate, x = build("swipe", 1), skewed_tokens(4 * 128)
    assert (loads(gate(x, RoutingGroups(4, 128)), 4) == 128 // EXPERTS).all()


@pytest.mark.parametrize(("top_k", "bound"), [(1, 0.25), (2, 0.25)])
def test_sinkhorn_is_nearly_balanced(top_k, bound):
    """Coefficient of variation of the load of a group of 512 tokens, 64 an expert and choice."""
    gate, x = build("sinkhorn", top_k), skewed_tokens(4 * 512)
    assert variation(loads(gate(x, RoutingGroups(4, 512)), 4)) < bound
    gate.eval()
    assert variation(loads(gate(x, RoutingGroups(4, 512)), 4)) > 3 * bound


def test_sinkhorn_balances_the_mass_of_the_scores():
    gate, x = build("sinkhorn", iterations=200, tolerance=1e-5), skewed_tokens(256)
    groups = RoutingGroups(2, 128)
    ranked = groups.split(gate.balance(gate.logits(x, groups).detach(), groups))
    assert torch.allclose(ranked.softmax(-1).sum(1), torch.full((2, EXPERTS), 128 / EXPERTS), rtol=1e-4)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 2.7])
def test_expert_choice_fills_every_expert_exactly(factor):
    gate, x = build("expert_choice", capacity_factor=factor), skewed_tokens(4 * 100)
    load_GE = loads(gate(x, RoutingGroups(4, 100)), 4)
    assert (load_GE == -(-factor * 100 // EXPERTS)).all()


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


def test_noisy_load_loss_estimates_the_variation_of_counts():
    """Over many tokens, the smooth counts are the expected counts of the gate's own draws."""
    gate, x = build("noisy", 2), skewed_tokens(256)
    counts, losses = 0, []
    for key in range(200):
        routing = gate(x, RoutingGroups(1, 256, noise_key=lambda key=key: key))
        counts = counts + routing.stats.load_E.double()
        losses.append(routing.losses["load"].item())
    assert torch.tensor(losses).mean().item() == pytest.approx(variation(counts) ** 2, rel=0.02)


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


def test_topology_keeps_tokens_near_as_far_as_the_load_allows():
    torch.manual_seed(0)
    x = torch.randn(4 * 64, 16)
    groups = RoutingGroups(4, 64)

    def near_and_most(**options):
        torch.manual_seed(1)
        gate = build_gate("topology", 16, 8, 2, num_nodes=2, **options).train()
        routing = gate(x, groups)
        loads = [routing.expert_TK[g * 64 : (g + 1) * 64].flatten().bincount(minlength=8) for g in range(4)]
        return float((routing.expert_TK < 4).float().mean()), int(torch.stack(loads).max())

    (free, most_free), (far, most_far) = near_and_most(bonus=0.0), near_and_most(bonus=50.0, skew=8.0)
    bounded, most = near_and_most(bonus=2.0, skew=2.0)
    assert free < 0.7 and far == 1.0  # every token stays on node 0, the one this worker is on
    assert free < bounded < far and most <= max(2 * 64 * 2 // 8, most_free) < most_far


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
