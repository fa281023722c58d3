"""The adapters of TransformerEngine and SonicMoE, over stand-ins with their signatures that compute in torch: what is
given to them, in which layout, and what gradients come back. The real ones are tested in tests/gpu."""

import enum
import functools
import json
import sys
from types import ModuleType

import pytest
import torch
from compare import assert_all_close, assert_close
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fmoe
from fmoe.errors import UserError
from fmoe.experts import external
from fmoe.experts.ffn import FFNExperts
from fmoe.kernels.cuda import tuning
from fmoe.kernels.cuda.tuning import TuningCache
from fmoe.kernels.ffn import expert_ffn
from fmoe.kernels.rows import DispatchPlan, combine, permute
from fmoe.routing import Routing

WIDTH = 512
HIDDEN = 64
EXPERTS = 4


class GroupedLinear(nn.Module):
    """As ``transformer_engine.pytorch.GroupedLinear`` is called and keeps its parameters."""

    def __init__(self, num_gemms, in_features, out_features, *, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        self.num_gemms = num_gemms
        self.use_bias = bias
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


read = []  # addresses of the weights of each call of SonicMoE, and its number of tokens


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
    concat_layout=False,
):
    """As ``sonicmoe.functional`` has it: w1 [2 I, H, E] with gate and value in turn or, with concat_layout, as two
    halves; w2 [H, I, E]."""
    assert activation_type is ActivationType.SWIGLU and is_inference_mode_enabled != torch.is_grad_enabled()
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in (token_indices, expert_indices))
    assert (b1 is None) == (b2 is None) and w2.shape[-1] == E and x.is_contiguous()
    assert token_indices.diff().ge(0).all() and len(token_indices) == len(expert_indices) == len(router_scores)
    assert w1.permute(2, 0, 1).is_contiguous() and w2.permute(2, 0, 1).is_contiguous()
    assert not len(expert_indices) or 0 <= expert_indices.min() <= expert_indices.max() < E
    read.append((w1.data_ptr(), w2.data_ptr(), len(x)))
    expert = expert_indices.long()
    hidden = torch.einsum("nd,npd->np", x[token_indices.long()], w1.permute(2, 0, 1)[expert])
    hidden = hidden if b1 is None else hidden + b1[expert]
    gate, value = hidden.chunk(2, 1) if concat_layout else (hidden[:, ::2], hidden[:, 1::2])
    active = F.silu(gate) * value
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
    read.clear()
    monkeypatch.setattr(external, "_check_rows", lambda *_: None)
    yield
    external._grouped_linear.cache_clear()


def layer_of(backend, **options):
    defaults = {"d_model": WIDTH, "num_experts": EXPERTS, "d_hidden": HIDDEN, "top_k": 2, "expert": "swiglu", "seed": 3}
    return fmoe.FMoE(**{**defaults, **options}, backend=backend)


def results(run, x, layer=None):
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().mean().mul(100).backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in (layer or run).named_parameters()}}


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("hooked", [False, True], ids=["tokens", "rows"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"expert_options": {"bias": False}, "gate": "switch", "gate_options": {"capacity_factor": 0.5, "jitter": 0.0}},
        {"gate": "expert_choice", "top_k": 1},
    ],
    ids=["plain", "drops", "choice per expert"],
)
@pytest.mark.parametrize("backend", external.BACKENDS)
def test_layers(backend, options, hooked, tokens, installed):
    layer = layer_of(backend, **options)
    plain = layer_of("torch", **options)
    if hooked:  # then rows are gathered and combined around the experts, as around an exchange
        layer.experts.register_forward_hook(lambda *_: None)
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(0))
    assert_all_close(results(layer, x), results(plain, x), 1e-5)


def test_sonic_reads_the_weights_where_they_are(installed):
    """Without a copy in another layout; of rows and of tokens."""
    layer = layer_of("sonicmoe")
    at = (layer.experts.weight_in.data_ptr(), layer.experts.weight_out.data_ptr())
    layer(torch.randn(9, WIDTH))
    layer.experts.register_forward_hook(lambda *_: None)
    layer(torch.randn(9, WIDTH))
    assert read == [(*at, 9), (*at, 18)]


def test_sonic_does_not_wait_for_the_device(installed, monkeypatch):
    experts = layer_of("sonicmoe").experts
    x = torch.zeros(9, WIDTH)
    stacks = [experts.weight_in, experts.bias_in, experts.weight_out, experts.bias_out]
    calls = []
    package = sys.modules["sonicmoe.functional"]
    package.moe_general_routing_inputs = lambda x, *rest, concat_layout: (calls.append(rest[:3]) or x, 0)
    expert_TK = torch.tensor([[0, 2], [-1, 3], [1, -1]]).repeat(3, 1)
    plan = DispatchPlan.from_routing(Routing(expert_TK, expert_TK), EXPERTS)
    arguments = plan.fused_arguments(torch.ones(9, 2))
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "nonzero", "__bool__", "__int__", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"the host reads a tensor: {name}"))
        external.ffn("sonicmoe", x, *stacks, plan.count_E, F.silu, True, **arguments)
        external.ffn("sonicmoe", x, *stacks, [4, 0, 3, 2], F.silu, True)
        with pytest.raises(pytest.fail.Exception):
            external.ffn("te", x, *stacks, plan.count_E, F.silu, True, **arguments)
    (score, token, expert), (_, row, of_row) = calls
    assert token.tolist() == [t for t in range(9) for _ in range(2)] and row.tolist() == list(range(9))
    assert expert.view(3, 6)[0, [0, 1, 3, 4]].tolist() == [0, 2, 3, 1] and score.tolist() == [1, 1, 0, 1, 1, 0] * 3
    assert of_row.tolist() == [0] * 4 + [2] * 3 + [3] * 2


@pytest.mark.parametrize("backend", external.BACKENDS)
def test_second_derivatives_are_refused(backend, installed):
    layer = layer_of(backend)
    x = torch.randn(5, WIDTH, requires_grad=True)
    layer(x).sum().backward()
    with pytest.raises(UserError, match=f"backend='{backend}' has no second derivatives"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


class Auto:
    """``backend="auto"`` on what stands for a GPU: `ours` is torch's, what is measured takes `milliseconds`."""

    def __init__(self):
        self.architecture = 9
        self.is_capturing = False
        self.measured = []
        self.by_us = 0
        self.milliseconds = {"sonicmoe": 1, "cuda": 2, "te": 3}

    def fastest(self, names, run, key):
        for name in names:
            run(name)
        self.measured.append((*names, key.rpartition(", ")[2]))
        return min(names, key=self.milliseconds.__getitem__), True

    def ours(self, rows, *rest, perm_N=None, inverse_TK=None, weight_TK=None, offsets=None):
        self.by_us += 1
        *stacks, counts, activation, gated = rest
        if perm_N is None:
            return expert_ffn(rows, *stacks, counts, activation, gated)
        counts = counts.tolist()
        outputs = expert_ffn(permute(rows, perm_N, inverse_TK, sum(counts)), *stacks, counts, activation, gated)
        return combine(outputs, weight_TK, inverse_TK)

    def operation(self, experts, x):
        """As `FFNExperts.operation`."""
        return functools.partial(external.fastest_ffn, self.ours, candidates(experts, x.dtype), experts.training)


def candidates(experts, dtype):
    sizes = (experts.num_experts, experts.d_model, experts.d_hidden)
    return external.candidates(torch.device("cpu"), {dtype}, sizes, experts.activation, experts.gated)


class OnDevice(torch.Tensor):
    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.fixture
def auto(installed, monkeypatch, tmp_path):
    auto = Auto()
    monkeypatch.setenv("FMOE_CACHE", str(tmp_path))
    monkeypatch.setattr(external, "_tuned", TuningCache("backends.json", lambda name: True))
    monkeypatch.setattr(external, "_checked", {})
    monkeypatch.setattr(external, "_SIXTEEN_BITS", (torch.float32,))
    monkeypatch.setattr(external, "_is_installed", lambda name: True)
    monkeypatch.setattr(external, "_architecture", lambda device: auto.architecture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: auto.is_capturing)
    monkeypatch.setattr(tuning, "fastest", auto.fastest)
    monkeypatch.setattr(FFNExperts, "operation", lambda *args: auto.operation(*args))
    return auto


def test_auto_takes_the_fastest(auto, tmp_path):
    """Measured once per size, in training with gradients."""
    layer = layer_of("torch")
    plain = layer_of("torch")
    x = torch.randn(9, WIDTH)
    plain.experts.operation = lambda *_: None  # torch's
    expected = results(plain, x)
    for _ in range(2):
        layer.zero_grad()
        assert_all_close(results(layer, x), expected, 1e-5)
    assert auto.measured == [("sonicmoe", "te", "cuda", "forward and backward")] and auto.by_us == 1
    with torch.no_grad():  # the forward pass of a checkpoint takes what its recomputation will
        assert_close(layer(x), expected["y"], 1e-5, "a checkpoint")
    assert len(auto.measured) == 1
    with torch.inference_mode():
        assert_close(layer.eval()(x), expected["y"], 1e-5, "evaluation")
    layer.train()
    assert [key for *_, key in auto.measured] == ["forward and backward", "forward"]
    auto.milliseconds["sonicmoe"] = 4
    results(layer, torch.randn(40, WIDTH))
    assert auto.measured[2:] == [("sonicmoe", "te", "cuda", "forward and backward")] and auto.by_us == 4
    assert sorted(json.loads((tmp_path / "backends.json").read_text()).values()) == ["cuda", "sonicmoe", "sonicmoe"]


def test_auto_measures_under_inference_mode(auto):
    with torch.inference_mode():
        assert layer_of("torch")(torch.randn(9, WIDTH)).isfinite().all()
    assert auto.measured == [("sonicmoe", "te", "cuda", "forward and backward")] and not any(external._checked.values())


def saving_products():
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
    kinds = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    return create_selective_checkpoint_contexts(lambda context, op, *args, **options: kinds[op in products])


@pytest.mark.parametrize(
    "options",
    [{"use_reentrant": False}, {"use_reentrant": False, "context_fn": saving_products}],
    ids=["plain", "selective"],
)
def test_auto_measures_inside_a_checkpoint(auto, options):
    """What the measurement computes and saves is none of the checkpoint's."""
    layer = layer_of("torch")
    plain = layer_of("torch")
    plain.experts.operation = lambda *_: None
    x = torch.randn(9, WIDTH)
    assert_all_close(results(lambda x: checkpoint(layer, x, **options), x, layer), results(plain, x), 1e-5)
    assert len(auto.measured) == 1


def test_auto_under_capture_measures_nothing(auto):
    layer = layer_of("torch")
    x = torch.randn(9, WIDTH)
    auto.is_capturing = True
    layer(x)
    assert auto.by_us == 1 and not auto.measured and not external._checked


def test_auto_leaves_out_what_is_wrong(auto, monkeypatch, caplog):
    """And says so once."""
    by_te = external._by_te
    monkeypatch.setattr(external, "_by_te", lambda *args: 1.2 * by_te(*args))
    sys.modules["sonicmoe.functional"].moe_general_routing_inputs = lambda x: x
    layer = layer_of("torch")
    for tokens in (9, 40):
        results(layer, torch.randn(tokens, WIDTH))
    assert not auto.measured and auto.by_us == 2
    first, second = (record.getMessage() for record in caplog.records)
    assert "leaves out sonicmoe" in first and "sonic-moe 0.1.2" in first
    assert "leaves out te" in second and "the output has a relative error of 2.0e-01" in second


@pytest.mark.parametrize(
    ("architecture", "options", "names"),
    [
        (9, {}, ("sonicmoe", "te")),
        (10, {}, ("te",)),
        (8, {}, ("te",)),
        (0, {}, ()),
        (9, {"expert": "geglu"}, ("te",)),
        (9, {"d_model": 72}, ("te",)),
        (9, {"num_experts": 6}, ("te",)),
    ],
    ids=str,
)
def test_what_auto_measures(auto, architecture, options, names):
    auto.architecture = architecture
    experts = layer_of("torch", **options).experts
    assert candidates(experts, torch.float32) == list(names)
    assert candidates(experts, torch.float64) == []


def test_auto_leaves_out_te_where_it_would_wait(auto):
    """For counts that are on the device, as those of a rank with all experts are."""
    experts = layer_of("torch").experts
    rows = torch.randn(6, WIDTH)
    stacks = (experts.weight_in, experts.bias_in, experts.weight_out, experts.bias_out)
    for counts in (torch.tensor([1, 2, 3, 0]), torch.tensor([1, 2, 3, 0]).as_subclass(OnDevice)):
        external._tuned = TuningCache("none.json", lambda name: True)
        external.fastest_ffn(auto.ours, ("sonicmoe", "te"), True, rows, *stacks, counts, F.silu, True)
    assert [names[:-2] for names in auto.measured] == [("sonicmoe", "te"), ("sonicmoe",)]


def test_te_takes_other_experts(installed):
    options = {"expert": "ffn", "d_model": 24, "num_experts": 3, "expert_options": {"activation": torch.tanh}}
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(0))
    assert_all_close(results(layer_of("te", **options), x), results(layer_of("torch", **options), x), 1e-5)


def test_evaluation_tells_that_nothing_is_kept(installed):
    x = torch.randn(5, WIDTH)
    with torch.no_grad():  # the stand-in raises if it is asked to keep anything
        assert_close(layer_of("sonicmoe").eval()(x), layer_of("torch").eval()(x), 1e-5, "output")


@pytest.mark.parametrize("backend", external.BACKENDS)
def test_missing_packages_are_named(backend, monkeypatch):
    module = external._NEEDS[backend][0]
    package = module.partition(".")[0]
    for name in (package, module):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"^backend='{backend}' needs {package} \(.*\): pip install "):
        layer_of(backend)


def test_a_shared_ffn_is_not_computed_by_sonicmoe(installed):
    """It is a single expert, and SonicMoE takes a multiple of four."""
    layer = layer_of("sonicmoe", shared_expert=HIDDEN)
    assert (layer.experts.backend, layer.shared.expert.backend) == ("sonicmoe", "auto")


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"expert": "geglu"}, "'sonicmoe' .* swiglu"),
        ({"d_model": 72}, "d_model=72, d_hidden=64"),
        ({"d_hidden": 72}, "d_model=512, d_hidden=72"),
        ({"num_experts": 6}, "4 experts per rank, got 6"),
        ({"expert_options": {"dropout": 0.1}}, r"dropout=0\.1 .*'sonicmoe'"),
        ({"expert": nn.Identity}, "'sonicmoe' .* ffn, swiglu and geglu"),
    ],
    ids=str,
)
def test_experts_that_sonic_does_not_support(installed, options, pattern):
    with pytest.raises(UserError, match=pattern):
        layer_of("sonicmoe", **options)


def test_an_older_sonic_is_refused(installed):
    sys.modules["sonicmoe.functional"].moe_general_routing_inputs = lambda x: x
    with pytest.raises(UserError, match=r"backend='sonicmoe' needs sonic-moe 0\.1\.2"):
        layer_of("sonicmoe")


def test_rows_must_be_on_a_gpu():
    with pytest.raises(UserError, match=r"backend='te' .* torch\.float32 on cpu"):
        external.ffn("te", torch.zeros(2, 8), None, None, None, None, [2], F.silu)
