"""Native operations against their references, values and gradients, over random shapes with dropped assignments."""

import functools

import pytest
import torch
from compare import assert_close
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe import kernels
from fmoe.experts.ffn import ACTIVATIONS
from fmoe.kernels import reference
from fmoe.kernels.native import loader as native
from fmoe.kernels.padded import PaddedPlan
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing


def random_plan(generator, num_tokens, top_k, num_experts, drop):
    expert = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator)
    expert[torch.rand(num_tokens, top_k, generator=generator) < drop] = -1
    weight = torch.rand(num_tokens, top_k, generator=generator, dtype=torch.float64)
    return DispatchPlan.from_routing(Routing(expert, weight), num_experts), expert, weight


def drawn(*shapes):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=g).requires_grad_() for shape in shapes]


def assert_as_reference(run, inputs):
    """Compare ``run(module, *inputs)`` of `kernels` and of `reference`: value and gradients."""
    results = []
    for module in (kernels, reference):
        out = run(module, *inputs)
        grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(4))
        trained = [x for x in inputs if x is not None]
        results.append([out, *torch.autograd.grad(out, trained, grad)])
    for number, (found, expected) in enumerate(zip(*results, strict=True)):
        assert_close(found, expected, 1e-12, f"the output, or the gradient of input {number - 1}")


@pytest.mark.parametrize("seed", range(30))
def test_permute_combine_grouped_linear(seed):
    g = torch.Generator().manual_seed(seed)
    num_tokens = [0, 1, 7, 40][seed % 4]
    top_k = 1 + seed % 3
    num_experts = [1, 3, 8][seed % 3]
    drop = [0.0, 0.3, 1.0][seed // 10]
    plan, _, weight = random_plan(g, num_tokens, top_k, num_experts, drop)

    def run(module, x, w, b, weight):
        rows = module.permute(x, plan.perm_N, plan.inverse_TK, sum(plan.counts))
        return module.combine(module.grouped_linear(rows, w, b, plan.counts), weight, plan.inverse_TK)

    inputs = drawn((num_tokens, 6), (num_experts, 5, 6), (num_experts, 5))
    assert_as_reference(run, [*inputs, weight.requires_grad_()])


def test_plan_is_sorted_stable_and_of_fixed_size():
    g = torch.Generator().manual_seed(0)
    plan, expert, _ = random_plan(g, 50, 2, 4, 0.3)
    flat = expert.flatten()
    assert plan.perm_N.shape == (100,)
    assert plan.counts == [int((flat == e).sum()) for e in range(4)]
    sorted_experts = flat[plan.perm_N]
    kept = sorted_experts[: sum(plan.counts)]
    assert (kept >= 0).all() and (sorted_experts[sum(plan.counts) :] == -1).all()
    for e in range(4):
        mine = plan.perm_N[: sum(plan.counts)][kept == e]
        assert (mine.diff() > 0).all(), "token order within an expert"
    assert torch.equal(plan.perm_N[plan.inverse_TK.flatten()], torch.arange(100))


@pytest.mark.parametrize("drop", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("slots", [None, 60], ids=["packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_that_is_not_finite_stays_with_its_token(dtype, slots, drop):
    plan, expert, weight = random_plan(torch.Generator().manual_seed(3), 50, 2, 4, drop)
    num_rows = sum(plan.counts)
    rows_NK = plan.inverse_TK
    if slots is not None:
        plan = PaddedPlan(plan, slots, 1)
        num_rows = 4 * slots
        rows_NK = plan.inverse_TK
    sick = int(rows_NK[expert >= 0].max())  # the last row, which stood in for assignments without one
    hit_T = ((rows_NK == sick) & (expert >= 0)).any(1)
    x = torch.ones(50, 6, dtype=dtype, requires_grad=True)
    rows = plan.permute(x, num_rows)
    rows.backward(torch.ones_like(rows).index_fill(0, torch.tensor([sick]), torch.nan))
    out = plan.combine(rows.detach().index_fill(0, torch.tensor([sick]), torch.nan), weight.to(dtype))
    assert torch.equal(out.isnan().all(1), hit_T) and torch.equal(out.isnan().any(1), hit_T)
    assert torch.equal(x.grad.isnan().all(1), hit_T) and torch.equal(x.grad.isnan().any(1), hit_T)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_an_expert_that_is_not_finite_reaches_its_tokens_alone(backend):
    if backend == "native" and not native.load():
        pytest.skip(native.why())
    layer = fmoe.FMoE(d_model=8, num_experts=4, d_hidden=16, top_k=1, gate="switch", seed=0, backend=backend)
    with torch.no_grad():
        next(layer.experts.parameters())[3] = torch.nan
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    mask = torch.arange(40) % 5 != 0
    seen = []
    layer.gate.register_forward_hook(lambda _m, _i, routing: seen.append(routing.expert_TK))
    y = layer(x, mask)
    y.nan_to_num().sum().backward()
    expert_T = seen[0].squeeze(1)
    assert (expert_T == 3).any() and (expert_T == -1).sum() > 8
    assert torch.equal(y.isnan().any(1), expert_T == 3) and (y[~mask] == 0).all()
    assert x.grad[expert_T != 3].isfinite().all()


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
        kernels.grouped_linear(rows, w, b, counts).sum().backward()
        assert all(t.grad.isfinite().all() for t in (rows, w, b))
        assert (w.grad[0] == 0).all() and (b.grad[2] == 0).all()


def _softened(x):
    """An activation that the operations do not know."""
    return x * torch.tanh(x).square()


@pytest.mark.parametrize("activation", [*ACTIVATIONS.values(), _softened], ids=[*ACTIVATIONS, "unknown"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_expert_ffn(gated, bias, activation):
    height = 7 * (1 + gated)
    x, w_in, b_in, w_out, b_out = drawn((9, 6), (4, height, 6), (4, height), (4, 6, 7), (4, 6))
    inputs = [x, w_in, b_in, w_out, b_out] if bias else [x, w_in, None, w_out, None]
    assert_as_reference(lambda module, *t: module.expert_ffn(*t, [3, 0, 5, 1], activation, gated), inputs)


@pytest.mark.parametrize("activation", [F.gelu, F.silu, _softened], ids=["gelu", "silu", "unknown"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_second_derivatives_of_the_experts(activation, gated):
    counts = [2, 0, 1]
    height = 3 * (1 + gated)
    inputs = drawn((3, 2), (3, height, 2), (3, height), (3, 2, 3), (3, 2))
    run = functools.partial(kernels.expert_ffn, counts=counts, activation=activation, gated=gated)
    assert torch.autograd.gradgradcheck(run, inputs)
    inputs[1].requires_grad_(False)  # a frozen matrix still is what others' derivatives depend on
    assert torch.autograd.gradgradcheck(run, inputs)
    linear = functools.partial(kernels.grouped_linear, counts=counts)
    assert torch.autograd.gradgradcheck(linear, drawn((3, 2), (3, 4, 2), (3, 4)))


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("slots", [None, 6], ids=["sorted", "padded"])
def test_second_derivatives_of_moving_rows(slots, drop):
    plan, _, _ = random_plan(torch.Generator().manual_seed(1), 4, 2, 3, drop)
    num_rows = sum(plan.counts)
    if slots is not None:
        plan = PaddedPlan(plan, slots, 1)
        num_rows = 3 * slots

    def move(x, weight):
        return plan.combine(plan.permute(x, num_rows).square(), weight)

    assert torch.autograd.gradgradcheck(move, drawn((4, 2), (4, 2)))


def test_one_tensor_may_be_two_inputs_of_second_derivatives():
    (weight,) = drawn((2, 3, 3))
    rows = drawn((4, 3))[0]
    run = functools.partial(kernels.expert_ffn, counts=[1, 3], activation=F.silu)
    assert torch.autograd.gradgradcheck(lambda rows, weight: run(rows, weight, None, weight, None), [rows, weight])


class _Scaled:
    """A callable that is no module, with a parameter."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return torch.tanh(self.factor * x)


def _scaled(x, factor):
    return torch.tanh(factor * x)


LEARNT = {
    "closure": lambda factor: lambda x: torch.tanh(factor * x),
    "object": _Scaled,
    "partial": lambda factor: functools.partial(_scaled, factor=factor),
}


def layer_with(activation, backend="auto", **options):
    sizes = {"d_model": 6, "num_experts": 3, "d_hidden": 8, "top_k": 2, "gate": "naive", "seed": 1}
    return fmoe.FMoE(**sizes, backend=backend, expert_options={"activation": activation, **options})


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("kind", LEARNT)
def test_what_an_activation_closes_over_is_differentiated(kind, gated):
    factor = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    layer = layer_with(LEARNT[kind](factor), gated=gated).double()
    x = torch.randn(10, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss():
        return layer(x).square().sum()

    loss().backward()
    with torch.no_grad():
        factor += 1e-6
        above = loss()
        factor -= 2e-6
        below = loss()
    assert factor.grad == pytest.approx(float(above - below) / 2e-6, rel=1e-6)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", [torch.nn.RReLU(0.1, 0.9), torch.nn.Dropout(0.5)], ids=["rrelu", "dropout"])
def test_a_random_activation_is_drawn_once(activation, gated, recomputed):
    """The outputs are linear in the second map: its gradient has the noise of the forward pass, or is wrong."""
    layer = layer_with(activation.train(), gated=gated).double()
    x = torch.randn(10, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    y = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
    weight = layer.experts.weight_out
    y.sum().backward()
    bias = layer.experts.bias_out
    found = (weight.grad * weight).sum() + (bias.grad * bias).sum()
    assert found.item() == pytest.approx(y.sum().item(), rel=1e-12)


class _Unhashable:
    __hash__ = None

    def __call__(self, x):
        return F.silu(x)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    "activation",
    [torch.nn.SiLU(inplace=True), lambda x: x.mul_(x.sigmoid()), _Unhashable()],
    ids=["in place", "function in place", "unhashable"],
)
def test_an_activation_may_work_in_place_and_need_not_be_hashable(activation, gated, backend):
    results = []
    for one in (activation, F.silu):
        layer = layer_with(one, backend, gated=gated)
        x = torch.randn(10, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, 1e-5, "a result or gradient")
