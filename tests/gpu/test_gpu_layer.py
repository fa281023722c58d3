"""The cuda backend on a GPU: values, gradients, the same bits in every run, streams, graphs, no wait for the host."""

import functools

import pytest
import torch
from compare import assert_close
from gpu_layers import assert_like_float64, layer_of, results, straight, tokens
from torch.utils.checkpoint import checkpoint

from fmoe.errors import UserError
from fmoe.experts import FFNExperts
from fmoe.kernels import backends

OPTIONS = [
    {},
    {"gate": "switch", "top_k": 1, "gate_options": {"capacity_factor": 0.5, "jitter": 0.0}},
    {"gate": "gshard", "gate_options": {"random_routing": False}},
    {"gate": "sigmoid", "gate_options": {"expert_groups": 4, "kept_groups": 2, "routed_scale": 2.5}},
    {"expert": "swiglu", "top_k": 8, "expert_options": {"bias": False}},
    {"expert": "geglu", "d_hidden": 99},
    {"expert_options": {"activation": "relu", "gemm": "loop"}, "granularity": 2},
    {"expert_options": {"activation": "gelu_tanh", "gemm": "grouped"}, "num_experts": 300, "top_k": 4},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())) or "default")
def test_values_and_gradients(options, dtype):
    # The router runs in float32 on tokens and weights that float64 holds exactly: a choice differs at ties alone.
    assert_like_float64(layer_of(dtype=dtype, **options), options, tokens(dtype=dtype))


@pytest.mark.parametrize("method", [None, functools.partial(torch.nn.init.normal_, mean=0.0, std=0.02)])
def test_initial_weights_are_those_of_the_cpu(method, monkeypatch):
    """Those that the GPU draws for a layer on the CPU too."""

    def drawn(device):
        with torch.device(device):
            return FFNExperts(3, 1000, 3000, gated=True, init_method=method, output_init_method=method).state_dict()

    found = drawn("cuda")
    copied = drawn("cpu")
    monkeypatch.setattr(backends, "current_gpu", lambda: None)
    expected = drawn("cpu")
    assert all(torch.equal(copied[name], value) for name, value in expected.items())
    assert all(torch.equal(found[name].cpu(), value) for name, value in expected.items())


@pytest.mark.parametrize("count", [0, 1, 7, 4099])
def test_token_counts(count):
    assert_like_float64(layer_of(dtype=torch.float32), {}, tokens(count, dtype=torch.float32))


@pytest.mark.parametrize("width", [120, 130, 4096])
def test_widths(width):
    options = {"d_model": width, "d_hidden": 256}
    assert_like_float64(layer_of(**options), options, tokens(600, width))


def test_rows_and_counts_of_the_host():
    """Somebody looks on: rows are gathered, computed by counts on the host, combined."""
    options = {"gate": "switch", "top_k": 2, "gate_options": {"jitter": 0.0, "capacity_factor": 0.8}}
    layer = layer_of(dtype=torch.float32, **options)
    seen = []
    layer.experts.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    assert_like_float64(layer, options, tokens(dtype=torch.float32))
    assert seen and seen[0][0] < 1024


def test_autocast():
    def run(layer, x):
        with torch.autocast("cuda", torch.bfloat16):
            return layer(x)

    layer = layer_of(dtype=torch.float32)
    found = results(layer, tokens(dtype=torch.float32), run)
    expected = results(layer, tokens(dtype=torch.float32))
    for name, value in expected.items():
        assert_close(found[name], value, 2e-2, name)


@pytest.mark.parametrize("options", [{}, {"gate": "switch", "gate_options": {"jitter": 0.0}, "top_k": 2}], ids=str)
def test_twenty_runs_have_the_same_bits(options):
    layer = layer_of(num_experts=64, **options)
    x = tokens(4096)
    first = results(layer, x)
    for _ in range(19):
        torch.empty(1 << 24, device="cuda").fill_(float("nan"))  # what is read without having been written shows
        again = results(layer, x)
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_recomputation_has_the_same_bits():
    layer = layer_of()
    x = tokens()
    plain = results(layer, x)
    again = results(layer, x, lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    assert all(torch.equal(again[name], value) for name, value in plain.items())


def test_streams_are_respected():
    """The input is written late on a stream of its own; the layer runs on that stream."""
    layer = layer_of()
    x = tokens()
    expected = results(layer, x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.full_like(x, float("nan"))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        found = results(layer, late)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    layer = layer_of()
    x = tokens()
    expected = results(layer, x)
    found = results(layer.to("cuda:1"), x.to("cuda:1"))
    assert all(torch.equal(found[name].cpu(), value.cpu()) for name, value in expected.items())


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU of sm_90 or later: before, torch's grouped_mm waits for the host",
)


@needs_hopper
@pytest.mark.parametrize("gate", ["naive", "sigmoid", "gshard"])
def test_nothing_waits_for_the_host(gate):
    layer = layer_of(gate=gate, expert_options={"gemm": "grouped"})
    x = tokens()
    results(layer, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_hopper
@pytest.mark.parametrize("options", [{}, {"expert": "swiglu", "top_k": 4, "expert_options": {"bias": False}}], ids=str)
def test_graph_replay(options):
    """Captured once, replayed on other tokens: the same bits as without a graph, and not a byte more of memory."""
    layer = layer_of(**{**options, "expert_options": {**options.get("expert_options", {}), "gemm": "grouped"}})
    static = tokens().requires_grad_()

    def step():
        static.grad = None
        layer.zero_grad(set_to_none=True)
        y = layer(static)
        y.float().square().mean().mul(100).backward()
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    static.grad = None
    layer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        y = step()
    captured = {"y": y, "x": static.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    for seed in (1, 2):
        with torch.no_grad():
            static.copy_(tokens(seed=seed))
        before = torch.cuda.memory_allocated()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        found = {name: value.detach().clone() for name, value in captured.items()}
        twin = layer_of(**{**options, "expert_options": {**options.get("expert_options", {}), "gemm": "grouped"}})
        twin.load_state_dict(layer.state_dict())
        leaf = tokens(seed=seed).requires_grad_()
        out = twin(leaf)
        out.float().square().mean().mul(100).backward()
        expected = {"y": out, "x": leaf.grad, **{name: p.grad for name, p in twin.named_parameters()}}
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("mode", ["aot_eager", "inductor"])
def test_compiled_without_graph_breaks(mode):
    layer = layer_of()
    x = tokens()
    plain = results(layer, x, straight)
    torch._dynamo.reset()
    found = results(layer, x, torch.compile(straight, backend=mode, fullgraph=True))
    for name, value in plain.items():
        assert_close(found[name], value, 2e-2, name)


def test_compiled_layer():
    layer = layer_of()
    x = tokens()
    plain = results(layer, x)
    torch._dynamo.reset()
    compiled = torch.compile(layer)
    found = results(layer, x, lambda _, x: compiled(x))
    for name, value in plain.items():
        assert_close(found[name], value, 2e-2, name)


def test_what_is_not_for_the_kernels():
    with pytest.raises(UserError, match=r"backend='cuda' needs rows .* rows are torch\.float64"):
        layer_of(dtype=torch.float64)(tokens(dtype=torch.float64))
    assert_like_float64(layer_of("torch", torch.float32), {}, tokens(dtype=torch.float32))
