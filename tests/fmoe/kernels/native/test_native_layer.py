"""Layers on the native backend against the same layers on torch's."""

import copy

import pytest
import torch
from compare import assert_close, relative_error
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe.errors import UserError
from fmoe.kernels import backends
from fmoe.kernels.native import loader as native
from fmoe.kernels.native import ops


@pytest.fixture(autouse=True)
def loaded():
    if not native.load():
        pytest.skip(native.why())


@pytest.fixture
def calls(monkeypatch):
    """The permutations that the native operation was called with; None where it got rows."""
    seen = []
    native_ffn = ops.expert_ffn

    def counted(*arguments, **options):
        seen.append(options.get("perm_N"))
        return native_ffn(*arguments, **options)

    monkeypatch.setattr(ops, "expert_ffn", counted)
    return seen


def layer_of(backend, **options):
    defaults = {"d_model": 24, "num_experts": 6, "d_hidden": 20, "top_k": 2, "gate": "naive", "seed": 3}
    return fmoe.FMoE(**{**defaults, **options}, backend=backend)


def results(layer, x, run=None):
    x = x.clone().requires_grad_()
    y = layer(x) if run is None else run(layer, x)
    y.float().square().mean().backward()
    return {"y": y, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_same(layer_options, x, limit=1e-5, run=None, change=lambda layer: layer):
    expected, found = (results(change(layer_of(b, **layer_options)), x, run) for b in ("torch", "native"))
    for name, value in expected.items():
        assert_close(found[name], value, limit, name)


X = torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": "switch", "top_k": 1, "gate_options": {"capacity_factor": 0.5, "jitter": 0.0}},
        {"gate": "sigmoid"},
        {"gate": "expert_choice"},
        {"gate": "naive", "expert": "swiglu", "shared_expert": 16},
        {"expert": "geglu", "expert_options": {"bias": False}},
        {"expert_options": {"activation": "relu"}, "top_k": 2, "granularity": 2},
        {"gate": "naive", "top_k": 6},
    ],
    ids=lambda o: "-".join(map(str, o.values())) or "default",
)
def test_layers(options, calls):
    assert_same(options, X)
    assert sum(perm_N is not None for perm_N in calls) == 1


@pytest.fixture(params=[True, False], ids=["float GEMMs", "bf16 GEMMs"])
def wide(request, monkeypatch):
    """Both paths of bf16, whichever this processor takes."""
    monkeypatch.setattr(ops, "_is_wide", request.param)


def assert_as_exact_as_torch(run=None, change=lambda layer: layer):
    """In bf16: off by no more than twice what the torch path is off itself, from the same weights in float64."""
    x = change(X)
    exact = results(change(layer_of("torch")).double(), x.double())
    plain, found = (results(change(layer_of(backend)), x, run) for backend in ("torch", "native"))
    for name, value in exact.items():
        assert_close(found[name], value, max(2 * relative_error(plain[name], value), 2.0**-8), name)


def test_autocast(calls, wide):
    def run(layer, x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    assert_as_exact_as_torch(run)
    assert calls


def test_bfloat16(calls, wide):
    assert_as_exact_as_torch(change=lambda layer: layer.bfloat16())
    assert calls


def test_recomputation_is_bit_for_bit():
    layer = layer_of("native")
    plain = results(layer, X)
    layer.zero_grad()
    again = results(layer, X, lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    assert all(torch.equal(again[name], value) for name, value in plain.items() if value is not None)


def test_padding_and_copies(calls):
    mask = torch.rand(3, 16, generator=torch.Generator().manual_seed(1)) < 0.7
    assert_same({}, X, run=lambda layer, x: copy.deepcopy(layer).train()(x, mask) + 0 * layer(x))
    assert calls


def test_a_hook_sees_the_rows(calls):
    """Whoever watches the experts gets them called as they always are."""
    layer = layer_of("native")
    rows = []
    layer.experts.register_forward_hook(lambda module, inputs, out: rows.append((inputs[0], out)))
    found = results(layer, X)
    assert rows[0][0].shape == rows[0][1].shape and rows[0][0].dim() == 2
    assert calls == [None]
    expected = results(layer_of("torch"), X)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-5, name)


def test_a_subclass_that_computes_otherwise_is_asked(calls):
    class Doubled(fmoe.FMoE):
        def expert_fn(self, inp, counts):
            return 2 * super().expert_fn(inp, counts)

    options = {"d_model": 24, "num_experts": 6, "d_hidden": 20, "top_k": 2, "seed": 3}
    assert_close(Doubled(**options)(X), 2 * fmoe.FMoE(**options)(X), 1e-6, "y")
    assert [perm_N is None for perm_N in calls] == [True, False]


def test_dropout_of_hidden_units_goes_the_torch_way(calls):
    layer = fmoe.FMoE(d_model=24, num_experts=4, d_hidden=16, seed=3, expert_options={"dropout": 0.5})
    layer(X)
    assert not calls
    layer.eval()(X)
    assert calls


def test_what_is_kept_for_the_backward_pass():
    """T * K * P pre-activations and the integers of the plan, beside the input and the weights."""
    tokens = 512
    width = 64
    hidden = 96
    top_k = 2
    layer = fmoe.FMoE(d_model=width, num_experts=4, d_hidden=hidden, top_k=top_k, gate="naive", expert="swiglu", seed=0)
    x = torch.randn(tokens, width, requires_grad=True)
    known = {p.untyped_storage().data_ptr() for p in [x, *layer.parameters()]}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.numel() >= tokens * top_k:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    floats = tokens * top_k * 2 * hidden * 4
    integers = tokens * top_k * 8
    gate_and_losses = 8 * tokens * 4 * 4
    assert floats <= sum(kept.values()) <= floats + 4 * integers + gate_and_losses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "metal"}, "backend='metal' is not known; valid names: auto, native, cuda, torch"),
        ({"expert": torch.nn.Identity, "backend": "native"}, "backend='native' supports ffn, swiglu and geglu"),
        ({"expert_options": {"dropout": 0.1}, "backend": "native"}, "dropout=0.1"),
        ({"expert_options": {"activation": torch.tanh}, "backend": "native"}, "backend='native' .*activation="),
    ],
    ids=["unknown", "modules", "dropout", "activation"],
)
def test_what_cannot_be_is_one_line(options, message):
    with pytest.raises(UserError, match=message):
        fmoe.FMoE(d_model=8, num_experts=2, **options)


def test_native_without_a_backend_is_one_line(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: False)
    monkeypatch.setattr(native, "why", lambda: "no C++ compiler")
    with pytest.raises(UserError, match="backend='native' is unavailable: no C"):
        layer_of("native")
    monkeypatch.setattr(backends, "native_is_loaded", False)
    layer_of("auto")(X)


def test_native_of_another_dtype_is_one_line():
    with pytest.raises(UserError, match="float64"):
        layer_of("native").double()(X.double())
    with torch.autocast("cpu", torch.float16), pytest.raises(UserError, match=r"weights are torch\.float16"):
        layer_of("native")(X)
    layer_of("auto").double()(X.double())


def test_meta_device_builds_nothing(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: pytest.fail("built for the meta device"))
    with torch.device("meta"):
        layer = fmoe.FMoE(d_model=8, num_experts=2, seed=0)
    assert all(parameter.is_meta for parameter in layer.parameters())


def penalty(layer, x):
    """A gradient penalty, and a Hessian-vector product."""
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    first.square().sum().backward()
    found = {"first": first, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    layer.zero_grad()
    vector = torch.ones_like(x)
    found["hvp"] = torch.autograd.functional.hvp(lambda x: layer(x).square().sum(), x.detach(), vector)[1]
    return found


@pytest.mark.parametrize("options", [{}, {"expert": "swiglu", "shared_expert": 16}, {"gate": "sigmoid"}], ids=str)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_second_derivatives(backend, options):
    exact = penalty(layer_of("torch", **options).double(), X.double())
    found = penalty(layer_of(backend, **options), X)
    for name, value in exact.items():
        assert_close(found[name], value, 1e-5, name)


def test_torch_func_is_refused():
    """As the torch path refuses it, instead of no gradient."""
    for backend in ("native", "torch"):
        layer = layer_of(backend)
        with pytest.raises(RuntimeError, match=r"autograd\.Function with functorch transforms"):
            torch.func.grad(lambda x, layer=layer: layer(x).sum())(X)


@pytest.mark.parametrize("learns", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_forward_mode_is_refused(backend, learns):
    layer = layer_of(backend)
    with torch.set_grad_enabled(learns), forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="jvp"):
            layer.experts(forward_ad.make_dual(X[0], X[0]), [4, 0, 2, 5, 1, 4])
        with pytest.raises(NotImplementedError, match="jvp"):
            layer(forward_ad.make_dual(X, X))
