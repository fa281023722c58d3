"""FastMoE's gates: what they decide, their losses, their capacity; several ranks are in test_fastmoe_ranks."""

import math

import pytest
import torch
from compare import assert_close
from fastmoe_reference import SmallExpert, brute_force

import fmoe
from fmoe import FMoE
from fmoe.gates import (
    DCGate,
    FasterGate,
    GShardGate,
    NaiveGate,
    NoisyGate,
    SwipeGate,
    SwitchGate,
    ZeroGate,
    base_gate,
    faster_gate,
    utils,
)

T, D, L = 40, 8, 4
GATES = [NaiveGate, NoisyGate, GShardGate, SwitchGate, SwipeGate, DCGate, ZeroGate]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def tokens(count=T, dtype=torch.float32):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def counts(index, num_experts=L):
    return torch.bincount(index[index >= 0], minlength=num_experts)


@pytest.mark.cover(2)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("kind", GATES)
def test_every_gate_in_every_precision(kind, top_k, dtype, training):
    """Noisy and zero gates with more than one choice gave FastMoE's layer flat indices, which it took for one each."""
    torch.manual_seed(0)
    layer = FMoE(num_expert=L, d_model=D, gate=kind, expert=SmallExpert, top_k=top_k).to(dtype).train(training)
    for count in (T, 1, 0):
        x = tokens(count, dtype)
        torch.manual_seed(4)
        index, score = layer.gate(x)
        assert index.shape == score.shape == (count, top_k)
        assert index.dtype == torch.int64 and score.dtype == dtype
        assert ((index >= -1) & (index < L)).all() and (score >= 0).all() and score.isfinite().all()
        loss = layer.gate.get_loss()
        assert (loss is None) is (kind in (ZeroGate, SwipeGate))
        assert loss is None or loss.isfinite().all()
        torch.manual_seed(4)
        y = layer(x)
        if count:
            experts = [expert.to(dtype) for expert in layer.experts]
            expected = brute_force(x, index, score, experts, torch.ones_like(y))
            assert_close(y, expected.output, {torch.float32: 1e-5}.get(dtype, 2e-2), "output")
        loss = layer.gate.get_loss()
        (y.float().sum() + (0 if loss is None else loss.sum())).backward()
        assert x.grad.isfinite().all()


def test_a_naive_gate_is_a_softmax_over_the_best():
    gate, x = NaiveGate(D, L, 2, top_k=3), tokens()
    index, score, logits = gate(x, return_all_scores=True)
    assert isinstance(gate, base_gate.BaseGate) and gate.tot_expert == gate.gate.out_features == 2 * L
    for t in range(T):
        best = sorted(range(2 * L), key=lambda e: -logits[t, e].item())[:3]
        assert index[t].tolist() == best
        assert torch.allclose(score[t], logits[t, best].softmax(0))
    assert gate.has_loss and gate.get_loss(clear=False).shape == (1,) and gate.get_loss().item() == 0
    assert not gate.has_loss


@pytest.mark.parametrize("kind", [GShardGate, DCGate, SwitchGate, FasterGate])
def test_the_balance_loss_counts_the_experts_of_all_ranks(kind, monkeypatch):
    """FastMoE scaled GShard's by the experts of one rank: balanced, it was 1 / ranks^2 and not 1."""
    monkeypatch.setattr("fmoe.fastmoe.gates.limit_by_capacity", lambda index, *_: (None, None, index))
    torch.manual_seed(0)
    gate = kind(D, L, 3, 0) if kind is FasterGate else kind(D, L, 3)
    x = tokens(3000)
    gate.eval()(x)
    logits = gate.gate(x)
    fraction = torch.bincount(logits.argmax(1), minlength=3 * L) / len(x)
    expected = 3 * L * (fraction * logits.softmax(1).mean(0)).sum()
    assert_close(gate.get_loss(), expected, 1e-5, "loss")
    with torch.no_grad():
        for parameter in gate.gate.parameters():
            parameter.mul_(1e-4)
    gate(x)
    assert gate.get_loss().item() == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.2])
def test_gshard_capacity_serves_first_choices_first(factor):
    torch.manual_seed(1)
    gate, x = GShardGate(D, L, 1, capacity=(factor, 2 * factor), random_routing=False), tokens()
    free, _ = NaiveGate.forward(gate, x)
    for training, rate in ((True, factor), (False, 2 * factor)):
        index, _ = gate.train(training)(x)
        limit = max(1, math.ceil(rate * T) * 2 // L)
        taken, expected = [0] * L, torch.full((T, 2), -1)
        for k in range(2):
            for t in range(T):
                e = free[t, k].item()
                if taken[e] < limit:
                    taken[e] += 1
                    expected[t, k] = e
        assert torch.equal(index, expected)
        assert all(torch.equal(gate(x)[0], index) for _ in range(5)), "the same ones every time"


def test_gshard_keeps_second_choices_at_random_in_training_alone():
    torch.manual_seed(1)
    gate, x = GShardGate(D, L, 1, capacity=(9.0, 9.0)), tokens(4000)
    index, score = gate(x)
    assert (index[:, 0] >= 0).all()
    kept = (index[:, 1] >= 0).float()
    expected = (2 * score[:, 1]).clamp(max=1)
    assert kept.mean().item() == pytest.approx(expected.mean().item(), abs=0.03)
    assert (gate.eval()(x)[0] >= 0).all()


@pytest.mark.parametrize("top_k", [1, 2])
def test_switch_noise_capacity_and_weights(top_k):
    torch.manual_seed(1)
    gate, x = SwitchGate(D, L, 1, topk=top_k, switch_eps=0.3, capacity=(0.5, 9.0)), tokens()
    torch.manual_seed(7)
    index, score = gate(x)
    assert counts(index).max() <= math.ceil(0.5 * T * top_k / L)
    assert (index == -1).any()
    torch.manual_seed(7)
    logits = gate.gate(x)
    noise = torch.rand_like(logits) * 2 * 0.3 + 1 - 0.3
    probs, order = (logits + noise).softmax(1).topk(top_k)
    assert torch.equal(score, probs)
    assert torch.equal(torch.where(index >= 0, order, -1), index)
    index, score = gate.eval()(x)
    assert torch.equal(score, logits.softmax(1).topk(top_k).values) and (index >= 0).all()


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_noisy_losses_match_simulation(top_k):
    """Load is the expected number of tokens of an expert whose own noise alone is drawn anew."""
    torch.manual_seed(0)
    gate, x = NoisyGate(D, L, 1, top_k), tokens().detach()
    torch.manual_seed(3)
    index, score = gate(x)
    loss = gate.get_loss().item()
    torch.manual_seed(3)
    clean = x @ gate.w_gate
    std = torch.nn.functional.softplus(x @ gate.w_noise) + gate.noise_epsilon
    noisy = clean + torch.randn_like(clean) * std
    assert torch.equal(index, noisy.topk(top_k).indices)
    load = torch.zeros(L)
    for e in range(L):
        others = noisy[:, [i for i in range(L) if i != e]].topk(top_k).values[:, -1]
        for _ in range(2000):
            load[e] += (clean[:, e] + torch.randn(T) * std[:, e] > others).sum() / 2000
    importance = torch.zeros(L).index_add(0, index.flatten(), score.flatten())
    expected = sum((v.var(correction=0) / v.mean() ** 2).item() for v in (load, importance))
    assert loss == pytest.approx(expected, rel=0.05)


def test_noisy_evaluation_is_plain_and_finite():
    torch.manual_seed(0)
    gate, x = NoisyGate(D, L, 1, 2).eval(), tokens()
    index, score = gate(x)
    values, expected = (x @ gate.w_gate).topk(2)
    assert torch.equal(index, expected) and torch.allclose(score, values.softmax(1))
    gate.get_loss().backward()
    assert gate.w_gate.grad.isfinite().all()
    assert gate.w_gate.abs().max() <= D**-0.5, "drawn as a Linear, whose fan-in is D"


def test_one_expert_alone():
    for kind in (NaiveGate, NoisyGate, GShardGate, SwitchGate, SwipeGate, DCGate, ZeroGate):
        gate = kind(D, 1, 1, 1)
        index, score = gate(tokens())
        assert (index[index >= 0] == 0).all() and score.isfinite().all()
        loss = gate.get_loss()
        assert loss is None or loss.isfinite().all()


@pytest.mark.parametrize("shape", [(T,), (T, 3)], ids=str)
def test_limit_by_capacity(shape):
    index = torch.randint(-1, L, shape, generator=torch.Generator().manual_seed(0))
    limits = torch.tensor([0, 3, 1000, 7])
    new_lec, new_gec, kept = utils.limit_by_capacity(index, L, 1, limits)
    expected = torch.minimum(counts(index), limits)
    assert torch.equal(new_lec, expected) and torch.equal(new_gec, expected)
    assert torch.equal(counts(kept), expected) and kept.is_contiguous()
    assert torch.equal(kept[kept >= 0], index[kept >= 0])
    assert torch.equal(counts(utils.limit_by_capacity(index, L, 1, 5)[2]), counts(index).clamp(max=5))


@pytest.mark.parametrize("fraction", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("per_node", [1, 2, 8])
def test_faster_gate_limits_what_leaves_the_node(per_node, fraction, monkeypatch):
    monkeypatch.setenv("FMOE_TOPO_GPUS_PER_NODE", str(per_node))
    monkeypatch.setenv("FMOE_TOPO_OUTGOING_FRACTION", str(fraction))
    torch.manual_seed(0)
    world_size, rank = 8, 5
    gate, x = faster_gate.gen_faster_gate(rank)(D, 1, world_size), tokens(500)
    assert gate.node_rank == rank // per_node and gate.ne_per_node == per_node
    index, score = gate(x)
    outside = index // per_node != rank // per_node
    leaving = gate.mask[gate.gate(x).argmax(1)].sum()
    if leaving > fraction * len(x):
        assert (outside & (index >= 0)).sum() == int(fraction * len(x))
        assert not outside[:, 0].any()
        assert bool((index == -1).any()) is (per_node == 1), "a node of one expert has no second"
    else:
        assert torch.equal(index, gate.gate(x).topk(2).indices)
    assert torch.allclose(score.sum(1), torch.ones(len(x)))
    score.sum().backward()
    assert gate.get_loss().isfinite()


def test_faster_gate_as_the_gate_of_a_layer(monkeypatch):
    layer = FMoE(num_expert=L, d_model=D, gate=faster_gate.gen_faster_gate(0), expert=SmallExpert)
    assert type(layer.gate) is FasterGate and "mask" not in layer.gate.state_dict()
    assert layer(tokens()).shape == (T, D)
    with pytest.raises(fmoe.UserError, match="node_rank=2 is not in 0"):
        FMoE(num_expert=L, d_model=D, gate=FasterGate)
    with pytest.raises(fmoe.UserError, match="top_k=3"):
        FMoE(num_expert=L, d_model=D, gate=faster_gate.gen_faster_gate(0), top_k=3)
    monkeypatch.setenv("FMOE_TOPO_OUTGOING_FRACTION", "nan")
    with pytest.raises(fmoe.UserError, match="FMOE_TOPO_OUTGOING_FRACTION='nan' must be at least 0"):
        faster_gate.gen_faster_gate(0)(D, L, 1)
    monkeypatch.setenv("FMOE_TOPO_GPUS_PER_NODE", "many")
    with pytest.raises(fmoe.UserError, match="FMOE_TOPO_GPUS_PER_NODE='many'"):
        faster_gate.gen_faster_gate(0)(D, L, 1)


def test_swipe_on_one_rank_changes_nothing():
    gate, x = SwipeGate(D, L, 1), tokens()
    index, score = gate(x)
    expected, weight = NaiveGate.forward(gate, x)
    assert torch.equal(index, expected) and torch.allclose(score, weight)
    moved, left = gate.swipe_once(index[:, 0], torch.tensor(T - 3), 2)
    assert torch.equal(moved[: T - 3], index[: T - 3, 0]) and (moved[T - 3 :] == -1).all() and left == 0


@pytest.mark.parametrize("kind", [GShardGate, SwitchGate, SwipeGate, NoisyGate])
def test_the_same_in_every_run(kind):
    torch.manual_seed(0)
    gate, x = kind(D, L, 1), tokens()
    results = []
    for _ in range(20):
        torch.manual_seed(9)
        results.append(gate(x)[0])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.by_default("NaiveGate", "ZeroGate")
@pytest.mark.parametrize("kind", [NaiveGate, NoisyGate, GShardGate, SwitchGate, DCGate, ZeroGate])
def test_no_graph_break_in_a_gate(kind):
    torch.manual_seed(0)
    gate, x = kind(D, L, 1, 2).eval(), tokens()
    index, score = torch.compile(gate, backend="eager", fullgraph=True)(x)
    assert torch.equal(index, gate(x)[0]) and torch.equal(score, gate(x)[1])
    torch.compile(gate.train(), backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("kind", GATES)
def test_autocast(kind):
    torch.manual_seed(0)
    layer, x = FMoE(num_expert=L, d_model=D, gate=kind, expert=SmallExpert), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    loss = layer.gate.get_loss()
    (y.float().sum() + (0 if loss is None else loss)).backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    assert_close(layer.eval()(x), layer(x), 1e-6, "evaluation")
