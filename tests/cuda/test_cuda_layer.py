"""Layers on the cuda backend, its kernels run on the CPU, against the same layers on torch's path in float64."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from emulator import on_cpu
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe.errors import UserError
from fmoe.exchange import hops
from fmoe.kernels import gates as gate_kernels
from fmoe.kernels.cuda import calls, launch, selfcheck, triton_gemm
from fmoe.kernels.cuda import loader as cuda
from fmoe.kernels.rows import DispatchPlan
from fmoe.layout import LocalTokens
from fmoe.routing import RoutingGroups

LIMITS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
X = torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(0))


def layer_of(backend, **options):
    defaults = {"d_model": 24, "num_experts": 6, "d_hidden": 20, "top_k": 2, "gate": "naive", "seed": 3}
    return fmoe.FMoE(**{**defaults, **options}, backend=backend)


def results(layer, x, run=None):
    x = x.clone().requires_grad_()
    y = layer(x) if run is None else run(layer, x)
    y.double().square().mean().mul(100).backward()
    return {"y": y, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_same(options, x=X, dtype=torch.float32, run=None):
    layer = layer_of("cuda", **options).to(dtype)
    plain = layer_of("torch", **options).double()
    plain.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    found = results(layer, x.to(dtype), run)
    expected = results(plain, x.to(dtype).double(), run)
    for name, value in expected.items():
        assert_close(found[name], value, LIMITS[dtype], name)
    return found


def test_the_self_check_before_kernels_are_used(on, monkeypatch):
    assert selfcheck.failure(torch.device("cpu")) is None
    assert {"place", "gather", "activate", "activate_backward", "combine"} <= on.names()
    monkeypatch.setattr(calls, "combine", lambda rows, *_: rows[: X.shape[0] * 15].clone())
    assert selfcheck.failure(torch.device("cpu")).startswith("the output in torch.float32 has a relative error of ")
    monkeypatch.undo()
    place = calls.place
    monkeypatch.setattr(calls, "place", lambda *a: tuple(t.flip(0) for t in place(*a)))
    assert selfcheck.failure(torch.device("cpu")) == "the plan's perm_N differs"


FUSED = {"route", "route_backward", "place", "gather", "combine", "activate", "activate_backward"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": "switch", "top_k": 1, "gate_options": {"capacity_factor": 0.5, "jitter": 0.0}},
        {"gate": "gshard", "gate_options": {"random_routing": False}},
        {"gate": "sigmoid", "expert_options": {"gemm": "loop"}},
        {"gate": "sigmoid", "gate_options": {"expert_groups": 3, "kept_groups": 2, "routed_scale": 2.5}},
        {"gate_options": {"expert_groups": 2, "normalize": False}, "expert": "swiglu", "shared_expert": 16},
        {"expert": "geglu", "expert_options": {"bias": False}},
        {"expert_options": {"activation": "relu"}, "granularity": 2},
        {"top_k": 6, "expert_options": {"activation": "gelu_tanh"}, "sequence_first": True, "group_size": 7},
    ],
    ids=lambda o: "-".join(map(str, o.values())) or "default",
)
def test_layers(options, on):
    assert_same(options)
    assert on.names() >= FUSED


@pytest.mark.parametrize("gate", ["expert_choice", "sinkhorn"])
def test_gates_that_choose_otherwise(gate, on):
    assert_same({"gate": gate}, run=lambda layer, x: layer.eval()(x))
    assert on.names() >= FUSED - {"route", "route_backward"} and "route" not in on.names()


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"expert": "swiglu", "d_hidden": 13}], ids=["grouped", "odd"])
def test_sixteen_bits(options, dtype, on):
    assert_same({**options, "top_k": 3}, dtype=dtype)


def test_autocast(on):
    def run(layer, x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    layer = layer_of("cuda")
    plain = layer_of("torch")
    found = results(layer, X, run)
    expected = results(plain, X)
    for name, value in expected.items():
        assert_close(found[name], value, 2e-2, name)
    assert "fmoe::gather<fmoe::bf16, fmoe::bf16>" in on.launched


@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (2, 24)], ids=str)
def test_few_tokens(shape, on):
    """None, and fewer than there are experts."""
    assert_same({"num_experts": 9}, X.view(-1, 24)[: shape[0]])


def test_padding_and_copies(on):
    mask = torch.rand(3, 16, generator=torch.Generator().manual_seed(1)) < 0.7
    assert_same({}, run=lambda layer, x: copy.deepcopy(layer).train()(x, mask) + 0 * layer(x))
    mask[1] = False
    factor = {"gate": "switch", "gate_options": {"jitter": 0.0, "capacity_factor": 0.7}}
    assert_same(factor, run=lambda layer, x: layer(x, mask))


def test_larger_than_a_tile(on):
    """The plan in several blocks."""
    x = torch.randn(1400, 24, generator=torch.Generator().manual_seed(2))
    assert_same({"top_k": 3, "gate": "gshard", "gate_options": {"random_routing": False}}, x)
    assert on.names() >= {"count_tiles", "count_choices", "queue", "drop_over_capacity"}


def test_recomputation_is_bit_for_bit(on):
    layer = layer_of("cuda")
    plain = results(layer, X)
    layer.zero_grad()
    again = results(layer, X, lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    assert all(torch.equal(again[name], value) for name, value in plain.items())


def test_the_order_of_threads_changes_no_bit(kernels):
    runs = []
    for seed in range(3):
        with on_cpu(kernels, seed):
            runs.append(results(layer_of("cuda", gate="sigmoid"), X))
    assert all(torch.equal(run[name], value) for run in runs[1:] for name, value in runs[0].items())


def test_a_hook_sees_the_rows(on):
    """Rows as with an expert parallel group: gathered, computed from counts on the host, combined."""
    rows = []

    def run(layer, x):
        layer.experts.register_forward_hook(lambda module, inputs, out: rows.append((inputs[0], out)))
        return layer(x)

    assert_same({"gate": "switch", "top_k": 2, "gate_options": {"jitter": 0.0, "capacity_factor": 0.8}}, run=run)
    assert all(inputs.shape == out.shape and inputs.dim() == 2 for inputs, out in rows) and len(rows[0][0]) < 96
    assert on.names() >= {*FUSED, "combine_backward"}


def test_dropout_of_hidden_units_goes_the_torch_way(on):
    layer = fmoe.FMoE(d_model=24, num_experts=4, d_hidden=16, seed=3, expert_options={"dropout": 0.5})
    layer(X.double().float())
    assert "activate" not in on.names()


def test_what_cannot_be(on):
    with pytest.raises(UserError, match=r"backend='cuda' .*activation=.* gelu, gelu_tanh, relu, silu"):
        layer_of("cuda", expert_options={"activation": torch.tanh})
    with pytest.raises(UserError, match=r"dropout=0\.1 needs backend='torch' or 'auto', not 'cuda'"):
        layer_of("cuda", expert_options={"dropout": 0.1})
    with pytest.raises(UserError, match="backend='cuda' supports ffn, swiglu and geglu"):
        fmoe.FMoE(d_model=24, num_experts=4, expert=torch.nn.Identity, backend="cuda")
    with pytest.raises(UserError, match=r"backend='cuda' needs rows .* rows are torch\.float64"):
        layer_of("cuda").double()(X.double())
    with pytest.raises(UserError, match="gemm='cublas' is not one of auto, grouped, loop"):
        layer_of("cuda", expert_options={"gemm": "cublas"})


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(cuda, "_reasons", {})
    with pytest.raises(UserError, match="backend='cuda' is unavailable: there is no CUDA device"):
        layer_of("cuda")


def test_the_device_of_the_tokens_is_the_current_one(on, monkeypatch):
    """In each pass: Triton launches on the current device, and measurements are of its stream."""
    entered = []
    device_of = torch.cuda.device_of

    def noted(tensor):
        entered.append(tensor)
        return device_of(tensor)

    monkeypatch.setattr(torch.cuda, "device_of", noted)
    layer = layer_of("cuda")
    x = torch.randn(5, 24).requires_grad_()
    y = layer(x)
    assert len(entered) == 1 and entered[0].shape == x.shape
    y.sum().backward()
    assert len(entered) == 2


@pytest.mark.parametrize(
    ("setting", "precision"),
    [("none", "ieee"), ("ieee", "ieee"), ("tf32", "tf32"), (True, "tf32"), (False, "ieee")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_multiplies_in_the_precision_of_torch(setting, precision, dtype, monkeypatch):
    """By either of torch's two settings, after the newer of which the older one raises."""
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **options: seen.append(options.get("PRECISION"))

    kernels = SimpleNamespace(schedule=Kernel(), multiply=Kernel())
    monkeypatch.setattr(triton_gemm, "_kernels", lambda: kernels)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        if isinstance(setting, bool):
            matmul.allow_tf32 = setting
        else:
            matmul.fp32_precision = setting
        gemms = triton_gemm.TritonGemms(torch.tensor([3, 5], dtype=torch.int32), 5)
        gemms.down(torch.zeros(5, 16, dtype=dtype), torch.zeros(2, 16, 16, dtype=dtype), None)
    finally:
        matmul.fp32_precision = before
    assert seen[-1] == (precision if dtype == torch.float32 else "ieee")


def test_what_is_kept_for_the_backward_pass(on):
    """SwiGLU in 16 bits: 2 T D bytes of tokens and 4 T K H of pre-activations, and the integers of the plan."""
    tokens = 256
    width = 64
    hidden = 96
    top_k = 2
    layer = layer_of("cuda", d_model=width, d_hidden=hidden, num_experts=4, expert="swiglu").bfloat16()
    router = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in router:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor.dtype, tuple(tensor.shape))
        return tensor

    x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(x)
    half = sum(size for size, dtype, _ in kept.values() if dtype == torch.bfloat16)
    assert half <= 2 * tokens * width + 4 * tokens * top_k * hidden
    # The router's own: its input in float32, logits, scores; and per assignment order, place, expert, weight.
    rest = sum(size for size, dtype, _ in kept.values() if dtype != torch.bfloat16)
    assert rest <= 4 * tokens * width + 12 * tokens * 4 + 64 * tokens * top_k + 4096
    del out


class _Watch(TorchDispatchMode):
    """Notes whatever goes from one device to another."""

    def __init__(self):
        super().__init__()
        self.moves: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)}
        if len(devices) > 1:
            self.moves.append(str(func))
        return out


@pytest.fixture
def copies_to_devices(monkeypatch):
    """Devices of the tensors that are made of numbers of the host. On the meta device no value can be read."""
    made = []
    with torch.device("cpu"):  # whose table of functions that make tensors is filled once, and must not hold the next
        tensor = torch.tensor
        as_tensor = torch.as_tensor
        tensor(0)
    monkeypatch.setattr(torch, "tensor", lambda *a, **k: made.append(k.get("device")) or tensor(*a, **k))
    monkeypatch.setattr(torch, "as_tensor", lambda *a, **k: made.append(k.get("device")) or as_tensor(*a, **k))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # knows no meta device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    return made


@pytest.mark.cover(1)
@pytest.mark.parametrize("gate", ["naive", "switch", "gshard", "sigmoid"])
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_nothing_looks_at_a_value(gate, expert, kernels, copies_to_devices):
    """A step with losses and statistics, as a CUDA graph captures it: the host neither waits nor copies."""
    with on_cpu(kernels) as launcher, torch.device("cpu"):
        layer = layer_of("cuda", gate=gate, expert=expert).to("meta")
        x = X.to("meta").requires_grad_()
        with _Watch() as watch:
            y = layer(x)
            y.sum().backward()
    assert y.shape == X.shape and x.grad.shape == X.shape and all(p.grad is not None for p in layer.parameters())
    assert not watch.moves and not launcher.launched
    assert all(device in (None, "cpu", torch.device("cpu")) for device in copies_to_devices), copies_to_devices


class _Done:
    """An all-to-all of equal parts, done."""

    def __init__(self, group, rows, receive, send):
        assert len(set(receive)) == 1 and receive == send
        self._rows = rows.clone()

    def wait(self):
        return self._rows


def test_nothing_looks_at_a_value_in_a_padded_exchange(kernels, copies_to_devices, monkeypatch):
    """With bounded slots, expert parallel ranks exchange rows of fixed shapes; only the first step copies anything."""
    monkeypatch.setattr(hops, "all_to_all", _Done)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        options = {
            "gate": "switch",
            "exchange": "padded",
            "exchange_options": {"slots": 24},
            "moe_group": dist.group.WORLD,
        }
        with on_cpu(kernels), torch.device("cpu"):
            launch.launchers["none"] = lambda *_: None  # of kernels outside of torch's operations
            layer = layer_of("cuda", expert="swiglu", **options).to("meta")
            layer.exchange._is_prepared = True
            passes = []
            for _ in range(2):
                del copies_to_devices[:]
                x = X.to("meta").requires_grad_()
                with _Watch() as watch:
                    layer(x).sum().backward()
                passes.append(
                    (watch.moves, [d for d in copies_to_devices if d not in (None, "cpu", torch.device("cpu"))])
                )
        assert x.grad.shape == X.shape
        assert passes[1] == ([], []), passes
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["naive", "sigmoid"])
def test_compiled_without_graph_breaks(gate, on):
    """From tokens to outputs; the layer around it breaks the graph where it keeps statistics."""
    layer = layer_of("cuda", gate=gate)

    def run(layer, x):
        x_TD = x.flatten(0, 1)
        tokens = LocalTokens([x_TD], x_TD, RoutingGroups(3, 16), x.shape[:-1])
        routing = gate_kernels.route(layer.gate, tokens)
        plan = DispatchPlan.from_routing(routing, layer.num_experts)
        arguments = plan.fused_arguments(routing.weight_TK)
        operation = layer.experts.operation(tokens.x_TD)
        return layer.experts.fused_forward(operation, tokens.x_TD, plan.count_E, **arguments)

    plain = results(layer, X, run)
    layer.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = results(layer, X, compiled)
    for name, value in plain.items():
        assert_close(found[name], value, 1e-6, name)


def report(layer):
    found = layer.metrics.report()
    return [*found.load, found.entropy, *found.losses.values(), found.tokens]


@pytest.mark.by_default(4)
@pytest.mark.parametrize("options", [{}, {"gate": "sigmoid"}, {"gate": "switch", "top_k": 1}], ids=str)
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_compiled_layer_without_graph_breaks(options, recomputes, on):
    """The same output, gradients (auxiliary losses' too, by the scale of the moment) and statistics, counted once a
    backward pass; one compilation for layers that are alike."""
    twins = [layer_of("cuda", seed=seed, **options) for seed in (3, 4)]
    plain = copy.deepcopy(twins)

    def run(layer, x):
        return checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    try:
        for step in range(3):
            fmoe.set_loss_scale(1.0 + step)
            for one, other in zip(twins, plain, strict=True):
                for layer in (one, other):
                    layer.zero_grad()
                torch.manual_seed(step)
                found = results(one, X, compiled)
                torch.manual_seed(step)
                for name, value in results(other, X, run).items():
                    assert_close(found[name], value, 1e-6, name)
                assert report(one) == pytest.approx(report(other))
    finally:
        fmoe.set_loss_scale(1.0)
    assert twins[0].metrics.report().tokens == 3 * 48
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
def test_what_a_compiled_layer_counts_without_gradients(on):
    """Nothing, as ever."""
    layer = layer_of("cuda")
    with torch.no_grad():
        torch.compile(layer, backend="aot_eager", fullgraph=True)(X)
    assert layer.metrics.report().tokens == 0
