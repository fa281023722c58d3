"""Variants of GEMMs on a GPU: Triton's GEMMs, what is chosen, main_grad; and backends of other packages."""

import json
from importlib.util import find_spec

import pytest
import torch
from compare import assert_close
from gpu_layers import LIMITS, assert_like_float64, layer_of, results, tokens

import fmoe
from fmoe.experts import external
from fmoe.kernels.cuda import gemm, selfcheck, triton_gemm
from fmoe.kernels.cuda.tuning import TuningCache

needs_triton = pytest.mark.skipif(triton_gemm.why() is not None, reason=str(triton_gemm.why()))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [
    {},
    {"expert": "swiglu", "top_k": 8, "expert_options": {"bias": False}},
    {"expert": "geglu", "d_hidden": 99, "gate": "switch", "top_k": 2, "gate_options": {"jitter": 0.0}},
    {"expert_options": {"activation": "relu"}, "num_experts": 300, "top_k": 4},
    {"expert_options": {"activation": "gelu_tanh"}, "d_model": 130},
    {"gate": "switch", "top_k": 1, "gate_options": {"capacity_factor": 0.3, "jitter": 0.0}, "expert": "swiglu"},
]


def by(variant, options):
    return {**options, "expert_options": {**options.get("expert_options", {}), "gemm": variant}}


@needs_triton
def test_self_check(device):
    assert selfcheck.failure(device, gemm="triton") is None


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())) or "default")
def test_triton_against_float64(options, dtype):
    options = by("triton", options)
    width = options.get("d_model", 128)
    assert_like_float64(layer_of(dtype=dtype, **options), options, tokens(width=width, dtype=dtype))


@needs_triton
@pytest.mark.parametrize("count", [0, 1, 7, 4099])
def test_triton_token_counts(count):
    options = by("triton", {"expert": "swiglu"})
    assert_like_float64(layer_of(dtype=torch.bfloat16, **options), options, tokens(count))


@needs_triton
def test_triton_has_the_same_bits_in_twenty_runs():
    layer = layer_of(num_experts=64, **by("triton", {"expert": "swiglu"}))
    x = tokens(4096)
    first = results(layer, x)
    for _ in range(19):
        torch.empty(1 << 24, device="cuda").fill_(float("nan"))
        again = results(layer, x)
        assert all(torch.equal(again[name], value) for name, value in first.items())


@needs_triton
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_triton_on_a_gpu_that_is_not_the_current_one():
    layer = layer_of(**by("triton", {"expert": "swiglu"}))
    x = tokens()
    expected = results(layer, x)
    for name, value in results(layer.to("cuda:1"), x.to("cuda:1")).items():
        assert_close(value.cpu(), expected[name].cpu(), 2e-2, name)


@needs_triton
def test_triton_does_not_wait_for_the_host():
    layer = layer_of(**by("triton", {"expert": "swiglu"}))
    x = tokens()
    results(layer, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_triton
def test_triton_in_a_graph():
    """Replayed on other tokens, with other counts: the bits of a run outside of it."""
    layer = layer_of(**by("triton", {"expert": "swiglu", "top_k": 4}))
    static = tokens()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                layer(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(static)
        for seed in (1, 2):
            static.copy_(tokens(seed=seed))
            graph.replay()
            assert torch.equal(y, layer(tokens(seed=seed)))


@needs_triton
@pytest.mark.parametrize("mode", ["aot_eager", "inductor"])
def test_triton_compiled(mode):
    layer = layer_of(**by("triton", {"expert": "swiglu"}))
    x = tokens()
    plain = results(layer, x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=mode, fullgraph=True)
    for name, value in results(layer, x, lambda _, x: compiled(x)).items():
        assert_close(value, plain[name], 2e-2, name)


def test_the_choice_is_measured_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FMOE_CACHE", str(tmp_path))
    monkeypatch.setattr(gemm, "_tuned", TuningCache("gemms.json", lambda variant: variant in gemm.VARIANTS[1:]))
    layer = layer_of(expert="swiglu")
    x = tokens(4096)
    results(layer, x)
    kept = json.loads((tmp_path / "gemms.json").read_text())
    assert {key.rpartition(", ")[2] for key in kept} == {"forward", "backward"}
    assert set(kept.values()) <= set(gemm.VARIANTS[1:])
    monkeypatch.setattr(gemm.tuning, "fastest", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(gemm, "_tuned", TuningCache("gemms.json", lambda variant: variant in gemm.VARIANTS[1:]))
    results(layer, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["grouped", "loop", pytest.param("triton", marks=needs_triton), "auto"])
def test_gradients_are_added_to_main_grad(variant, dtype):
    """Once, also where variants are timed first."""
    options = by(variant, {"expert": "swiglu"})
    layer = layer_of(dtype=dtype, **options)
    x = tokens(dtype=dtype)
    plain = results(layer, x)
    layer.experts.into_main_grad = True
    stacks = {"experts.weight_in": layer.experts.weight_in, "experts.weight_out": layer.experts.weight_out}
    for weight in stacks.values():
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    results(layer, x)
    for name, weight in stacks.items():
        assert weight.grad_added_to_main_grad
        assert_close(weight.main_grad - 1, plain[name], LIMITS[dtype], name)


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="transformer_engine is not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"expert": "swiglu", "expert_options": {"bias": False}}], ids=str)
def test_te(options, dtype):
    assert_like_float64(layer_of("te", dtype, **options), options, tokens(dtype=dtype))


@pytest.mark.skipif(find_spec("sonicmoe") is None, reason="sonicmoe is not installed")
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="SonicMoE is for sm_90"
)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("gate", ["naive", "switch"])
def test_sonicmoe(gate, bias):
    options = {"d_model": 768, "d_hidden": 256, "expert": "swiglu", "expert_options": {"bias": bias}, "gate": gate}
    options |= {"gate_options": {"capacity_factor": 0.7, "jitter": 0.0}} if gate == "switch" else {}
    assert_like_float64(layer_of("sonicmoe", **options), options, tokens(2048, 768))


@pytest.mark.parametrize("package", ["sonicmoe", "te"])
def test_auto_measures_installed_packages(package, monkeypatch):
    monkeypatch.setattr(external, "_tuned", TuningCache("backends.json", lambda name: False))
    if not external._is_installed(package):
        pytest.skip(f"{package} is not installed")
    options = {"d_model": 768, "d_hidden": 256, "expert": "swiglu", "expert_options": {"bias": False}}
    x = tokens(2048, 768)
    assert_like_float64(layer_of("auto", **options), options, x)
    assert external._wrong(package, x.device) is None


def test_the_layer_compiles_without_graph_breaks():
    """With its losses and statistics."""
    layer = layer_of(gate="sigmoid")
    x = tokens()
    plain = results(layer, x)
    before = fmoe.metrics(layer)[""]
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    for name, value in results(layer, x, lambda _, x: compiled(x)).items():
        assert_close(value, plain[name], 2e-2, name)
    assert fmoe.metrics(layer)[""].tokens == 2 * before.tokens


@needs_triton
@pytest.mark.parametrize("kind", ["up", "down_backward", "multiply", "weights"])
def test_every_configuration_against_the_default_one(kind, monkeypatch):
    """No configuration that is measured is wrong or needs more than this GPU has. Last: it compiles for minutes."""
    layer = layer_of(expert="swiglu", d_model=256, **by("triton", {}))
    x = tokens(4096, 256)
    expected = results(layer, x)
    default = triton_gemm.default_config
    space = triton_gemm.configs(kind, torch.bfloat16, 512, 256, 256, True)
    assert len(space) > 4
    for config in space:
        monkeypatch.setattr(triton_gemm, "default_config", lambda k, *a, c=config: c if k == kind else default(k, *a))
        for name, value in results(layer, x).items():
            assert_close(value, expected[name], 2e-2, f"{config} {name}")
