"""The adapters of TransformerEngine and SonicMoE, over stand-ins with their signatures that compute in torch: what is
given to them, in which layout, and what gradients come back. The real ones are tested in tests/gpu."""

import enum
import sys
from types import ModuleType

import pytest
import torch
from compare import assert_close
from torch import nn
from torch.nn import functional as F

import fmoe
from fmoe.errors import UserError
from fmoe.experts import external

WIDTH, HIDDEN, EXPERTS = 512, 64, 4


class GroupedLinear(nn.Module):
    """As ``transformer_engine.pytorch.GroupedLinear`` is called and keeps its parameters."""

    def __init__(self, num_gemms, in_features, out_features, *, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        options = {"dtype": params_dtype, "device": device}
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(out_features, in_features, **options)))
            if bias:
                self.register_parameter(f"bias{i}", nn.Parameter(torch.empty(out_features, **options)))

    def forward(self, inp, m_splits, is_first_microbatch=None):
        assert len(m_splits) == self.num_gemms and sum(m_splits) == len(inp)
        parts = zip(range(self.num_gemms), inp.split(m_splits), strict=True)
        bias = [getattr(self, f"bias{i}") if self.use_bias else None for i in range(self.num_gemms)]
        return torch.cat([F.linear(part, getattr(self, f"weight{i}"), bias[i]) for i, part in parts])


class ActivationType(enum.Enum):
    SWIGLU = "swiglu"


def moe_general_routing_inputs(
    x,
    router_scores,
    token_indices,
    expert_indices,
    w1,
    b1,
    w2,
    b2,
    E,
    stream_id,
    activation_type,
    is_inference_mode_enabled=False,
):
    """As ``sonicmoe.functional`` has it: w1 [2 I, H, E] with gate and value in turn, w2 [H, I, E]."""
    assert activation_type is ActivationType.SWIGLU and is_inference_mode_enabled != torch.is_grad_enabled()
    assert token_indices.diff().ge(0).all() and len(token_indices) == len(expert_indices) == len(router_scores)
    assert w1.permute(2, 0, 1).is_contiguous() and w2.permute(2, 0, 1).is_contiguous() and w2.shape[-1] == E
    expert = expert_indices.long()
    hidden = torch.einsum("nd,npd->np", x[token_indices.long()], w1.permute(2, 0, 1)[expert])
    hidden = hidden if b1 is None else hidden + b1[expert]
    active = F.silu(hidden[:, ::2]) * hidden[:, 1::2]
    out = torch.einsum("nh,ndh->nd", active, w2.permute(2, 0, 1)[expert])
    out = (out if b2 is None else out + b2[expert]) * router_scores.unsqueeze(1)
    return torch.zeros_like(x).index_add(0, token_indices.long(), out.to(x.dtype)), expert.bincount(minlength=E)


@pytest.fixture
def installed(monkeypatch):
    def module(name, **members):
        made = ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    module("transformer_engine")
    module("transformer_engine.pytorch", GroupedLinear=GroupedLinear)
    module("sonicmoe")
    module("sonicmoe.functional", moe_general_routing_inputs=moe_general_routing_inputs)
    module("sonicmoe.enums", ActivationType=ActivationType)
    external._grouped_linear.cache_clear()
    monkeypatch.setattr(external, "_check_rows", lambda *_: None)
    yield
    external._grouped_linear.cache_clear()


def layer_of(backend, **options):
    defaults = {"d_model": WIDTH, "num_experts": EXPERTS, "d_hidden": HIDDEN, "top_k": 2, "expert": "swiglu", "seed": 3}
    return fmoe.FMoE(**{**defaults, **options}, backend=backend)


def results(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.square().mean().mul(100).backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("hooked", [False, True], ids=["tokens", "rows"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"expert_options": {"bias": False}, "gate": "switch", "gate_options": {"capacity_factor": 0.5, "jitter": 0.0}},
    ],
    ids=["plain", "drops"],
)
@pytest.mark.parametrize("backend", external.BACKENDS)
def test_layers(backend, options, hooked, tokens, installed):
    layer, plain = layer_of(backend, **options), layer_of("torch", **options)
    if hooked:  # then rows are gathered and combined around the experts, as around an exchange
        layer.experts.register_forward_hook(lambda *_: None)
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(0))
    found, expected = results(layer, x), results(plain, x)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-5, name)


def test_te_takes_other_experts(installed):
    options = {"expert": "ffn", "d_model": 24, "num_experts": 3, "expert_options": {"activation": torch.tanh}}
    layer, plain = layer_of("te", **options), layer_of("torch", **options)
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(0))
    found, expected = results(layer, x), results(plain, x)
    for name, value in expected.items():
        assert_close(found[name], value, 1e-5, name)


def test_evaluation_tells_that_nothing_is_kept(installed):
    layer = layer_of("sonicmoe").eval()
    with torch.no_grad():
        layer(torch.randn(5, WIDTH))


@pytest.mark.parametrize(
    ("backend", "package"), [("te", "transformer_engine"), ("sonicmoe", "sonicmoe")], ids=["te", "sonicmoe"]
)
def test_missing_packages_are_named(backend, package, monkeypatch):
    for name in (package, *external._NEEDS[backend][:1]):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"^backend='{backend}' needs {package} \(.*\): pip install "):
        layer_of(backend)


def test_what_cannot_be(installed, monkeypatch):
    for options, message in (
        ({"expert": "geglu"}, "backend='sonicmoe' supports only swiglu"),
        ({"d_model": 72}, "d_model=72, d_hidden=64"),
        ({"d_hidden": 72}, "d_model=512, d_hidden=72"),
        ({"num_experts": 6}, "needs a multiple of 4 experts per rank, got 6"),
        ({"expert_options": {"dropout": 0.1}}, r"backend='sonicmoe' has no dropout of hidden units \(dropout=0\.1\)"),
        ({"expert": nn.Identity}, "backend='sonicmoe' supports ffn, swiglu and geglu"),
    ):
        with pytest.raises(UserError, match=message):
            layer_of("sonicmoe", **options)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"backend='te' needs .* rows are torch\.float32 on cpu"):
        external.ffn("te", torch.zeros(2, 8), None, None, None, None, [2], F.silu)
