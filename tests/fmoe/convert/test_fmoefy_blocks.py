"""Blocks that are recognized by their structure, and blocks that stay unchanged."""

import contextlib
import copy

import pytest
import torch
from compare import assert_close, relative_error
from forks import values
from torch import nn
from torch.nn import functional as F

import fmoe
from fmoe.convert import find_blocks, linear_map
from fmoe.convert.blocks import known_activation


class Mlp(nn.Module):
    """Two or three linear maps of odd names; ``compute(self, x)`` tells what is done with them."""

    def __init__(self, compute, width=8, hidden=12, maps=2, **children):
        super().__init__()
        self.last = nn.Linear(hidden, width)
        for name in ("one", "two")[: maps - 1]:
            setattr(self, name, nn.Linear(width, hidden))
        for name, child in children.items():
            setattr(self, name, child)
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)


FOUND = {
    "function": lambda: Mlp(lambda m, x: m.last(F.silu(m.one(x)))),
    "square": lambda: Mlp(lambda m, x: m.last(F.relu(m.one(x))), hidden=8),
    "in place": lambda: Mlp(lambda m, x: m.last(m.act(m.one(x))), act=nn.SiLU(inplace=True)),
    "dropout": lambda: Mlp(lambda m, x: m.drop(m.last(m.drop(F.gelu(m.one(x))))), drop=nn.Dropout(0.25)),
    "activation of its own": lambda: Mlp(lambda m, x: m.last(m.act(m.one(x))), act=nn.Softplus(beta=3)),
    "gate first": lambda: Mlp(lambda m, x: m.last(m.act(m.one(x)) * m.two(x)), maps=3, act=nn.SiLU()),
    "gate second": lambda: Mlp(lambda m, x: m.last(m.one(x) * F.gelu(m.two(x))), maps=3),
    "gate and value in one": lambda: Mlp(
        lambda m, x: m.last(F.silu(m.fused(x)[..., :12]) * m.fused(x)[..., 12:]), maps=1, fused=nn.Linear(8, 24)
    ),
    "value and gate in one": lambda: Mlp(
        lambda m, x: (lambda a, b: m.last(a * F.silu(b)))(*m.fused(x).chunk(2, -1)), maps=1, fused=nn.Linear(8, 24)
    ),
}


@pytest.mark.parametrize("kind", [k for k in FOUND if k != "gate and value in one"])
def test_blocks_are_read_by_running_them(kind):
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": FOUND[kind]()}).eval()
    dense = copy.deepcopy(model)
    (found,) = find_blocks(model)
    assert found.name == "mlp"
    assert found.block.is_gated == ("gate" in kind)
    fmoe.fmoefy(model, 4)
    x = torch.randn(2, 5, 8, requires_grad=True)
    y = model["mlp"](x)
    assert_close(y, dense["mlp"](x), 1e-5, kind)
    y.sum().backward()
    if kind == "dropout":
        assert model["mlp"].moe.experts.dropout == 0.25
        assert model["mlp"].dropout.p == 0.25
    else:
        assert isinstance(model["mlp"], fmoe.MoE)


NOT_FOUND = {
    "a residual inside": lambda: Mlp(lambda m, x: x + m.last(F.relu(m.one(x)))),
    "a map called twice": FOUND["gate and value in one"],
    "a factor": lambda: Mlp(lambda m, x: 0.5 * m.last(F.relu(m.one(x)))),
    "dropout as a function": lambda: Mlp(lambda m, x: m.last(F.dropout(F.relu(m.one(x)), 0.5, m.training))),
    "a norm inside": lambda: Mlp(lambda m, x: m.last(m.norm(F.relu(m.one(x)))), norm=nn.LayerNorm(12)),
    "a learned activation": lambda: nn.Sequential(nn.Linear(8, 12), nn.PReLU(), nn.Linear(12, 8)),
    "other width": lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 9)),
    "no activation": lambda: nn.Sequential(nn.Linear(8, 12), nn.Identity(), nn.Linear(12, 8)),
    "not by rows": lambda: nn.Sequential(nn.Linear(8, 12), nn.Softmax(dim=0), nn.Linear(12, 8)),
    "two inputs": lambda: nn.Bilinear(8, 8, 8),
}


@pytest.mark.parametrize("kind", NOT_FOUND)
def test_what_only_looks_like_a_block_is_left_alone(kind):
    model = nn.ModuleDict({"mlp": NOT_FOUND[kind]()})
    with pytest.raises(fmoe.UserError) as error:
        fmoe.fmoefy(model, 4)
    text = str(error.value)
    assert "no feed-forward block in torch.nn.modules.container.ModuleDict" in text
    assert "sequential, torch layer, bert, glu, mlp; converters of whole models: megatron" in text
    assert "Linear" in text or "Bilinear" in text
    assert "\n" not in text


class Lora(nn.Linear):
    """Holds a weight that is not all of its map."""

    def __init__(self, width, hidden):
        super().__init__(width, hidden)
        self.down, self.up = nn.Parameter(torch.randn(2, width)), nn.Parameter(torch.randn(hidden, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.down.t() @ self.up.t()


class Scaled(nn.Linear):
    """Equalised learning rate: the weight counts by its fan-in."""

    def forward(self, x):
        return F.linear(x, self.weight * self.in_features**-0.5, self.bias)


class Matmul(nn.Linear):
    """Falcon's: a linear map in other words."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class StraightThrough(nn.Module):
    """relu's values, another derivative."""

    def forward(self, x):
        return x + (x.relu() - x).detach()


class BertLike(nn.Module):
    """A layer of two halves; ``before`` is done to the hidden values by its second half, ``between`` by the layer."""

    def __init__(self, before=lambda m, h: h, between=lambda h: h, first=lambda m, x: x):
        super().__init__()
        self.intermediate = Mlp(lambda m, x: m.act(m.one(first(m, x))), act=nn.ReLU())
        del self.intermediate.last
        self.output = Mlp(lambda m, h: m.dense(before(m, h)), maps=1, dense=nn.Linear(12, 8), norm=nn.LayerNorm(12))
        del self.output.last
        self.between, self.norm = between, nn.LayerNorm(8)
        nn.init.normal_(self.output.norm.weight)

    def forward(self, x):
        return self.norm(x + self.output(self.between(self.intermediate(x))))


def with_act(act):
    return Mlp(lambda m, x: m.last(m.act(m.one(x))), act=act)


def changed(model, change, name="one"):
    change(getattr(model, name) if name else model)
    return model


def double(module, args, output):
    return 2 * output


def replaced_forward(module):
    module.forward = lambda x, m=module: 2 * type(m).forward(m, x)


def sequential(*parts):
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), *parts)


def parametrized(linear):
    class Half(nn.Module):
        def forward(self, weight):
            return weight / 2

    nn.utils.parametrize.register_parametrization(linear, "weight", Half())


class Steps(nn.Linear):
    """Rounds its weight, and tells nobody in the backward pass."""

    def forward(self, x):
        return F.linear(x, self.weight + (self.weight.round() - self.weight).detach(), self.bias)


def with_map(linear):
    model = with_act(nn.ReLU())
    model.one = linear
    return model


# Modules that look like a block. Their output must stay, on inputs of any size, or they must be refused.
TRAPS = {
    "lora": lambda: with_map(Lora(8, 12)),
    "lora in a sequential": lambda: nn.Sequential(Lora(8, 12), nn.ReLU(), nn.Linear(12, 8)),
    "equalised rate": lambda: with_map(Scaled(8, 12)),
    "equalised rate, output": lambda: changed(
        with_act(nn.ReLU()), lambda m: setattr(m, "last", Scaled(12, 8)), name=None
    ),
    "rounded weights": lambda: with_map(Steps(8, 12)),
    "the same in other words": lambda: with_map(Matmul(8, 12)),
    "spectral norm": lambda: changed(with_act(nn.ReLU()), nn.utils.spectral_norm),
    "spectral norm in a sequential": lambda: changed(sequential(), nn.utils.spectral_norm, "0"),
    "weight norm": lambda: changed(with_act(nn.ReLU()), nn.utils.weight_norm),
    "parametrization": lambda: changed(with_act(nn.ReLU()), parametrized),
    "hook": lambda: changed(with_act(nn.ReLU()), lambda m: m.register_forward_hook(double)),
    "hook on the activation": lambda: changed(with_act(nn.ReLU()), lambda m: m.register_forward_hook(double), "act"),
    "hook in a sequential": lambda: changed(sequential(), lambda m: m.register_forward_hook(double), "2"),
    "hook on a sequential": lambda: changed(sequential(), lambda m: m.register_forward_hook(double), None),
    "hook on the block": lambda: changed(with_act(nn.ReLU()), lambda m: m.register_forward_hook(double), None),
    "hook before": lambda: changed(
        with_act(nn.ReLU()), lambda m: m.register_forward_pre_hook(lambda m, x: (x[0] * 2,)), "last"
    ),
    "hook in torch's layer": lambda: changed(
        nn.TransformerEncoderLayer(8, 2, 12, 0.0), lambda m: m.register_forward_hook(double), "linear1"
    ),
    "another forward": lambda: changed(with_act(nn.ReLU()), replaced_forward),
    "another forward of the block": lambda: changed(with_act(nn.ReLU()), replaced_forward, None),
    "another forward of a sequential": lambda: changed(sequential(), replaced_forward, None),
    "relu6": lambda: with_act(nn.ReLU6()),
    "relu6 in a sequential": lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU6(), nn.Linear(12, 8)),
    "hardtanh": lambda: with_act(nn.Hardtanh(-30, 30)),
    "softplus": lambda: with_act(nn.Softplus(threshold=3)),
    "a far clamp": lambda: Mlp(lambda m, x: m.last(m.act(m.one(x)).clamp(max=1e4)), act=nn.ReLU()),
    "a clamp before": lambda: Mlp(lambda m, x: m.last(m.act(m.one(x.clamp(-9, 9)))), act=nn.ReLU()),
    "a clamp behind": lambda: Mlp(lambda m, x: m.last(m.act(m.one(x))).clamp(-9, 9), act=nn.ReLU()),
    "a clamp between": lambda: Mlp(lambda m, x: m.last(F.relu(m.one(x).clamp(max=20))), act=nn.ReLU()),
    "clamped gate": lambda: Mlp(lambda m, x: m.last(F.silu(m.one(x).clamp(max=7)) * m.two(x)), maps=3),
    "leaky": lambda: Mlp(lambda m, x: m.last(F.leaky_relu(m.one(x), 0.01))),
    "quick gelu": lambda: Mlp(lambda m, x: m.last((lambda h: h * torch.sigmoid(1.702 * h))(m.one(x)))),
    "gelu by tanh": lambda: Mlp(lambda m, x: m.last(F.gelu(m.one(x), approximate="tanh"))),
    "hardswish": lambda: Mlp(lambda m, x: m.last(F.hardswish(m.one(x)))),
    "nearly relu": lambda: Mlp(lambda m, x: m.last(F.leaky_relu(m.one(x), 1e-4))),
    "a function kept": lambda: Mlp(lambda m, x: 3 * m.last(m.f(m.one(x))), f=F.relu),
    "a residual": lambda: Mlp(lambda m, x: x + m.last(m.act(m.one(x))), act=nn.GELU()),
    "a factor": lambda: Mlp(lambda m, x: 0.5 * m.last(m.act(m.one(x))), act=nn.GELU()),
    "a factor between": lambda: Mlp(lambda m, x: m.last(0.5 * m.act(m.one(x))), act=nn.GELU()),
    "norms around": lambda: Mlp(
        lambda m, x: m.norm(m.last(m.act(m.one(m.norm(x))))), act=nn.SiLU(), norm=nn.LayerNorm(8)
    ),
    "norm between": lambda: Mlp(lambda m, x: m.last(m.norm(m.act(m.one(x)))), act=nn.SiLU(), norm=nn.LayerNorm(12)),
    "a gain between": lambda: Mlp(
        lambda m, x: m.last(m.gain * m.act(m.one(x))), act=nn.SiLU(), gain=nn.Parameter(torch.tensor(1.0)), hidden=8
    ),
    "square": lambda: Mlp(lambda m, x: x + m.last(m.act(m.one(x))), act=nn.SiLU(), hidden=8),
    "hidden values used twice": lambda: Mlp(
        lambda m, x: (lambda h: m.last(h) + h.mean(-1, keepdim=True))(m.act(m.one(x))), act=nn.ReLU()
    ),
    "activation used twice": lambda: Mlp(lambda m, x: m.act(m.last(m.act(m.one(x)))), act=nn.ReLU()),
    "a tuple": lambda: Mlp(lambda m, x: (m.last(m.act(m.one(x))), None), act=nn.ReLU()),
    "dropout as a function": lambda: Mlp(
        lambda m, x: m.last(F.dropout(m.act(m.one(x)), m.p, m.training)), act=nn.ReLU(), p=0.25
    ),
    "one bias": lambda: changed(with_act(nn.ReLU()), lambda m: m.register_parameter("bias", None)),
    "a straight-through derivative": lambda: with_act(StraightThrough()),
    "maps beside an attention's": lambda: Mlp(
        lambda m, x: x + m.o(m.v(x)) + m.last(m.act(m.one(x))),
        act=nn.GELU(),
        **{name: nn.Linear(8, 8) for name in "qkvo"},
    ),
    "bert": BertLike,
    "bert, a factor": lambda: BertLike(before=lambda m, h: 0.5 * h),
    "bert, a norm": lambda: BertLike(before=lambda m, h: m.norm(h)),
    "bert, a factor in the layer": lambda: BertLike(between=lambda h: 0.5 * h),
    "bert, a clamp": lambda: BertLike(before=lambda m, h: h.clamp(max=50)),
    "bert, a clamp first": lambda: BertLike(first=lambda m, x: x.clamp(-20, 20)),
}
# What nothing else than a refusal can answer.
REFUSED = {
    "lora", "equalised rate", "rounded weights", "spectral norm", "weight norm", "parametrization", "hook",
    "hook on the activation", "a far clamp", "a clamp between", "clamped gate", "leaky", "quick gelu", "norm between",
    "a factor between", "a gain between", "hidden values used twice", "activation used twice", "bert, a factor",
    "bert, a norm", "bert, a factor in the layer", "bert, a clamp", "another forward",
}  # fmt: skip
FOUND_AS_WELL = {
    "the same in other words", "hook on the block", "relu6", "hardtanh", "softplus", "a clamp before", "a clamp behind",
    "gelu by tanh", "a function kept", "a residual", "a factor", "norms around", "square", "a tuple", "one bias",
    "maps beside an attention's", "bert", "bert, a clamp first", "dropout as a function",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("trap", TRAPS)
def test_output_is_unchanged_or_the_block_refused(trap):
    check_that_output_is_unchanged_or_the_block_refused(trap, torch.float32)


@pytest.mark.by_default(*range(0, 165, 8))
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("trap", TRAPS)
def test_output_is_unchanged_or_the_block_refused_in_other_precisions(trap, dtype):
    check_that_output_is_unchanged_or_the_block_refused(trap, dtype)


def check_that_output_is_unchanged_or_the_block_refused(trap, dtype):
    torch.manual_seed(0)
    module = TRAPS[trap]()
    if "spectral" in trap and dtype != torch.float32:
        pytest.skip("torch's own does not convert")
    model = nn.ModuleDict({"mlp": module.to(dtype)}).eval()
    rows = torch.randn(3, 40, 8, dtype=torch.float64)
    sizes = [1.0, 1e-3, 30.0] if dtype == torch.float16 else [1.0, 1e-5, 1e6]
    inputs = [(rows * size).to(dtype) for size in sizes]

    def outputs():
        return [y[0] if isinstance(y, tuple) else y for y in map(model["mlp"], inputs)]

    expected, before = outputs(), [(name, type(m), len(m._forward_hooks)) for name, m in model.named_modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    reference = None
    with contextlib.suppress(AttributeError, RuntimeError):  # a tuple, or what cannot be copied
        reference = [y.double() for y in map(copy.deepcopy(model["mlp"]).double(), (x.double() for x in inputs))]
    try:
        fmoe.fmoefy(model, 2)
    except fmoe.UserError as error:
        assert trap not in FOUND_AS_WELL, str(error)
        assert "\n" not in str(error)
        assert [(name, type(m), len(m._forward_hooks)) for name, m in model.named_modules()] == before
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(torch.equal(a, b) for a, b in zip(outputs(), expected, strict=True))
        return
    assert trap not in REFUSED
    for index, (actual, dense) in enumerate(zip(outputs(), expected, strict=True)):
        own = relative_error(dense, reference[index]) if reference else 0
        assert_close(actual, dense, max(1e-5, 4 * own, 2 * torch.finfo(dtype).eps), f"{trap}, size {sizes[index]}")


@pytest.mark.parametrize("residual", [0.0, 1.0])
def test_a_dropout_called_as_a_function_moves_into_the_experts(residual):
    def compute(m, x):
        return m.residual * x + m.last(F.dropout(m.act(m.one(x)), m.p, m.training))

    model = nn.ModuleDict({"mlp": Mlp(compute, act=nn.ReLU(), p=0.25, residual=residual)})
    fmoe.fmoefy(model, 2)
    (layer,) = (m for m in model.modules() if isinstance(m, fmoe.MoE))
    assert layer.experts.dropout == 0.25
    x, block = torch.randn(2, 5, 8), model["mlp"].train()
    assert not torch.equal(block(x), block(x))
    layer.experts.dropout = 0.0
    assert torch.equal(block(x), block(x))


def test_a_dropout_that_serves_twice_keeps_both_rates():
    module = Mlp(
        lambda m, x: x + m.drop(m.last(m.drop(m.act(m.one(x))))), act=nn.ReLU(), drop=nn.Dropout(0.36), width=64
    )
    model = nn.ModuleDict({"mlp": module})
    fmoe.fmoefy(model, 2)
    (layer,) = (m for m in model.modules() if isinstance(m, fmoe.MoE))
    assert layer.experts.dropout == 0.36
    layer.experts.dropout = 0.0
    x = torch.randn(1, 4000, 64)
    dense = module.eval()(x) - x
    kept = (module.train()(x) - x).abs() > 1e-6
    assert kept.double().mean().item() == pytest.approx(0.64, abs=0.01)
    scale = ((module(x) - x) / dense)[(dense.abs() > 1e-2)]
    assert scale[scale.abs() > 1e-3].mean().item() == pytest.approx(1 / 0.64, rel=1e-3)


def test_looking_for_blocks_leaves_no_trace():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc1, self.act, self.fc2 = nn.BatchNorm1d(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.fc2(self.act(self.fc1(self.norm(x.flatten(0, -2)).view(x.shape))))

    model = nn.ModuleList([Counting()])
    model[0].fc1.weight.requires_grad_(False)
    model[0].fc2.eval()
    state, generator = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    attributes = [sorted(vars(module)) for module in model.modules()]
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = find_blocks(model)
    assert found.name == "0.fc1"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True, True, True]
    assert (model[0].calls, model[0].training, model[0].fc2.training) == (0, True, False)
    assert all(not module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), generator)


def lazy():
    return nn.Sequential(nn.LazyLinear(12), nn.ReLU(), nn.Linear(12, 8))


def torchao_int8():
    quantization = pytest.importorskip("torchao.quantization")
    model = sequential()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def sharded(_):
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    model = sequential()
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
    try:
        fmoe.fmoefy(model, 2)
    except fmoe.UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lazy, "0 has no weight yet: run the model once"),
        (torchao_int8, "0 has a weight of Int8"),
        (TRAPS["hook"], "one has hooks"),
        (TRAPS["lora"], "one is a Lora with more than a weight and a bias"),
        (TRAPS["equalised rate"], "one is a Scaled, whose output is not"),
        (TRAPS["spectral norm"], "one has hooks"),
        (TRAPS["parametrization"], "one is a ParametrizedLinear"),
        (TRAPS["norm between"], "one and last (SiLU, LayerNorm)"),
        (TRAPS["leaky"], "more than a row-wise activation between one and last"),
        (lambda: Mlp(lambda m, x: x + m.last(F.relu(m.one(x)))), "make it a module or an attribute"),
    ],
)
def test_a_refusal_says_why(build, says):
    model = nn.ModuleDict({"mlp": build()})
    with pytest.raises(fmoe.UserError) as error:
        fmoe.fmoefy(model, 2)
    assert "Refused: mlp (" in str(error.value)
    assert says in str(error.value)


def test_sharded_weights_are_refused(two_ranks):
    for message in values(two_ranks.run(sharded, None)):
        assert "0 has a sharded weight (DTensor)" in message


def test_what_is_refused_beside_blocks_is_told(caplog):
    model = nn.ModuleList([sequential(), TRAPS["hook"](), TRAPS["a far clamp"]()])
    dense = copy.deepcopy(model[1])
    fmoe.fmoefy(model, 2)
    assert isinstance(model[0][0], fmoe.MoE)
    (message,) = (record.getMessage() for record in caplog.records if record.name == "fmoe")
    assert "1 (one has hooks)" in message
    assert "2 (there is more than a row-wise activation" in message
    x = torch.randn(2, 8)
    assert torch.equal(model[1](x), dense(x))


def test_a_layer_that_narrows_its_input_before_the_block():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intra_bottleneck_size": 32, "true_hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_feedforward_networks": 2, "vocab_size": 61}
    torch.manual_seed(0)
    model = transformers.MobileBertModel(transformers.MobileBertConfig(embedding_size=32, **sizes)).eval()
    tokens = torch.randint(3, 61, (2, 10))
    expected = model(tokens).last_hidden_state
    assert len(find_blocks(model)) == 4
    fmoe.fmoefy(model, 2)
    assert_close(model(tokens).last_hidden_state, expected, 1e-5, "output")


def test_a_layer_of_two_streams_of_different_widths():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.LiltConfig(channel_shrink_ratio=2, vocab_size=61, max_2d_position_embeddings=64, **sizes)
    model = transformers.LiltModel(config).eval()
    inputs = {"input_ids": torch.randint(3, 61, (2, 10)), "bbox": torch.randint(0, 30, (2, 10, 4)).sort().values}
    expected = model(**inputs).last_hidden_state
    assert [found.name for found in find_blocks(model)] == ["encoder.layer.0", "encoder.layer.1"]
    fmoe.fmoefy(model, 2)
    assert_close(model(**inputs).last_hidden_state, expected, 1e-5, "output")


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class Doubled(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


class RowDropout(nn.Dropout):
    def forward(self, x):
        return x * (torch.rand_like(x[..., :1]) > self.p) if self.training else x


class ClippedSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.relu()

    @staticmethod
    def backward(ctx, slope):
        return slope.clamp(-1, 1)


HIDDEN_FROM_FEW_ROWS = {
    "mixes sequences": lambda m, x: m.last(F.relu(m.one(x)).cumsum(0)),
    "counts sequences": lambda m, x: m.last(F.relu(m.one(x))) / len(x),
    "counts sequences between": lambda m, x: m.last(F.relu(m.one(x)) / len(x)),
    "a clamp of large inputs": lambda m, x: m.last(F.relu(m.one(x.clamp(-1e9, 1e9)))),
}


@pytest.mark.parametrize(("width", "hidden"), [(8, 12), (64, 1024)])
@pytest.mark.parametrize("trap", HIDDEN_FROM_FEW_ROWS)
def test_few_rows_show_what_depends_on_sequences_or_size(trap, width, hidden):
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": Mlp(HIDDEN_FROM_FEW_ROWS[trap], width=width, hidden=hidden)})
    assert not find_blocks(model)


ITEMS = {
    "an activation in fewer bits": lambda: Called(lambda m, x: x.bfloat16().relu().to(x.dtype)),
    "a clipped derivative": lambda: Called(lambda m, x: ClippedSlope.apply(x)),
    "noise in training": lambda: Called(lambda m, x: x.relu() + (torch.randn_like(x) if m.training else 0)),
    "another function in training": lambda: Called(lambda m, x: x.relu() if m.training else F.gelu(x)),
    "dropout as a function inside": lambda: Called(lambda m, x: F.dropout(x.relu(), 0.5, m.training)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("item", ITEMS)
def test_items_of_a_sequential_keep_values_derivatives_and_both_modes(item, training):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), ITEMS[item](), nn.Linear(12, 8))]).train(training)
    found = find_blocks(model)
    if item == "an activation in fewer bits" or item == "a clipped derivative":
        assert all(known_activation(f.block.activation) is model[0][1] for f in found)
    else:
        assert not found


def test_a_dropout_nested_with_the_activation_moves_into_the_experts():
    items = nn.Linear(8, 12), nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), nn.Linear(12, 8)
    model = nn.ModuleList([nn.Sequential(*items)]).eval()
    assert [found.block.dropout for found in find_blocks(model)] == [0.5]


def test_a_linear_map_that_is_called_otherwise_is_refused():
    assert not find_blocks(nn.ModuleList([nn.Sequential(Doubled(8, 12), nn.ReLU(), Doubled(12, 8))]))


def test_a_dropout_of_another_kind_does_not_become_plain_dropout():
    mlp = Mlp(lambda m, x: m.last(m.drop(F.relu(m.one(x)))), drop=RowDropout(0.5))
    assert not find_blocks(nn.ModuleDict({"mlp": mlp}))


def test_a_subclass_of_linear_is_tried_on_small_weights():
    sizes = []

    class Cast(nn.Linear):
        def forward(self, x):
            sizes.append(self.weight.numel())
            return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

    assert linear_map(Cast(512, 1024)) is not None
    assert max(sizes) < 1000


@pytest.mark.parametrize("family", ["segformer", "squeezebert"])
def test_families_that_hold_no_block_are_refused_in_one_line(family):
    transformers = pytest.importorskip("transformers")
    if family == "segformer":
        sizes = {"hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4]}
        sizes |= {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}
        model = transformers.SegformerModel(transformers.SegformerConfig(**sizes))
        says = "row-wise activation between"
    else:
        sizes = {"hidden_size": 32, "embedding_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.SqueezeBertModel(transformers.SqueezeBertConfig(intermediate_size=48, **sizes))
        says = "intermediate.conv1d is a Conv1d, not an nn.Linear"
    with pytest.raises(fmoe.UserError) as error:
        fmoe.fmoefy(model, 2)
    assert says in str(error.value).partition("Refused: ")[2]
    assert "\n" not in str(error.value)
