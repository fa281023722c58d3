"""Native operations against their references, values and gradients, over random shapes with dropped assignments."""

import pytest
import torch
from compare import assert_close

from fmoe import ops
from fmoe.dispatch import DispatchPlan
from fmoe.experts.ffn import ACTIVATIONS
from fmoe.ops import reference
from fmoe.routing import Routing


def random_plan(generator, num_tokens, top_k, num_experts, drop):
    expert = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator)
    expert[torch.rand(num_tokens, top_k, generator=generator) < drop] = -1
    weight = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float64)
    return DispatchPlan.from_routing(Routing(expert, weight), num_experts), expert, weight


@pytest.mark.parametrize("seed", range(30))
def test_permute_combine_grouped_linear(seed):
    g = torch.Generator().manual_seed(seed)
    num_tokens = [0, 1, 7, 40][seed % 4]
    top_k, num_experts, drop = 1 + seed % 3, [1, 3, 8][seed % 3], [0.0, 0.3, 1.0][seed // 10]
    plan, _, weight = random_plan(g, num_tokens, top_k, num_experts, drop)
    results = []
    for module in (ops, reference):
        x = torch.randn(
            num_tokens, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
        )
        w = torch.randn(
            num_experts, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True
        )
        b = torch.randn(
            num_experts, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True
        )
        mix = weight.clone().requires_grad_()
        rows = module.permute(x, plan, sum(plan.counts))
        out = module.combine(module.grouped_linear(rows, w, b, plan.counts), mix, plan)
        (out * torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))).sum().backward()
        results.append({"rows": rows, "out": out, "dx": x.grad, "dw": w.grad, "db": b.grad, "dmix": mix.grad})
    for name, expected in results[1].items():
        assert_close(results[0][name], expected, 1e-12, name)


def test_plan_is_sorted_stable_and_of_fixed_size():
    g = torch.Generator().manual_seed(0)
    plan, expert, _ = random_plan(g, 50, 2, 4, 0.3)
    flat = expert.flatten()
    assert plan.order_N.shape == (100,)
    assert plan.counts == [int((flat == e).sum()) for e in range(4)]
    sorted_experts = flat[plan.order_N]
    kept = sorted_experts[: sum(plan.counts)]
    assert (kept >= 0).all() and (sorted_experts[sum(plan.counts) :] == -1).all()
    for e in range(4):
        mine = plan.order_N[: sum(plan.counts)][kept == e]
        assert (mine.diff() > 0).all(), "token order within an expert"
    assert torch.equal(plan.order_N[plan.place_TK.flatten()], torch.arange(100))


def test_grouped_linear_poisons_nothing():
    """Outputs and gradients are written whole, whatever the memory held."""
    counts = [0, 3, 0, 2]
    torch.manual_seed(0)
    for _ in range(5):
        poison = torch.full((64, 64), float("nan"))
        del poison
        rows = torch.randn(5, 6, requires_grad=True)
        w = torch.randn(4, 5, 6, requires_grad=True)
        b = torch.randn(4, 5, requires_grad=True)
        ops.grouped_linear(rows, w, b, counts).sum().backward()
        assert all(t.grad.isfinite().all() for t in (rows, w, b))
        assert (w.grad[0] == 0).all() and (b.grad[2] == 0).all()


def _softened(x):
    """An activation that the operations do not know."""
    return x * torch.tanh(x).square()


@pytest.mark.parametrize("activation", [*ACTIVATIONS.values(), _softened], ids=[*ACTIVATIONS, "unknown"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_expert_ffn(gated, bias, activation):
    counts, width, hidden = [3, 0, 5, 1], 6, 7
    height = hidden * (1 + gated)
    results = []
    for module in (ops, reference):
        g = torch.Generator().manual_seed(0)
        shapes = {"rows": (9, width), "w_in": (4, height, width), "b_in": (4, height)}
        shapes |= {"w_out": (4, width, hidden), "b_out": (4, width)}
        t = {n: torch.randn(s, dtype=torch.float64, generator=g).requires_grad_() for n, s in shapes.items()}
        b_in, b_out = (t["b_in"], t["b_out"]) if bias else (None, None)
        out = module.expert_ffn(t["rows"], t["w_in"], b_in, t["w_out"], b_out, counts, activation, gated)
        (out * torch.randn(out.shape, dtype=torch.float64, generator=g)).sum().backward()
        results.append({"out": out} | {n: v.grad for n, v in t.items() if v.grad is not None})
    assert results[0].keys() == results[1].keys()
    for name, expected in results[1].items():
        assert_close(results[0][name], expected, 1e-12, name)


def test_reorder_is_its_inverse_backward():
    index = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    inverse = index.argsort()
    x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(ops.reorder(x, index, inverse), x[index])
    assert torch.autograd.gradcheck(lambda x: ops.reorder(x, index, inverse), x)
