"""Triton's GEMMs in its interpreter against float64, in values and gradients; and layers over them."""

import pytest
import torch
import triton_on_cpu
from compare import assert_close

import fmoe
from fmoe.experts.ffn import ACTIVATIONS as POINTWISE
from fmoe.experts.ffn import GATED_ACTIVATIONS
from fmoe.kernels import reference
from fmoe.kernels.cuda import ffn, gemm, selfcheck, triton_gemm
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing

LIMITS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
DTYPES = tuple(LIMITS)
ACTIVATIONS = POINTWISE | GATED_ACTIVATIONS


@pytest.fixture(autouse=True)
def triton(on, monkeypatch):
    triton_on_cpu.prepare(monkeypatch)


class Case:
    """Tokens, a plan and experts of a seed: no tokens, one, experts without rows, all dropped, odd widths."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)

        def pick(*options):
            return options[int(torch.randint(len(options), (), generator=generator))]

        self.dtype = DTYPES[seed % 3]
        self.activation = list(ACTIVATIONS)[seed % 5]
        self.gated = pick(True, False) or self.activation in GATED_ACTIVATIONS
        bias = pick(True, False)
        tokens = pick(0, 1, 9, 24)
        self.experts = pick(1, 3, 6)
        top_k = min(self.experts, pick(1, 2, 3))
        width = pick(8, 16, 21)
        hidden = pick(1, 16, 19)
        used = pick(1, self.experts)  # of some experts nobody wants anything
        expert_TK = torch.rand(tokens, self.experts, generator=generator).argsort(1)[:, :top_k].clamp(max=used - 1)
        expert_TK[torch.rand(tokens, top_k, generator=generator) < pick(0.0, 0.3, 1.0)] = -1
        self.plan = DispatchPlan.from_routing(Routing(expert_TK, expert_TK.float()), self.experts)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(self.dtype)

        height = 2 * hidden if self.gated else hidden
        self.inputs = [normal(tokens, width), normal(self.experts, height, width)]
        self.inputs += [normal(self.experts, height) if bias else None, normal(self.experts, width, hidden)]
        self.inputs += [normal(self.experts, width) if bias else None]
        self.weight = torch.rand(tokens, top_k, generator=generator) + 0.1
        self.grad = normal(tokens, width)

    def results(self, run, dtype):
        leaves = [None if t is None else t.to(dtype, copy=True).requires_grad_() for t in self.inputs]
        weight = self.weight.to(torch.float64 if dtype == torch.float64 else torch.float32, copy=True)
        out = run(*leaves, weight.requires_grad_())
        out.backward(self.grad.to(dtype))
        names = ("x", "w_in", "b_in", "w_out", "b_out")
        found = {name: leaf.grad for name, leaf in zip(names, leaves, strict=True) if leaf is not None}
        return {"out": out.detach(), "weight": weight.grad, **found}

    def fused(self, *given, gemm="triton"):
        *inputs, weight = given
        activation = ACTIVATIONS[self.activation]
        return ffn.expert_ffn(*inputs, None, activation, self.gated, **self.plan.fused_arguments(weight), gemm=gemm)

    def plain(self, x, w_in, b_in, w_out, b_out, weight):
        counts = self.plan.counts
        rows = reference.permute(x, self.plan.perm_N, self.plan.inverse_TK, sum(counts))
        call = (counts, ACTIVATIONS[self.activation], self.gated)
        out = reference.expert_ffn(rows, w_in, b_in, w_out, b_out, *call)
        return reference.combine(out, weight, self.plan.inverse_TK)


@pytest.mark.by_default(*range(6))
@pytest.mark.parametrize("seed", range(48))
def test_values_and_gradients(seed):
    case = Case(seed)
    found = case.results(case.fused, case.dtype)
    expected = case.results(case.plain, torch.float64)
    for name, value in expected.items():
        assert_close(found[name], value, LIMITS[case.dtype], name)


class Experts:
    """Rows of two experts out of four, and what is asked of `TritonGemms` alone."""

    def __init__(self, dtype=torch.float32):
        self.counts = [0, 19, 0, 3]
        self.end = torch.tensor(self.counts).cumsum(0).int()
        self.expert = torch.repeat_interleave(torch.arange(4), torch.tensor(self.counts))
        self.generator = torch.Generator().manual_seed(0)
        self.dtype = dtype

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.dtype)


def test_what_lies_past_the_last_expert_is_left_alone():
    """The dropped tail of a plan: not read, not written."""
    of = Experts()
    x = of.normal(22 + 9, 8)
    w_in = of.normal(4, 24, 8)
    w_out = of.normal(4, 8, 12)
    x[22:] = float("nan")
    gemms = triton_gemm.TritonGemms(of.end, 31)
    hidden, active = gemms.up(x, None, 1, w_in, None, 3, True)
    out = gemms.down(active, w_out, None)
    assert all(
        t[:22].isfinite().all() and t[22:].isnan().all() for t in (hidden, active, out)
    )  # memory is NaN at first
    assert gemms.weights(x, hidden).isfinite().all()
    assert_close(
        gemms.up_backward(hidden, w_in)[:22], torch.einsum("mp,mpd->md", hidden[:22], w_in[of.expert]), 1e-5, "x"
    )


@pytest.mark.by_default("torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_weights_are_added_to_a_sum(dtype):
    of = Experts(dtype)
    left = of.normal(22, 18)
    right = of.normal(9, 20)
    order = torch.randperm(27, generator=of.generator)[:22]
    total = torch.randn(4, 18, 20, generator=of.generator)
    expected = total.double()
    for expert in range(4):
        own = of.expert == expert
        expected[expert] += left[own].double().T @ right[order // 3][own].double()
    gemms = triton_gemm.TritonGemms(of.end, 22)
    assert gemms.weights(left, right, order, 3, gathered="right", total=total) is total
    assert_close(total, expected, 1e-5, "sum")


@pytest.mark.slow
def test_every_configuration_is_a_right_one(monkeypatch):
    """Tiles of other shapes give the same, whatever the sizes."""
    of = Experts()
    x = of.normal(22, 40)
    w_in = of.normal(4, 50, 40)
    expected = torch.einsum("md,mpd->mp", x.double(), w_in[of.expert].double())
    for config in ((64, 16, 32, 4, 2, 1), (16, 64, 16, 4, 3, 8), (32, 32, 64, 8, 2, 3)):
        tuned = {"up": triton_gemm.Config(*config)}
        hidden, _active = triton_gemm.TritonGemms(of.end, 22, tuned).up(x, None, 1, w_in, None, 2, False)
        assert_close(hidden, expected, 1e-5, str(config))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_and_frozen_weights(dtype):
    case = next(c for c in map(Case, range(400)) if c.dtype == dtype and c.gated and 5 < sum(c.plan.counts) < 12)
    plain = case.results(case.fused, dtype)
    sums = {}

    def accumulating(x, w_in, b_in, w_out, b_out, weight):
        for name, w in (("w_in", w_in), ("w_out", w_out)):
            w.main_grad = torch.ones(w.shape)
            w.grad_added_to_main_grad = False
            sums[name] = w
        call = (None, ACTIVATIONS[case.activation], True)
        options = {**case.plan.fused_arguments(weight), "gemm": "triton", "into_main_grad": True}
        return ffn.expert_ffn(x, w_in, b_in, w_out, b_out, *call, **options)

    found = case.results(accumulating, dtype)
    for name, w in sums.items():
        assert w.grad_added_to_main_grad
        assert_close(w.main_grad - 1, plain[name], 1e-5 if dtype == torch.float32 else 1e-2, name)
    assert all(torch.equal(found[name], plain[name]) for name in ("out", "x", "weight"))
    for t in case.inputs[1:]:
        if t is not None:
            t.requires_grad_(False)
    x, *others = case.inputs
    leaf = x.clone().requires_grad_()
    case.fused(leaf, *others, case.weight).backward(case.grad)
    assert_close(leaf.grad, plain["x"], 1e-6, "x alone")


def test_rows_that_came_from_elsewhere(on):
    """Counts on the host, as after an exchange."""
    of = Experts()
    given = [of.normal(22, 16), of.normal(4, 24, 16), of.normal(4, 24), of.normal(4, 16, 12), of.normal(4, 16)]
    leaves, doubles = ([t.to(dtype, copy=True).requires_grad_() for t in given] for dtype in (of.dtype, torch.float64))
    call = (of.counts, ACTIVATIONS["gelu_tanh"], True)
    found = ffn.expert_ffn(*leaves, *call, gemm="triton")
    expected = reference.expert_ffn(*doubles, *call)
    assert_close(found, expected, 1e-5, "out")
    found.square().sum().backward()
    expected.square().sum().backward()
    for number, (one, other) in enumerate(zip(leaves, doubles, strict=True)):
        assert_close(one.grad, other.grad, 1e-5, f"gradient {number}")
    assert not on.names() & {"gather", "activate", "activate_backward", "add_bias"}


def test_a_layer(on):
    """As over torch's GEMMs, but for the sums' order; without the passes that are fused."""
    results = {}
    for way in ("loop", "triton"):
        layer = fmoe.FMoE(
            d_model=16,
            num_experts=3,
            d_hidden=12,
            top_k=2,
            gate="sigmoid",
            seed=3,
            backend="cuda",
            expert_options={"gemm": way},
        )
        x = torch.randn(10, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        on.launched.clear()
        y = layer(x)
        y.square().sum().backward()
        results[way] = {"y": y, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    for name, value in results["loop"].items():
        assert_close(results["triton"][name], value, 1e-5, name)
    assert "combine" in on.names() and not on.names() & {"gather", "activate", "activate_backward"}


@pytest.mark.slow
def test_triton_passes_its_self_check_inside_an_operation(monkeypatch):
    """There the first layer that may use it checks it, below autograd."""
    monkeypatch.setattr(gemm, "_checked", {})
    case = Case(0)
    found = case.results(case.fused, case.dtype)
    expected = case.results(case.plain, torch.float64)
    assert gemm._checked == {torch.device("cpu"): None}
    assert_close(found["out"], expected["out"], LIMITS[case.dtype], "out")


def test_what_is_wrong_is_found_in_the_self_check(monkeypatch):
    up = triton_gemm.TritonGemms.up_backward
    monkeypatch.setattr(triton_gemm.TritonGemms, "up_backward", lambda *a: 1.2 * up(*a))
    wrong = selfcheck.failure(torch.device("cpu"), gemm="triton")
    assert wrong.startswith("the gradient of tokens in torch.float32 has ")
