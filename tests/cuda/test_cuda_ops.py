"""The custom operations, their kernels run on the CPU: against the references, and against torch's rules."""

import functools
from dataclasses import astuple

import pytest
import torch
from compare import assert_close, relative_error
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fmoe import kernels
from fmoe.exchange.hops import AllToAll, Hop
from fmoe.experts.ffn import ACTIVATIONS
from fmoe.kernels import reference
from fmoe.kernels.cuda import ffn, router, routing, rows, tuning
from fmoe.kernels.cuda.instances import DTYPES
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing

pytestmark = pytest.mark.usefixtures("on")

T = 29
D = 16
H = 24
E = 5
K = 3
COUNTS = [7, 0, 11, 1, 0]
SILU = (ACTIVATIONS["silu"], True)  # activation, gated


def draw(*shape, seed=0, requires_grad=True):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(requires_grad)


def stacks(gated=True, bias=True):
    """Return weights and biases of the experts."""
    height = H * (1 + gated)
    biases = (draw(E, height, seed=2), draw(E, D, seed=4)) if bias else (None, None)
    return [draw(E, height, D, seed=1), biases[0], draw(E, D, H, seed=3), biases[1]]


def plan_of(dropped=0.3, experts=E):
    generator = torch.Generator().manual_seed(7)
    expert_TK = torch.rand(T, experts, generator=generator).argsort(1)[:, :K]
    expert_TK[torch.rand(T, K, generator=generator) < dropped] = -1
    return DispatchPlan.from_routing(Routing(expert_TK, expert_TK.float()), experts)


def present(tensors):
    return [t for t in tensors if t is not None]


def assert_like(found, expected, inputs, doubles, limit=1e-5):
    """Values and gradients."""
    grad = draw(*found.shape, seed=99, requires_grad=False)
    gradients = torch.autograd.grad(found, present(inputs), grad, retain_graph=True)
    exact = torch.autograd.grad(expected, present(doubles), grad.double(), retain_graph=True)
    assert_close(found, expected, limit, "value")
    for number, (one, other) in enumerate(zip(gradients, exact, strict=True)):
        assert_close(one, other, limit, f"gradient {number}")


def doubled(*tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("dropped", [0.0, 0.4, 1.0])
def test_rows(dropped, chunks, on):
    plan = plan_of(dropped).arranged(chunks)
    num_rows = int(plan.count_E.sum())
    x = draw(T, D)
    weight = draw(T, K, seed=1)
    x64, weight64 = doubled(x, weight)
    assert_like(plan.permute(x, num_rows), reference.permute(x64, plan.perm_N, plan.inverse_TK, num_rows), [x], [x64])
    moved = draw(num_rows, D, seed=2)
    (moved64,) = doubled(moved)
    expected = reference.combine(moved64, weight64, plan.inverse_TK)
    assert_like(plan.combine(moved, weight), expected, [moved, weight], [moved64, weight64])
    assert on.names() >= {"gather", "combine", "combine_backward"}


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_packed_for_a_wire_in_one_pass(dtype, wire, on, monkeypatch):
    """Converted as they are brought into order, there and back, gradients too: the bits of torch in two passes."""
    order = torch.randperm(11, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(Hop, "launch", lambda hop, rows, back: _Done(rows))
    hop = Hop(None, [], [], (order, order.argsort()), wire)
    rows = draw(11, D, seed=2).detach().to(dtype).requires_grad_()
    grad = draw(11, D, seed=4, requires_grad=False).to(dtype)
    for back, index in ((False, order), (True, order.argsort())):
        got = AllToAll.apply(rows, hop, back)
        assert got.dtype == dtype and torch.equal(got, rows.to(wire).to(dtype)[index])
        (found,) = torch.autograd.grad(got, rows, grad)
        assert found.dtype == dtype and torch.equal(found, grad.to(wire).to(dtype)[index.argsort()])
    gathers = {f"fmoe::gather<{DTYPES[a]}, {DTYPES[b]}>" for a, b in ((dtype, wire), (wire, dtype))}
    assert set(on.launched) == gathers and len(on.launched) == 4


class _Done:
    """A collective that sends all rows to this rank."""

    def __init__(self, rows):
        self.rows = rows

    def wait(self):
        return self.rows


@pytest.mark.cover(2)
@pytest.mark.parametrize("variant", ["grouped", "loop"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("weighted", [False, True], ids=["rows", "rows with weights"])
@pytest.mark.parametrize(("activation", "gated"), [("gelu", False), ("silu", True)])
def test_rows_that_came_from_elsewhere(activation, gated, weighted, bias, variant):
    """Counts on the host, as after an exchange. Weights change no outputs, but gradients are of outputs times them."""
    inputs = [draw(sum(COUNTS), D), *stacks(gated, bias)]
    doubles = doubled(*inputs)
    call = (COUNTS, ACTIVATIONS[activation], gated)
    weight = draw(sum(COUNTS), seed=5) if weighted else None
    out = ffn.expert_ffn(*inputs, *call, weight_TK=weight, gemm=variant)
    expected = reference.expert_ffn(*doubles, *call)
    if not weighted:
        assert_like(out, expected, inputs, doubles)
        return
    assert_close(out, expected, 1e-5, "out")
    (weight64,) = doubled(weight)
    grad = draw(sum(COUNTS), D, seed=6, requires_grad=False)
    found = torch.autograd.grad(out, present([*inputs, weight]), grad)
    exact = torch.autograd.grad(expected * weight64.unsqueeze(1), present([*doubles, weight64]), grad.double())
    for number, (one, other) in enumerate(zip(found, exact, strict=True)):
        assert_close(one, other, 1e-5, str(number))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_bias_is_added_before_the_product_is_rounded(gated):
    """By the loop; torch's grouped_mm takes no bias. Else ReLU's derivative differs where the two nearly cancel."""
    counts = [60, 0, 90, 17, 1]
    given = [draw(sum(counts), 64), draw(E, 96 * (1 + gated), 64, seed=1) / 8, draw(E, 96 * (1 + gated), seed=2)]
    given += [draw(E, 64, 96, seed=3) / 10, draw(E, 64, seed=4)]
    given = [t.detach().bfloat16().requires_grad_() for t in given]
    call = (counts, ACTIVATIONS["relu"], gated)
    grad = draw(sum(counts), 64, seed=5, requires_grad=False).bfloat16()
    results = []
    for run, inputs in (
        (functools.partial(ffn.expert_ffn, gemm="loop"), given),
        (reference.expert_ffn, given),
        (reference.expert_ffn, doubled(*given)),
    ):
        y = run(*inputs, *call)
        results.append([y, *torch.autograd.grad(y, inputs, grad.to(y.dtype))])
    for number, (found, plain, exact) in enumerate(zip(*results, strict=True)):
        assert_close(found, exact, max(2 * relative_error(plain, exact), 2**-8), str(number))


@pytest.mark.cover(1)
@pytest.mark.parametrize("variant", ["grouped", "loop"])
@pytest.mark.parametrize("dropped", [0.0, 0.4, 1.0])
def test_a_plan_of_kept_rows_alone(dropped, variant):
    """The same bits as with rows of dropped assignments, which are most of those of all ranks."""
    plan = plan_of(dropped)
    num_rows = sum(plan.counts)
    inputs = [draw(T, D), *stacks()]
    weight = draw(T, K, seed=5)
    results = []
    saved = []
    for one in (plan, plan.kept_only(plan.counts)):
        y = ffn.expert_ffn(*inputs, plan.count_E, *SILU, **one.fused_arguments(weight), gemm=variant)
        saved.append(y.grad_fn.saved_tensors[-1].shape)
        results.append([y, *torch.autograd.grad(y.square().sum(), [*inputs, weight])])
    assert saved == [(T * K, 2 * H), (num_rows, 2 * H)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("planned", [False, True], ids=["rows", "tokens"])
def test_second_derivatives_of_the_experts(planned):
    plan = plan_of()
    inputs = [draw(T, D), *stacks(), draw(T, K, seed=5)]
    results = []
    for run, tensors in ((ffn, inputs), (reference, doubled(*inputs))):
        x, *parameters, weight = tensors
        if not planned:
            y = run.expert_ffn(x, *parameters, [T - 9, 0, 4, 5, 0], *SILU)
        elif run is ffn:
            y = run.expert_ffn(x, *parameters, None, *SILU, **plan.fused_arguments(weight))
        else:
            rows_MD = run.permute(x, plan.perm_N, plan.inverse_TK, sum(plan.counts))
            y = run.combine(run.expert_ffn(rows_MD, *parameters, plan.counts, *SILU), weight, plan.inverse_TK)
        wanted = tensors if planned else tensors[:-1]
        first = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), wanted)])
    for number, (found, exact) in enumerate(zip(*results, strict=True)):
        assert_close(found, exact, 1e-5, str(number))


def test_second_derivatives_of_rows():
    """`permute` has them; `combine` has none, and raises."""
    plan = plan_of()
    x = draw(T, D)
    weight = draw(T, K)
    num_rows = sum(plan.counts)
    moved = draw(num_rows, D)
    for leaf in (moved, weight):
        y = rows.combine(moved, weight, plan.inverse_TK)
        (first,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            first.square().sum().backward()
    copies_T = (plan.inverse_TK < num_rows).sum(1)
    y = rows.permute(x, plan.perm_N, plan.inverse_TK, num_rows)
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_close(second, 6 * x * copies_T.unsqueeze(1), 1e-6, "second")


@pytest.mark.parametrize("frozen", [[], ["x"], ["w_in"], ["w_out", "b_in"]], ids="-".join)
def test_flops_are_counted_as_those_of_the_torch_path(frozen):
    shapes = {"x": (sum(COUNTS), D), "w_in": (E, H, D), "b_in": (E, H), "w_out": (E, D, H), "b_out": (E, D)}
    totals = []
    for run in (ffn.expert_ffn, kernels.expert_ffn):
        t = [draw(*shape, requires_grad=name not in frozen) for name, shape in shapes.items()]
        with FlopCounterMode(display=False) as counter:
            run(*t, COUNTS, ACTIVATIONS["gelu"]).sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def cases():
    """Each operation with arguments."""
    plan = plan_of(0.0)  # of dropped rows the pre-activations are whatever was in memory
    end = plan.end_E
    kept = plan.num_kept
    x = draw(T, D)
    weight = draw(T, K, seed=1)
    num_rows = int(plan.count_E.sum())
    moved = draw(num_rows, D, seed=6)
    tokens = (plan.perm_N, plan.inverse_TK, end, kept, None)
    yield ffn._expert_ffn, (x, weight, *stacks(), *tokens, 3, True, "grouped", False)
    ends = torch.tensor([4, 4, 9, 9, 9]).int()
    counts = [4, 0, 5, 0, 0]
    yield ffn._expert_ffn, (draw(9, D), None, *stacks(), None, None, ends, None, counts, 3, True, "loop", False)
    yield rows._permute, (x, plan.perm_N, plan.inverse_TK, num_rows)
    yield rows._combine, (moved, plan.inverse_TK, weight)
    yield rows._combine, (moved, plan.inverse_TK, None)
    yield rows.gather, (moved.detach(), torch.arange(num_rows).flip(0), torch.bfloat16)
    yield rows.place, (torch.randint(-1, E, (T, K), generator=torch.Generator().manual_seed(0)), E)
    yield routing._route, (draw(T, 40), draw(40, requires_grad=False), None, K, True, False, True, 2.5, 4, 2, 2)
    yield rows.drop_over_capacity, (torch.randint(-1, E, (T, K)), None, E, 8, 1, T, 0.5)


@pytest.mark.parametrize("number", range(9))
def test_torch_takes_the_operations(number):
    """Schemas, fake kernels, derivatives, and all of it under AOT autograd with dynamic shapes."""
    operation, arguments = list(cases())[number]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if operation is routing._route:  # the last adds up all outputs, integers too; test_cuda_layer.py compiles it
        checks = checks[:3]
    torch.library.opcheck(operation, arguments, test_utils=checks)


def test_torch_takes_the_router():
    """Schemas and fake kernels; `_Route` has the derivative, and test_cuda_layer.py compiles it."""
    x, weight = (draw(n, D, seed=n, requires_grad=False) for n in (T, 40))
    rule = astuple(routing.Rule(by_logits=True))
    checks = ("test_schema", "test_faketensor")
    for factor, jitter in ((0.0, 0.0), (0.5, 0.1)):
        given = (x, weight, None, K, *rule, 7, 1, T, factor, jitter, 3, 0)
        torch.library.opcheck(router._router, given, test_utils=checks)
        expert, _, weights, balance, z, stats, _, *inner, jittered = router._router(*given)
        tokens = jittered if jitter else x
        given = (weights, balance, z, x if jitter else None, tokens, weight, None, expert, stats, *inner)
        options = (True, 1.0, 7, 1, T, jitter, 3, 0, [True, not jitter])
        torch.library.opcheck(router._router_backward, (*given, *options), test_utils=checks)


def in_inference_mode(check):
    with torch.inference_mode():
        return check()


def on_meta(check):
    with torch.device("meta"):
        return check()


def with_fake_tensors(check):
    with FakeTensorMode():
        return check()


def under_autocast(check):
    with torch.autocast("cpu", torch.bfloat16):
        return check()


def in_backward(check):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            found.append(check())
            return 2 * grad

    found = []
    Double.apply(torch.ones(1, requires_grad=True)).backward()
    return found[0]


def in_an_operation(check):
    """Below autograd, where the first measurement of GEMMs takes place."""
    with torch._C._AutoDispatchBelowAutograd():
        return check()


SETTINGS = (in_inference_mode, on_meta, with_fake_tensors, under_autocast, in_backward, in_an_operation)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.__name__)
def test_the_self_check_does_not_depend_on_settings_of_the_caller(setting):
    """A failure would turn the kernels off for the whole process."""
    assert setting(lambda: tuning.failure(torch.device("cpu"))) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["grouped", "loop"])
def test_gradients_are_added_to_main_grad(variant, dtype):
    """As Megatron wants them; what has no main_grad gets its gradient as ever."""
    plan = plan_of()
    limit = 1e-5 if dtype is torch.float32 else 1e-2

    def run(**options):
        shapes = {"x": (T, D), "w_in": (E, 2 * H, D), "w_out": (E, D, H)}
        t = {n: draw(*s, seed=i).detach().to(dtype).requires_grad_() for i, (n, s) in enumerate(shapes.items())}
        weight = draw(T, K, seed=9)
        if options:
            t["w_in"].main_grad = torch.ones(E, 2 * H, D)
            t["w_in"].grad_added_to_main_grad = False
        call = (None, t["w_out"], None, None, ACTIVATIONS["silu"], True)
        y = ffn.expert_ffn(t["x"], t["w_in"], *call, **plan.fused_arguments(weight), gemm=variant, **options)
        y.backward(draw(T, D, seed=5, requires_grad=False).to(dtype))
        return t

    plain = run()
    found = run(into_main_grad=True)
    assert found["w_in"].grad_added_to_main_grad and found["w_in"].grad is not None
    assert_close(found["w_in"].main_grad - 1, plain["w_in"].grad, limit, "w_in")
    assert all(torch.equal(found[name].grad, plain[name].grad) for name in ("x", "w_out"))
