"""Gradients of combine weights from the ranks of the experts (`fmoe.kernels.rows`), against `combine`."""

import pytest
import torch
import torch.distributed as dist
from compare import relative_error
from forks import values

import fmoe
from fmoe.kernels.padded import PaddedPlan
from fmoe.kernels.rows import DispatchPlan, combine_unsaved, weigh_gradient
from fmoe.routing import Routing, RoutingGroups

TOKENS = 12
TOP_K = 3
EXPERTS = 5
WIDTH = 6
SLOTS = 8


def drawn(padded=False, tokens=TOKENS, dtype=torch.float64):
    """A plan with dropped assignments, rows and weights."""
    g = torch.Generator().manual_seed(0)
    expert_TK = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :TOP_K]
    expert_TK[torch.rand(expert_TK.shape, generator=g) < 0.3] = -1
    plan = DispatchPlan.from_routing(Routing(expert_TK, expert_TK), EXPERTS)
    num_rows = EXPERTS * SLOTS if padded else sum(plan.counts)
    rows = torch.randn(num_rows, WIDTH, generator=g).to(dtype).requires_grad_()
    weight_TK = torch.rand(tokens, TOP_K, generator=g).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    return PaddedPlan(plan, SLOTS, 2) if padded else plan, rows, weight_TK


def unsaved(plan, rows, weight_TK):
    return combine_unsaved(weigh_gradient(rows, plan.weights(weight_TK, rows.shape[0])), weight_TK, plan)


@pytest.mark.parametrize("padded", [False, True], ids=["rows", "slots"])
@pytest.mark.parametrize("tokens", [TOKENS, 0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bits_of_combine(dtype, tokens, padded):
    plan, rows, weight_TK = drawn(padded, tokens, dtype)
    found = unsaved(plan, rows, weight_TK)
    expected = plan.combine(rows, weight_TK)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(found, expected)
    options = {"allow_unused": True, "materialize_grads": True}
    both = [torch.autograd.grad(y, (rows, weight_TK), grad, **options) for y in (found, expected)]
    for a, b in zip(*both, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("padded", [False, True], ids=["rows", "slots"])
def test_second_derivatives(padded):
    plan, rows, weight_TK = drawn(padded)
    results = []
    for run in (unsaved, lambda plan, rows, weight_TK: plan.combine(rows, weight_TK)):
        y = run(plan, rows, weight_TK)
        first = torch.autograd.grad(y.pow(3).sum(), (rows, weight_TK), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), (rows, weight_TK)))
    assert max(relative_error(a, b) for a, b in zip(*results, strict=True)) < 1e-12


def sent_forward(exchange, options):
    """Bytes sent in a forward pass with gradients and in one without, rows sent to the other rank, and the outputs."""
    group = {"moe_group": dist.group.WORLD, "exchange": exchange, "exchange_options": options}
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=4, d_hidden=8, top_k=2, gate="naive", seed=3, **group)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    away = int((layer.gate(x, RoutingGroups(1, TOKENS)).expert_TK // 2 != dist.get_rank()).sum())
    sent = []
    outputs = []
    for has_grad in (True, False):
        before = layer.exchange.traffic.sent
        with torch.set_grad_enabled(has_grad):
            outputs.append(layer(x).detach())
        sent.append(layer.exchange.traffic.sent - before)
    return sent, away, outputs


@pytest.mark.parametrize(("exchange", "options"), [("all_to_all", {}), ("hierarchical", {"node_size": 1})], ids=str)
def test_weights_are_sent_only_with_gradients(two_ranks, exchange, options):
    for (training, inference), away, (y, same) in values(two_ranks.run(sent_forward, exchange, options)):
        assert training - inference == 4 * away > 0 and torch.equal(y, same)


def different_gradients(case):
    """Gradients of the tokens of rank 0 and of each rank's gate, if rank 1 has something less to differentiate."""
    tokens = 0 if case == "no tokens" and dist.get_rank() else TOKENS
    options = {"exchange": "padded", "exchange_options": {"slots": 2 * TOKENS, "chunks": 2}, "gate": PlainGate()}
    group = {"moe_group": dist.group.WORLD}
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=4, d_hidden=8, top_k=2, seed=3, **group, **options).double()
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    if dist.get_rank():
        x = x.detach() if case == "input" else x
        layer.gate.is_constant = case in ("weights", "input")
        layer.gate.requires_grad_(case != "input")
    y = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad, layer.gate.weight.grad


class PlainGate(torch.nn.Linear):
    """A gate of plain operations, which get no gradient where none comes in; optionally with constant weights."""

    top_k = 2
    is_constant = False

    def __init__(self):
        super().__init__(WIDTH, 4, bias=False)
        torch.nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(2))

    def forward(self, x):
        weight_TK, expert_TK = super().forward(x).softmax(-1).topk(2, -1)
        return Routing(expert_TK, weight_TK.detach() if self.is_constant else weight_TK)


@pytest.mark.parametrize("case", ["weights", "input", "no tokens"])
def test_padded_ranks_with_different_gradients(two_ranks, case):
    (expected, grad, gate_grad), same = values(two_ranks.run(different_gradients, "nothing"))
    (y, found, found_gate), other = values(two_ranks.run(different_gradients, case))
    assert relative_error(y, expected) < 1e-12 and relative_error(found, grad) < 1e-12
    assert relative_error(found_gate, gate_grad) < 1e-12
    if case == "no tokens":
        assert other[2] is not None and not other[2].any() and same[2].any()
