"""The native operations against a float64 reference: values and gradients, over random shapes."""

import random

import pytest
import torch
from compare import assert_close, relative_error
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fmoe
from fmoe.experts.ffn import ACTIVATIONS
from fmoe.kernels import reference
from fmoe.kernels.native import loader as native
from fmoe.kernels.native import ops
from fmoe.kernels.rows import DispatchPlan, combine_unsaved
from fmoe.routing import Routing

FLOAT32_LIMIT = 1e-5
BFLOAT16_EPS = 2.0**-8


@pytest.fixture(autouse=True)
def loaded():
    if not native.load():
        pytest.skip(native.why())


@pytest.fixture(params=[1, 2], ids="threads{}".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=[0, 1 << 30], ids=["library GEMMs", "own GEMMs"])
def gemms(request):
    before = torch.ops.fmoe_native.few_rows(request.param)
    yield
    torch.ops.fmoe_native.few_rows(before)


@pytest.fixture(params=[True, False], ids=["float GEMMs", "bf16 GEMMs"])
def wide(request, monkeypatch):
    """Both paths of bf16, whichever this processor takes."""
    monkeypatch.setattr(ops, "_is_wide", request.param)


@pytest.fixture(params=["float32", "bfloat16 by float GEMMs", "bfloat16 by bf16 GEMMs"])
def dtype(request, monkeypatch):
    """The dtype of a case, and the path that bf16 takes."""
    monkeypatch.setattr(ops, "_is_wide", "float GEMMs" in request.param)
    return getattr(torch, request.param.split()[0])


class Case:
    """Tokens, decisions and weights, drawn from a seed."""

    def __init__(self, seed, dtype=torch.float32, counts=None, sizes=None):
        draw = random.Random(seed)
        g = torch.Generator().manual_seed(seed)
        tokens = draw.choice([0, 1, 7, 40, 150, 400])
        experts = draw.choice([1, 3, 8, 17])
        top_k = experts if seed % 7 == 0 else draw.randint(1, min(4, experts))
        width = draw.randint(5, 70)
        hidden = draw.randint(5, 90)
        if sizes is not None:
            tokens, experts, top_k, width, hidden = sizes
        self.gated = bool(seed % 2)
        bias = seed // 2 % 2
        self.activation = list(ACTIVATIONS.values())[seed % 4]
        expert_TK = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k]
        if counts == "one":  # a hot expert, that all threads have to compute
            expert_TK[:, 0] = 0
            expert_TK[:, 1:] = -1
        expert_TK[torch.rand(expert_TK.shape, generator=g) < draw.choice([0, 0, 0.3, 1.0])] = -1
        self.plan = DispatchPlan.from_routing(Routing(expert_TK, torch.rand(expert_TK.shape)), experts)

        def normal(*shape, scale=1.0):
            return (torch.randn(*shape, generator=g) * scale).to(dtype)

        height = hidden * (1 + self.gated)
        self.inputs = {
            "x": normal(tokens, width),
            "w_in": normal(experts, height, width, scale=width**-0.5),
            "b_in": normal(experts, height) if bias else None,
            "w_out": normal(experts, width, hidden, scale=hidden**-0.5),
            "b_out": normal(experts, width) if bias else None,
            "weight": torch.rand(expert_TK.shape, generator=g),
        }
        self.grad = normal(tokens, width)

    def run(self, compute, dtype=None, **options):
        """Output and gradients of what ``compute`` makes of the inputs."""
        t = {
            name: None if v is None else v.to(dtype or v.dtype).clone().requires_grad_()
            for name, v in self.inputs.items()
        }
        y = compute(self, **t, **options)
        y.backward(self.grad.to(y.dtype))
        grads = {name: v.grad if v.grad is not None else torch.zeros_like(v) for name, v in t.items() if v is not None}
        return {"y": y.detach(), **grads}


def by_reference(case, x, w_in, b_in, w_out, b_out, weight):
    rows = reference.permute(x, case.plan.perm_N, case.plan.inverse_TK, sum(case.plan.counts))
    out = reference.expert_ffn(rows, w_in, b_in, w_out, b_out, case.plan.counts, case.activation, case.gated)
    return reference.combine(out, weight, case.plan.inverse_TK)


def fused(case, x, w_in, b_in, w_out, b_out, weight, **options):
    sizes = (case.plan.count_E, case.activation, case.gated)
    return ops.expert_ffn(x, w_in, b_in, w_out, b_out, *sizes, **case.plan.fused_arguments(weight), **options)


def by_rows(case, x, w_in, b_in, w_out, b_out, weight):
    rows = case.plan.permute(x, sum(case.plan.counts))
    out = ops.expert_ffn(rows, w_in, b_in, w_out, b_out, case.plan.counts, case.activation, case.gated)
    return case.plan.combine(out, weight)


def by_weighed_rows(case, x, w_in, b_in, w_out, b_out, weight):
    """As where tokens and experts are on different ranks: weights go with the rows, and only their gradients back."""
    num_rows = sum(case.plan.counts)
    call = (case.plan.counts, case.activation, case.gated)
    rows = case.plan.permute(x, num_rows)
    weight_M = case.plan.weights(weight, num_rows)
    out = ops.expert_ffn(rows, w_in, b_in, w_out, b_out, *call, weight_TK=weight_M)
    return combine_unsaved(out, weight, case.plan)


def check(case, compute):
    """In 16 bits the limit is a multiple of what the plain operations at that precision are off themselves."""
    expected = case.run(by_reference, torch.float64)
    found = case.run(compute)
    plain = case.run(by_reference) if case.grad.dtype == torch.bfloat16 else None
    for name, value in expected.items():
        limit = FLOAT32_LIMIT
        if plain is not None:
            limit = max(2 * relative_error(plain[name], value), BFLOAT16_EPS)
        # One number or two may be what is left of terms that cancel.
        assert_close(found[name], value, limit * (10 if value.numel() < 4 else 1), name)


@pytest.mark.cover(1)
@pytest.mark.parametrize("compute", [fused, by_rows, by_weighed_rows])
@pytest.mark.parametrize("part", range(10))
def test_float32_over_random_shapes(part, compute, threads, gemms):
    for seed in range(part * 20, part * 20 + 20):
        check(Case(seed), compute)


@pytest.mark.cover(1)
@pytest.mark.parametrize("part", range(10))
def test_bfloat16_over_random_shapes(part, wide, gemms):
    for seed in range(part * 20, part * 20 + 20):
        check(Case(seed, torch.bfloat16), fused)


@pytest.mark.cover(2)
@pytest.mark.parametrize("sizes", [(96, 3, 2, 512, 1024), (70, 2, 2, 301, 1100), (500, 3, 2, 130, 609)], ids=str)
def test_matrices_of_many_blocks(sizes, dtype, threads):
    """So large that our GEMMs take them in blocks, add parts up, and write past the caches; gated and not."""
    before = torch.ops.fmoe_native.few_rows(1 << 30)
    try:
        for seed in (2, 3):
            check(Case(seed, dtype, sizes=sizes), fused)
    finally:
        torch.ops.fmoe_native.few_rows(before)


@pytest.mark.cover(2)
@pytest.mark.parametrize("counts", [None, "one"], ids=["all experts", "a hot expert"])
@pytest.mark.parametrize("bias_scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("kind", range(8), ids=lambda kind: f"{list(ACTIVATIONS)[kind % 4]}-{'gated' * (kind // 4)}")
def test_the_derivative_is_taken_where_the_plain_operations_take_it(kind, bias_scale, counts, wide):
    """A bias may nearly cancel the product: rounded twice, the sum has another sign, and ReLU another slope."""
    for seed in (2, 3):
        case = Case(seed, torch.bfloat16, counts, sizes=(60, 4, 2, 64, 160))
        case.activation = list(ACTIVATIONS.values())[kind % 4]
        case.gated = bool(kind // 4)
        height = 160 * (1 + case.gated)
        g = torch.Generator().manual_seed(seed)
        case.inputs["w_in"] = (torch.randn(4, height, 64, generator=g) / 8).bfloat16()
        case.inputs["b_in"] = (torch.randn(4, height, generator=g) * bias_scale).bfloat16()
        check(case, fused)


@pytest.mark.cover(1)
@pytest.mark.parametrize("compute", [fused, by_rows, by_weighed_rows])
def test_second_derivatives(compute, dtype):
    """A gradient penalty on every input."""

    def penalty(run, case, given):
        t = {n: None if v is None else v.to(given).clone().requires_grad_() for n, v in case.inputs.items()}
        y = run(case, **t)
        wanted = [v for v in t.values() if v is not None]
        first = torch.autograd.grad(y, wanted, case.grad.to(y.dtype), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
        return [*first, *second]

    for seed in (1, 2, 7, 9, 14, 19):
        case = Case(seed, dtype, sizes=(40, 5, 2, 24, 20))
        exact = penalty(by_reference, case, torch.float64)
        plain = penalty(by_reference, case, dtype)
        for number, value in enumerate(penalty(compute, case, dtype)):
            limit = max(2 * relative_error(plain[number], exact[number]), 1e-5)
            assert_close(value, exact[number], limit, str(number))


@pytest.mark.cover(1)
@pytest.mark.parametrize("frozen", [[], ["x"], ["w_in"], ["w_out", "b_in"], ["x", "w_in", "b_in"]], ids="-".join)
@pytest.mark.parametrize("seed", [2, 3, 4, 5])  # with a bias and without, gated and not
def test_flops_are_counted_as_those_of_the_torch_path(seed, frozen):
    totals = []
    for run in (ops.expert_ffn, fmoe.kernels.expert_ffn):
        case = Case(seed, sizes=(50, 4, 2, 24, 20))
        t = {n: None if v is None else v.clone().requires_grad_(n not in frozen) for n, v in case.inputs.items()}
        rows = case.plan.permute(t["x"], sum(case.plan.counts))
        stacks = [t[name] for name in ("w_in", "b_in", "w_out", "b_out")]
        with FlopCounterMode(display=False) as counter:
            run(rows, *stacks, case.plan.counts, case.activation, case.gated).sum().backward()
        totals.append(counter.get_total_flops())
    case = Case(seed, sizes=(50, 4, 2, 24, 20))
    with FlopCounterMode(display=False) as counter:
        fused(case, **case.inputs)
    forward = 2 * sum(case.plan.counts) * 24 * 20 * (3 if case.gated else 2)
    assert totals[0] == totals[1] and counter.get_total_flops() == forward


def test_memory_may_stay_on_small_pages(dtype):
    """FMOE_HUGE_PAGES=0 changes no number."""
    case = Case(3, dtype, sizes=(96, 4, 2, 512, 1024))
    expected = case.run(fused)
    before = torch.ops.fmoe_native.huge_pages(False)
    try:
        found = case.run(fused)
    finally:
        torch.ops.fmoe_native.huge_pages(before)
    assert before and all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_hot_expert_is_computed_by_all_threads(dtype):
    torch.set_num_threads(2)
    try:
        for seed in range(0, 40, 2):
            check(Case(seed, dtype, counts="one"), fused)
    finally:
        torch.set_num_threads(1)


def test_long_experts_pass_in_parts(dtype):
    """More rows than a part, weights' gradients summed over parts."""
    case = Case(4, dtype, sizes=(2500, 2, 1, 16, 24))
    expert_TK = (torch.arange(2500) >= 2400).long().view(-1, 1)
    case.plan = DispatchPlan.from_routing(Routing(expert_TK, case.inputs["weight"]), 2)
    check(case, fused)


def test_gradients_are_added_to_main_grad(dtype, gemms):
    case = next(
        c for c in (Case(seed, dtype) for seed in range(1, 99)) if sum(c.plan.counts) > 0 and c.activation is F.silu
    )
    plain = case.run(fused)
    start = {name: torch.randn(case.inputs[name].shape) for name in ("w_in", "w_out")}
    made = {}

    def accumulating(case, w_in, w_out, **others):
        for name, w in (("w_in", w_in), ("w_out", w_out)):
            w.main_grad = start[name].clone()
            w.grad_added_to_main_grad = False
            made[name] = w
        return fused(case, w_in=w_in, w_out=w_out, into_main_grad=True, **others)

    found = case.run(accumulating)
    for name, w in made.items():
        assert w.grad_added_to_main_grad
        expected = start[name].double() + plain[name].double()
        assert_close(w.main_grad - start[name], expected - start[name], 1e-5 if dtype is torch.float32 else 1e-2, name)
    for name in ("y", "x", "weight"):
        assert torch.equal(found[name], plain[name])


@pytest.mark.parametrize("later", [False, True], ids=["accumulation", "after accumulation"])
def test_hooks_run_for_a_gradient_in_main_grad_which_takes_no_memory(dtype, later):
    """As Megatron-core's data parallel hook runs, which asks for a gradient but does not read it."""
    case = next(c for c in (Case(seed, dtype) for seed in range(1, 99)) if sum(c.plan.counts) > 0)
    seen = {}
    nodes = []

    def accumulating(case, w_in, w_out, **others):
        for name, w in (("w_in", w_in), ("w_out", w_out)):
            w.main_grad = torch.zeros(w.shape)
            w.grad_added_to_main_grad = False

            def hook(*_, name=name, w=w):
                seen[name] = w.grad.untyped_storage().nbytes() // w.itemsize, w.grad.shape == w.shape
                w.grad = None

            if later:
                w.register_post_accumulate_grad_hook(hook)
            else:
                nodes.append(w.expand_as(w).grad_fn.next_functions[0][0])
                nodes[-1].register_hook(hook)
        return fused(case, w_in=w_in, w_out=w_out, into_main_grad=True, **others)

    case.run(accumulating)
    sizes = {name: case.inputs[name].numel() if later else 1 for name in ("w_in", "w_out")}
    assert seen == {name: (size, True) for name, size in sizes.items()}


def test_a_hook_of_a_weight_sees_its_gradient_beside_main_grad(dtype):
    case = next(c for c in (Case(seed, dtype) for seed in range(1, 99)) if sum(c.plan.counts) > 0)
    plain = case.run(fused)

    def hooked(case, w_in, w_out, **others):
        w_in.main_grad = torch.zeros(w_in.shape)
        w_in.grad_added_to_main_grad = False
        w_in.register_hook(lambda gradient: gradient * 2)
        hooked.w_in = w_in
        return fused(case, w_in=w_in, w_out=w_out, into_main_grad=True, **others)

    found = case.run(hooked)
    assert torch.equal(found["w_in"], plain["w_in"] * 2)
    assert not hooked.w_in.grad_added_to_main_grad and not hooked.w_in.main_grad.any()


def test_what_needs_no_gradient_gets_none(dtype):
    cases = (Case(seed, dtype) for seed in range(2, 99, 4))
    case = next(c for c in cases if c.inputs["b_in"] is not None and sum(c.plan.counts) > 9)
    whole = case.run(fused)
    for names in (["x"], ["weight"], ["w_in"], ["b_out"], ["b_in", "w_out"]):
        t = {name: v.clone().requires_grad_(name in names) for name, v in case.inputs.items()}
        fused(case, **t).backward(case.grad)
        for name, v in t.items():
            assert (v.grad is not None) == (name in names)
            if name in names:
                assert_close(v.grad, whole[name], 1e-6, name)


def test_memory_that_was_used_before_is_written_whole(dtype):
    """Large enough for the pool: NaN that lay there shows nowhere."""
    g = torch.Generator().manual_seed(0)
    plan = DispatchPlan.from_routing(Routing(torch.randint(-1, 3, (3000, 2), generator=g), torch.rand(3000, 2)), 5)
    for poison in (False, True):
        t = [
            torch.randn(s, generator=g).to(dtype).requires_grad_()
            for s in ((3000, 128), (5, 256, 128), (5, 128, 256), (3000, 2))
        ]
        y = ops.expert_ffn(t[0], t[1], None, t[2], None, plan.count_E, F.gelu, **plan.fused_arguments(t[3]))
        y.sum().backward()
        for v in (y.detach(), *(v.grad for v in t)):
            assert v.isfinite().all()
            if poison:
                v.fill_(float("nan"))
        if not poison:
            for v in (y.detach(), *(v.grad for v in t)):
                v.fill_(float("nan"))
        del y, t


def test_determinism(dtype):
    case = Case(5, dtype)
    first = case.run(fused)
    for _ in range(20):
        again = case.run(fused)
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_torch_takes_them_as_its_own(gemms):
    """Schema, fake kernels and derivative (torch.library.opcheck), and a graph without a break."""
    case = next(c for c in map(Case, range(99)) if sum(c.plan.counts) > 20 and c.inputs["b_in"] is not None)
    t = {name: v.clone().requires_grad_() for name, v in case.inputs.items()}
    weights = (t["w_in"], t["b_in"], t["w_out"], t["b_out"], 3, case.gated, True)
    routed = (case.plan.perm_N, case.plan.inverse_TK, t["weight"], case.plan.count_E)
    torch.library.opcheck(torch.ops.fmoe_native.expert_ffn.default, (t["x"], *routed, *weights))
    rows = torch.randn(sum(case.plan.counts), t["x"].shape[1], requires_grad=True)
    torch.library.opcheck(
        torch.ops.fmoe_native.expert_ffn.default, (rows, None, None, None, case.plan.count_E, *weights)
    )
    expected = case.run(fused)

    def plain(x, w_in, b_in, w_out, b_out, weight):
        return fused(case, x, w_in, b_in, w_out, b_out, weight)

    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    found = case.run(lambda case, **t: compiled(**t))
    for name, value in expected.items():
        assert_close(found[name], value, 1e-6, name)


@pytest.mark.parametrize(
    "change",
    [
        {"count": torch.tensor([9, -9])},
        {"count": torch.tensor([4, 3])},
        {"count": torch.tensor([3.0, 3.0])},
        {"order": torch.tensor([0, 1, 2, 3, 4, 6])},
        {"order": torch.tensor([0, 1, 2, 3, 4, -1])},
        {"place": torch.tensor([[0, 1], [2, 3], [4, -5]])},
        {"w_out": torch.ones(2, 5, 5)},
        {"w_in": torch.ones(2, 4, 4, dtype=torch.bfloat16)},
        {"b_in": torch.ones(2, 5)},
        {"activation": 7},
        {"weight": torch.ones(3, 2, dtype=torch.float64)},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_cannot_be_is_refused_before_memory_is_touched(change):
    arguments = {
        "x": torch.ones(3, 4),
        "order": torch.arange(6),
        "place": torch.arange(6).view(3, 2),
        "weight": torch.ones(3, 2),
        "count": torch.tensor([3, 3]),
        "w_in": torch.ones(2, 4, 4),
        "b_in": torch.ones(2, 4),
        "w_out": torch.ones(2, 4, 4),
        "b_out": None,
        "activation": 0,
    }
    torch.ops.fmoe_native.expert_ffn(**arguments, gated=False, wide=True)
    with pytest.raises(RuntimeError, match="fmoe"):
        torch.ops.fmoe_native.expert_ffn(**{**arguments, **change}, gated=False, wide=True)
