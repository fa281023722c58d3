"""Experts of GPT-OSS's activation: torch's path and the native one against a plain loop in float64."""

import pytest
import torch
from compare import assert_close, relative_error

from fmoe import kernels
from fmoe.errors import UserError
from fmoe.experts import FFNExperts
from fmoe.kernels.glu import SwiGLUOAI, gate
from fmoe.kernels.native import loader as native
from fmoe.kernels.native import ops
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing

COUNTS = [3, 0, 40, 1]
WIDTH = 21
HIDDEN = 37


def loop(x, w_in, b_in, w_out, b_out):
    """What transformers computes for each expert, from gates and values in two halves."""
    out = []
    begin = 0
    for expert, count in enumerate(COUNTS):
        rows = x[begin : begin + count] @ w_in[expert].t() + b_in[expert]
        gates = rows[:, :HIDDEN]
        values = rows[:, HIDDEN:]
        gates = torch.clamp(gates, max=7.0)
        values = torch.clamp(values, -7.0, 7.0)
        out.append((values + 1) * (gates * torch.sigmoid(1.702 * gates)) @ w_out[expert].t() + b_out[expert])
        begin += count
    return torch.cat(out)


def inputs(dtype, scale=1.0):
    g = torch.Generator().manual_seed(0)
    shapes = [(sum(COUNTS), WIDTH), (4, 2 * HIDDEN, WIDTH), (4, 2 * HIDDEN), (4, WIDTH, HIDDEN), (4, WIDTH)]
    # Both clamps are reached: pre-activations have a standard deviation of about 4.6 * scale.
    return [(torch.randn(shape, generator=g, dtype=torch.float64) * scale).to(dtype) for shape in shapes]


def results(compute, values):
    leaves = [value.clone().requires_grad_() for value in values]
    out = compute(*leaves)
    out.backward(torch.ones_like(out) * torch.linspace(-1, 1, WIDTH, dtype=torch.float64).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def check(compute, dtype, limit):
    values = inputs(dtype)
    expected = results(loop, [value.double() for value in values])
    rounded = results(loop, values) if dtype != torch.float64 else expected
    names = ("out", "x", "w_in", "b_in", "w_out", "b_out")
    for name, got, wanted, plain in zip(names, results(compute, values), expected, rounded, strict=True):
        assert got.dtype == dtype
        assert_close(got, wanted, max(limit, 2 * relative_error(plain, wanted)), name)


def by_torch(*leaves):
    return kernels.expert_ffn(*leaves, COUNTS, SwiGLUOAI(), True)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_torch(dtype, limit):
    check(by_torch, dtype, limit)


def test_second_derivatives():
    values = [value.requires_grad_() for value in inputs(torch.float64, 0.3)]
    first = [torch.autograd.grad(run(*values).square().sum(), values, create_graph=True) for run in (by_torch, loop)]
    for ours, theirs in zip(*first, strict=True):
        assert_close(ours, theirs, 1e-13, "first")
    second = [torch.autograd.grad(sum(g.square().sum() for g in found), values) for found in first]
    for ours, theirs in zip(*second, strict=True):
        assert_close(ours, theirs, 1e-13, "second")


@pytest.mark.parametrize("fused", [False, True], ids=["rows", "tokens"])
@pytest.mark.parametrize("own_gemms", [False, True], ids=["library GEMMs", "own GEMMs"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16 by float GEMMs", "bfloat16 by bf16 GEMMs"])
def test_native(precision, own_gemms, fused, monkeypatch):
    if not native.load():
        pytest.skip(native.why())
    monkeypatch.setattr(ops, "_is_wide", "float GEMMs" in precision)
    dtype = getattr(torch, precision.split()[0])
    # Token i has row i alone, with a weight of one.
    expert_T1 = torch.repeat_interleave(torch.arange(4), torch.tensor(COUNTS)).unsqueeze(1)
    plan = DispatchPlan.from_routing(Routing(expert_T1, torch.ones(expert_T1.shape)), 4)
    options = plan.fused_arguments(torch.ones(expert_T1.shape)) if fused else {}

    def compute(*leaves):
        return ops.expert_ffn(*leaves, torch.tensor(COUNTS), SwiGLUOAI(), True, **options)

    before = torch.ops.fmoe_native.few_rows(1 << 30 if own_gemms else 0)
    try:
        check(compute, dtype, 1e-6 if dtype == torch.float32 else 1e-2)
    finally:
        torch.ops.fmoe_native.few_rows(before)


def test_far_from_zero():
    """NaN stays, and infinities are clamped, in both paths."""
    nan = torch.nan
    inf = torch.inf
    hidden = torch.tensor([[nan, 1.0], [inf, 2.0], [100.0, -100.0], [7.0, inf], [-100.0, -inf], [1.0, nan], [0.5, 7.0]])
    expected = gate(SwiGLUOAI(), hidden)
    assert expected.isnan().flatten().tolist() == [True, False, False, False, False, True, False]
    assert expected[1] == expected[3] * 3 / 8 and (expected[2] < -40) and expected[4].abs() < 1e-30
    # Experts of one hidden unit, whose biases are the pre-activations.
    weights = (torch.zeros(7, 2, 1), hidden, torch.ones(7, 1, 1), None)
    call = (torch.zeros(7, 1), *weights, torch.ones(7, dtype=torch.int64))
    for run in (kernels.expert_ffn, *([ops.expert_ffn] if native.load() else [])):
        found = run(*call[:-1], call[-1] if run is ops.expert_ffn else [1] * 7, SwiGLUOAI(), True)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_experts_by_name():
    with pytest.raises(UserError, match="activation=swiglu_oai needs gated=True"):
        FFNExperts(2, 4, 8, activation="swiglu_oai")
    outputs = []
    for backend in ("torch", "auto"):
        experts = FFNExperts(2, 4, 8, activation="swiglu_oai", gated=True, backend=backend)
        outputs.append(experts(torch.ones(5, 4), torch.tensor([2, 3])))
    assert_close(outputs[0], outputs[1], 1e-6, "out")
    assert experts.kind == "FFNExperts(swiglu_oai, gated=True, bias=True)"


def test_derivatives_at_the_bounds_are_those_of_the_inside():
    """Bfloat16 rounds many values to a bound. There, torch.clamp has derivatives that depend on torch's version."""
    gates = torch.tensor([-8.0, 7.0, 7.5], dtype=torch.float64, requires_grad=True)
    values = torch.tensor([-7.0, 7.0, 7.5], dtype=torch.float64, requires_grad=True)
    slopes = SwiGLUOAI().slopes(gates.detach(), values.detach())
    torch.testing.assert_close(torch.autograd.grad(SwiGLUOAI()(gates).sum(), gates)[0], slopes[0])
    torch.testing.assert_close(torch.autograd.grad(SwiGLUOAI().second(values).sum(), values)[0], slopes[1])
    assert slopes[1].tolist() == [1, 1, 0]
