"""FastMoE's documented API (README, doc/parallelism, release 1.1): names, arguments, and the layer's arithmetic."""

import copy
import importlib
import inspect
import io
import warnings

import pytest
import torch
from compare import assert_close
from fastmoe_reference import OneOfStack, SmallExpert, WideExpert, brute_force
from fmoe.transformer import _Expert
from torch import nn

import fmoe
from fmoe import FMoE, FMoELinear, FMoETransformerMLP
from fmoe.gates import GShardGate, NaiveGate, NoisyGate, SwitchGate

T, D, H = 12, 16, 32
LIMIT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", LIMIT, ids=lambda dtype: str(dtype).removeprefix("torch."))


def tokens(dtype=torch.float32, count=T):
    x = torch.randn(count, D, generator=torch.Generator().manual_seed(5)).to(dtype)
    weight = torch.randn(count, D, generator=torch.Generator().manual_seed(6)).to(dtype)
    return x.requires_grad_(), weight


class MyMoE(FMoE):
    """As in FastMoE's tests and examples: experts are set after the constructor."""

    def __init__(self, num_expert, top_k, activation=nn.functional.gelu):
        super().__init__(num_expert=num_expert, d_model=D, gate=NaiveGate, world_size=1, slice_group=None, top_k=top_k)
        self.experts = _Expert(num_expert, D, H, activation)


def check(layer, experts, dtype):
    """Output and every gradient of a layer, whose gate is deterministic, against the loop."""
    layer, limit = layer.to(dtype), LIMIT[dtype]
    x, weight = tokens(dtype)
    index, score = layer.gate(x)
    expected = brute_force(x, index, score.view(index.shape), [copy.deepcopy(e).to(dtype) for e in experts], weight)
    # What the gate adds to the gradients: the vector-Jacobian product of its scores.
    gate = list(layer.gate.parameters())
    by_gate = torch.autograd.grad(score.double(), [x, *gate], expected.grad_score.view(score.shape))
    y = layer(x)
    assert y.dtype == dtype and y.shape == x.shape
    (y * weight).sum().backward()
    assert_close(y, expected.output, limit, "output")
    assert_close(x.grad, expected.grad_input + by_gate[0], 2 * limit, "gradient of the input")
    for parameter, grad in zip(gate, by_gate[1:], strict=True):
        assert_close(parameter.grad, grad, 2 * limit, "gradient of the gate")
    return expected.grad_experts


@DTYPES
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("num_expert", [4, 8])
def test_stacked_experts_set_by_a_subclass(num_expert, top_k, dtype):
    torch.manual_seed(1)
    layer = MyMoE(num_expert, top_k).to(dtype)
    expected = check(layer, [OneOfStack(layer.experts, e) for e in range(num_expert)], dtype)
    for at, (name, parameter) in enumerate(layer.experts.named_parameters()):
        stacked = torch.stack([grads[at] for grads in expected])
        assert_close(parameter.grad, stacked, 2 * LIMIT[dtype], f"gradient of {name}")


@DTYPES
@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize(
    "expert",
    [SmallExpert, WideExpert, [SmallExpert] * 4, [WideExpert, SmallExpert] * 3],
    ids=["class", "wide-class", "list", "list-of-two-kinds"],
)
def test_experts_by_class_and_by_list(expert, top_k, dtype):
    torch.manual_seed(1)
    layer = FMoE(num_expert=5, d_model=D, gate=NaiveGate, expert=expert, top_k=top_k)
    assert layer.num_expert == len(layer.experts) == (len(expert) if isinstance(expert, list) else 5)
    expected = check(layer, list(layer.experts), dtype)
    for module, grads in zip(layer.experts, expected, strict=True):
        for parameter, grad in zip(module.parameters(), grads, strict=True):
            assert_close(parameter.grad, grad, 2 * LIMIT[dtype], "gradient of an expert")


@DTYPES
def test_transformer_mlp(dtype):
    torch.manual_seed(1)
    mlp = FMoETransformerMLP(num_expert=4, d_model=D, d_hidden=H, top_k=2)
    check(mlp, [OneOfStack(expert, 0) for expert in mlp.experts], dtype)
    x, _ = tokens(dtype)
    assert torch.equal(mlp(x.view(3, 4, D)), mlp(x).view(3, 4, D))


@DTYPES
@pytest.mark.parametrize("nest", ["list", "dict"])
def test_nests_of_tensors_with_a_gate_and_experts_of_ones_own(nest, dtype):
    class MyGate(NaiveGate):
        def forward(self, inp, return_all_scores=False):
            return super().forward(inp["x"] if isinstance(inp, dict) else inp[0], return_all_scores)

    class MyExpert(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = FMoELinear(4, D, D)
            self.two = FMoELinear(4, D + 1, D + 2)

        def forward(self, inp, fwd_expert_count):
            if isinstance(inp, dict):
                return {"x": self.one(inp["x"], fwd_expert_count), "y": self.two(inp["y"], fwd_expert_count)}
            return [self.one(inp[0], fwd_expert_count), self.two(inp[1], fwd_expert_count)]

    class Nested(FMoE):
        def __init__(self):
            super().__init__(num_expert=4, d_model=D, gate=MyGate, top_k=2)
            self.experts = MyExpert()

    torch.manual_seed(1)
    layer = Nested().to(dtype)
    x, _ = tokens(dtype)
    y = torch.randn(T, D + 1, generator=torch.Generator().manual_seed(9)).to(dtype)
    out = layer({"x": x, "y": y} if nest == "dict" else [x, y])
    assert type(out) is (dict if nest == "dict" else list)
    index, score = layer.gate([x])
    for got, inp, linear in zip(
        out.values() if nest == "dict" else out, (x, y), (layer.experts.one, layer.experts.two), strict=True
    ):
        w, b = linear.weight.double(), linear.bias.double()
        rows = torch.einsum("tkoi,ti->tko", w[index], inp.double()) + b[index]
        assert_close(got, (score.double().unsqueeze(-1) * rows).sum(1), LIMIT[dtype], "output")


def test_defaults_are_those_of_fastmoe():
    layer = FMoE(d_model=D)
    assert (layer.num_expert, layer.world_size, layer.top_k) == (32, 1, 2)
    assert type(layer.gate) is NaiveGate
    assert layer.gate.gate.bias is not None
    assert (layer.slice_size, layer.slice_rank, layer.slice_group, layer.moe_group) == (1, 0, None, None)
    assert not hasattr(layer, "experts")
    assert FMoE(num_expert=2, d_model=D, gate_bias=False).gate.gate.bias is None
    names = list(inspect.signature(FMoE.__init__).parameters)[1:14]
    assert names == [
        *("num_expert", "d_model", "world_size", "mp_group", "slice_group", "moe_group", "top_k"),
        *("gate", "expert", "gate_hook", "mask", "mask_dict", "gate_bias"),
    ]
    mlp = FMoETransformerMLP(2, D, H, nn.ReLU(), "dp", 0, top_k=1)
    assert isinstance(mlp.experts[0].htoh4, FMoELinear)
    assert mlp.experts[0].htoh4.weight.shape == (1, H, D)
    assert isinstance(mlp.experts[0].activation, nn.ReLU)
    assert {p.dp_comm for p in mlp.experts.parameters()} == {"dp"}
    assert {p.dp_comm for p in mlp.gate.parameters()} == {"gate"}


PATHS = {
    "fmoe": "FMoE FMoELinear FMoETransformerMLP DistributedGroupedDataParallel",
    "fmoe.layers": "FMoE mark_module_parallel_comm _fmoe_general_global_forward",
    "fmoe.linear": "FMoELinear MOELinear",
    "fmoe.transformer": "FMoETransformerMLP _Expert",
    "fmoe.distributed": "DistributedGroupedDataParallel",
    "fmoe.functions": "ensure_comm get_moe_group count_by_gate prepare_forward MOEScatter MOEGather AllGather Slice "
    "_local_scatter _local_gather",
    "fmoe.utils": "get_torch_default_comm get_rank_0_in_comm",
    "fmoe.balance": "metrics reset_balance_profile update_balance_profile",
    "fmoe.gates": "ZeroGate NaiveGate NoisyGate GShardGate SwitchGate DCGate SwipeGate",
    "fmoe.gates.base_gate": "BaseGate",
    "fmoe.gates.naive_gate": "NaiveGate",
    "fmoe.gates.noisy_gate": "NoisyGate",
    "fmoe.gates.gshard_gate": "GShardGate",
    "fmoe.gates.switch_gate": "SwitchGate",
    "fmoe.gates.swipe_gate": "SwipeGate",
    "fmoe.gates.zero_gate": "ZeroGate",
    "fmoe.gates.dc_gate": "DCGate",
    "fmoe.gates.faster_gate": "FasterGate gen_faster_gate",
    "fmoe.gates.utils": "limit_by_capacity",
    "fmoe.megatron": "MegatronMLP fmoefy add_fmoe_args save_checkpoint load_checkpoint DistributedDataParallel "
    "reset_gate_hook get_balance_profile generate_megatron_gate_hook add_balance_log patch_forward_step "
    "patch_model_provider",
    "fmoe.megatron.layers": "MegatronMLP fmoefy",
}


@pytest.mark.parametrize("path", PATHS)
def test_names_are_where_fastmoe_has_them(path):
    module = importlib.import_module(path)
    for name in PATHS[path].split():
        assert hasattr(module, name), f"{path}.{name}"
    parent, _, name = path.rpartition(".")
    assert not parent or getattr(importlib.import_module(parent), name) is module


def test_mp_group_is_an_alias_with_a_warning():
    with pytest.warns(DeprecationWarning, match="slice_group"):
        FMoE(num_expert=2, d_model=D, mp_group=OneRank())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FMoE(num_expert=2, d_model=D, slice_group=OneRank()).slice_size == 1


class OneRank:
    def size(self):
        return 1

    def rank(self):
        return 0


def test_gate_hook_sees_every_decision():
    seen = []
    layer = FMoE(num_expert=4, d_model=D, expert=SmallExpert, gate_hook=lambda *decision: seen.append(decision))
    x, _ = tokens()
    layer(x)
    index, score = layer.gate(x)
    assert torch.equal(seen[0][0], index) and torch.equal(seen[0][1], score) and seen[0][2] is None


def test_masked_tokens_get_what_mask_dict_says():
    mask = torch.tensor([0, 1, 0, 2] * (T // 4))
    fill = {1: torch.zeros(D), 2: torch.full((D,), 3.0)}
    torch.manual_seed(0)
    layer = FMoE(num_expert=4, d_model=D, expert=SmallExpert, mask=mask, mask_dict=fill)
    x, weight = tokens()
    y = layer(x)
    index, score = layer.gate(x)
    expected = brute_force(x, torch.where(mask[:, None] == 0, index, -1), score, list(layer.experts), weight)
    assert_close(y[mask == 0], expected.output[mask == 0], 1e-5, "output")
    assert (y[mask == 1] == 0).all()
    assert torch.allclose(y[mask == 2], torch.tensor(3.0))
    (y * weight)[mask == 1].sum().backward()
    assert all(p.grad.abs().sum() == 0 for p in layer.experts.parameters())


@pytest.mark.parametrize("top_k", [None, 1, 2], ids=str)
def test_switch_with_the_layers_defaults(top_k):
    """FastMoE's layer gave SwitchGate its default of two choices, which the gate refused."""
    torch.manual_seed(0)
    layer = FMoE(num_expert=4, d_model=D, gate=SwitchGate, expert=SmallExpert, top_k=top_k).eval()
    assert layer.top_k == layer.gate.top_k == (top_k or 1)
    x, weight = tokens()
    index, score = layer.gate(x)
    assert_close(layer(x), brute_force(x, index, score, list(layer.experts), weight).output, 1e-5, "output")


@pytest.mark.parametrize("gate", [NaiveGate, NoisyGate, GShardGate, SwitchGate])
def test_users_add_the_loss_themselves_and_it_counts_once(gate):
    gradients = []
    for factor in (0, 1, 2):
        torch.manual_seed(0)
        layer = FMoE(num_expert=4, d_model=D, gate=gate, expert=SmallExpert)
        x, _ = tokens()
        torch.manual_seed(3)
        loss = layer(x).square().mean()
        assert layer.gate.has_loss
        (loss + factor * layer.gate.get_loss()).sum().backward()
        assert not layer.gate.has_loss and layer.gate.get_loss() is None
        gradients.append(torch.cat([p.grad.flatten() for p in layer.gate.parameters()]))
    assert_close(gradients[2] - gradients[1], gradients[1] - gradients[0], 1e-4, "gradient of the loss")
    assert bool((gradients[1] != gradients[0]).any()) is (gate is not NaiveGate)


def test_an_expert_function_of_ones_own():
    class Doubled(FMoE):
        def expert_fn(self, inp, fwd_expert_count):
            return 2 * super().expert_fn(inp, fwd_expert_count)

    torch.manual_seed(0)
    plain, doubled = (kind(num_expert=4, d_model=D, expert=SmallExpert, gate=NaiveGate) for kind in (FMoE, Doubled))
    doubled.load_state_dict(plain.state_dict())
    x, _ = tokens()
    assert torch.allclose(doubled(x), 2 * plain(x))


def test_an_expert_function_of_ones_own_with_dropout():
    called = []

    class Counted(FMoE):
        def expert_fn(self, inp, fwd_expert_count):
            called.append(len(inp))
            return super().expert_fn(inp, fwd_expert_count)

    layer = Counted(num_experts=4, d_model=D, d_hidden=H, expert_options={"dropout": 0.5})
    x, _ = tokens()
    layer(x)
    assert called == [len(x) * layer.top_k]


def test_an_expert_function_of_ones_own_and_shadowed_experts():
    class Doubled(FMoE):
        def expert_fn(self, inp, fwd_expert_count):
            return 2 * super().expert_fn(inp, fwd_expert_count)

    for kind, message in ((Doubled, "shadow is not supported for FMoE, which overrides expert_fn"), (FMoE, None)):
        layer = kind(num_experts=4, d_model=D, d_hidden=H)
        x, _ = tokens()
        call = layer.call(layer.split(x, None, None))
        weights = [layer.experts.shadow(0)]
        if message:
            with pytest.raises(fmoe.UserError, match=message):
                call.rows([x], [len(x)], None, weights)
        else:
            (y,) = call.rows([x], [len(x)], None, weights)
            assert torch.equal(y, layer.experts(x, torch.tensor([len(x), 0, 0, 0])))


def test_a_list_of_modules_set_by_a_subclass():
    layer = FMoE(num_expert=3, d_model=D)
    layer.experts = nn.ModuleList(SmallExpert(D) for _ in range(3))
    x, weight = tokens()
    index, score = layer.gate(x)
    assert_close(layer(x), brute_force(x, index, score, list(layer.experts), weight).output, 1e-5, "output")


def test_marks_and_weights_survive_copies_and_files():
    mlp = FMoETransformerMLP(2, D, H, expert_dp_comm="dp")
    mlp(torch.randn(3, D))
    file = io.BytesIO()
    torch.save(mlp, file)
    file.seek(0)
    for other in (copy.deepcopy(mlp), torch.load(file, weights_only=False)):
        assert {p.dp_comm for p in other.experts.parameters()} == {"dp"}
        assert {p.dp_comm for p in other.gate.parameters()} == {"gate"}
        assert all(torch.equal(a, b) for a, b in zip(mlp.parameters(), other.parameters(), strict=True))


def test_weights_have_fastmoes_names_and_shapes():
    mlp = FMoETransformerMLP(2, D, H)
    assert {name: tuple(value.shape) for name, value in mlp.state_dict().items()} == {
        "gate.gate.weight": (2, D),
        "gate.gate.bias": (2,),
        **{f"experts.{e}.htoh4.weight": (1, H, D) for e in range(2)},
        **{f"experts.{e}.htoh4.bias": (1, H) for e in range(2)},
        **{f"experts.{e}.h4toh.weight": (1, D, H) for e in range(2)},
        **{f"experts.{e}.h4toh.bias": (1, D) for e in range(2)},
    }
    assert list(NoisyGate(D, 3, 2).state_dict()) == ["w_gate", "w_noise"]
    assert list(MyMoE(4, 2).experts.state_dict()) == ["htoh4.weight", "htoh4.bias", "h4toh.weight", "h4toh.bias"]


def test_a_gate_of_fastmoes_kind_in_the_modern_spelling():
    torch.manual_seed(0)
    layer = FMoE(d_model=D, num_experts=4, gate=GShardGate(D, 4, 1).eval(), expert=SmallExpert)
    x, weight = tokens()
    index, score = layer.gate(x)
    assert_close(layer(x), brute_force(x, index, score, list(layer.experts), weight).output, 1e-5, "output")
    assert layer.gate.has_loss


def test_torchs_data_parallel_wrapper_takes_it():
    """README: no extra coding for DataParallel; without a GPU it calls the module."""
    layer = torch.nn.DataParallel(MyMoE(4, 2))
    x, _ = tokens()
    assert layer(x).shape == x.shape


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: FMoE(num_expert=2, d_model=D, top_k=3), "top_k=3 is not between 1 and num_expert=2"),
        (lambda: FMoE(num_expert=2, d_model=D, world_size=2), "world_size=2 needs torch.distributed"),
        (lambda: FMoE(num_expert=4, d_model=D, gate="switch"), "gate='switch' is not supported in FastMoE's"),
        (lambda: FMoE(num_expert=4, d_model=D, expert="ffn"), "expert='ffn' is not supported in FastMoE's"),
        (lambda: FMoE(num_experts=4, d_model=D, gate_bias=False), "gate_bias is an argument of FastMoE's signature"),
        (lambda: FMoE(num_expert=4, d_model=D, num_experts=8), "num_expert is an argument of FastMoE's signature"),
        (lambda: fmoe.DistributedGroupedDataParallel(nn.Linear(2, 2)), "not initialized"),
        (lambda: fmoe.DistributedGroupedDataParallel(nn.Linear(2, 2), auto_allreduce=True), "auto_allreduce"),
        (lambda: fmoe.DistributedGroupedDataParallel(nn.Linear(2, 2), group=None), "group= is not supported"),
    ],
)
def test_wrong_inputs_say_what_is_wrong(build, says):
    with pytest.raises(fmoe.UserError) as error:
        build()
    assert says in str(error.value)
