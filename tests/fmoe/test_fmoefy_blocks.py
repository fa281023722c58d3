"""Which blocks are found by structure, which are left alone, `layers`, adapters of one's own, wrong models."""

import copy

import pytest
import torch
from compare import assert_close, relative_error
from forks import values
from tiny_models import tiny
from torch import nn
from torch.nn import functional as F

import fmoe
from fmoe.adapters import ADAPTERS, Block, find_blocks, linear_map


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
        assert isinstance(model["mlp"], fmoe.FMoE)


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
    assert "sequential, torch layer, bert, glu, mlp; of whole models: megatron" in text
    assert "Linear" in text or "Bilinear" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ("all", [0, 1, 2, 3, 4]),
        ([1, 3], [1, 3]),
        ({4}, [4]),
        (range(2), [0, 1]),
        (1, [0, 1, 2, 3, 4]),
        (2, [1, 3]),
        (5, [4]),
    ],
    ids=str,
)
def test_layers(layers, chosen):
    model = deep(5)
    fmoe.fmoefy(model, 2, layers=layers)
    assert [i for i, block in enumerate(model) if isinstance(block[0], fmoe.FMoE)] == chosen


@pytest.mark.parametrize("layers", [[0, 5], [-1], 6, 0, -2, [], "odd", True, [1.0], 2.0, None], ids=repr)
def test_layers_that_are_not_there(layers):
    model = deep(5)
    with pytest.raises(fmoe.UserError, match="the model has 5 feed-forward blocks, counted from 0 to 4") as error:
        fmoe.fmoefy(model, 2, layers=layers)
    assert repr(layers) in str(error.value)
    assert isinstance(model[0][0], nn.Linear)


def deep(depth):
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(depth)))


def test_a_module_used_in_two_places_becomes_one_layer():
    shared = FOUND["function"]()
    model = nn.ModuleDict({"a": nn.Sequential(shared, shared), "b": nn.ModuleList([shared])})
    fmoe.fmoefy(model, 4)
    assert isinstance(model["b"][0], fmoe.FMoE)
    assert model["a"][0] is model["a"][1] is model["b"][0]


class Post(nn.Module):
    """A layer that holds the block's maps between others, as OPT's and BART's do."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.norm(x + self.fc2(F.relu(self.fc1(x))))


def test_an_adapter_of_ones_own():
    def post(layer):
        if not isinstance(layer, Post):
            return []

        def install(moe):
            layer.fc1, layer.fc2 = nn.Identity(), moe

        return [Block((linear_map(layer.fc1),), linear_map(layer.fc2), nn.ReLU(), layer, install)]

    model = nn.Sequential(Post(), Post())
    dense = copy.deepcopy(model)
    with pytest.raises(fmoe.UserError):
        fmoe.fmoefy(model, 4)
    fmoe.register_adapter("post", post)
    try:
        assert [(f.name, f.adapter) for f in find_blocks(model)] == [("0", "post"), ("1", "post")]
        model[0].forward = lambda x, m=model[0]: m.norm(x + m.fc2(x))
        model[1].forward = lambda x, m=model[1]: m.norm(x + m.fc2(x))
        fmoe.fmoefy(model, 4)
    finally:
        del ADAPTERS["post"]
    x = torch.randn(2, 5, 8)
    assert_close(model(x), dense(x), 1e-5, "output")
    with pytest.raises(fmoe.UserError, match=r"shapes \(12, 8\), \(12, 8\)"):
        Block((linear_map(nn.Linear(8, 12)),), linear_map(nn.Linear(8, 12)), nn.ReLU(), model)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("layers", ["all", [0], [1]], ids=str)
def test_the_fused_path_of_torch_layers_is_left(layers, norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, "gelu", batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    dense = copy.deepcopy(model)
    x, padding = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    fmoe.fmoefy(model, 4, layers=layers)
    with torch.no_grad():
        for mask in (None, padding):
            kept = ~padding if mask is not None else slice(None)
            actual, expected = (m(x, src_key_padding_mask=mask)[kept] for m in (model, dense))
            assert_close(actual, expected, 1e-5, f"padding={mask is not None}")


def test_torch_layers_tell_their_layout():
    model, _ = tiny("torch")
    fmoe.fmoefy(model, 4)
    assert all(m.sequence_first for m in model.modules() if isinstance(m, fmoe.FMoE))
    model = nn.TransformerDecoderLayer(16, 2, 24, batch_first=True, bias=False, activation=nn.SiLU())
    fmoe.fmoefy(model, 4)
    assert not model.linear1.sequence_first
    assert model.linear1.experts.bias_in is None
    assert model(torch.randn(2, 5, 16), torch.randn(2, 3, 16)).shape == (2, 5, 16)


def mixed():
    model = deep(2)
    model[1][2].half()
    return model


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: fmoe.fmoefy(deep(2), 4), "the model has 2 FMoE layers already"),
        (mixed, r"weights of 1\.0 differ in dtype or device \(float16 on cpu, float32 on cpu\)"),
        (FOUND["function"], "model itself is one feed-forward block (Mlp)"),
        (lambda: nn.DataParallel(deep(2)), "inside DataParallel"),
    ],
)
def test_models_that_are_refused(build, says):
    with pytest.raises(fmoe.UserError, match=says.replace("(Mlp)", r"\(Mlp\)")):
        fmoe.fmoefy(build(), 4)


def wrapped(kind):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = deep(2)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    try:
        fmoe.fmoefy(model, 4)
    except fmoe.UserError as error:
        return str(error)


@pytest.mark.parametrize(("kind", "name"), [("ddp", "DistributedDataParallel"), ("fsdp2", "FSDPModule")])
def test_wrapped_models_are_refused(two_ranks, kind, name):
    for message in values(two_ranks.run(wrapped, kind)):
        assert message == f"fmoefy got a model inside {name}: call it before the model is wrapped"


def split(gate):
    import torch.distributed as dist

    torch.manual_seed(0)
    model = deep(2).eval()
    x = torch.randn(2, 6, 4)
    options = {"gate": gate, "seed": 1, "noise": 0.1}
    options["gate_options"] = {"capacity_factor": None, "eval_capacity_factor": None} if gate == "switch" else {}
    whole = fmoe.fmoefy(copy.deepcopy(model), 4, **options)
    fmoe.fmoefy(model, 4, moe_group=dist.group.WORLD, **options)
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for name, parameter in model[1][0].experts.named_parameters():
        assert torch.equal(parameter, dict(whole[1][0].experts.named_parameters())[name][mine]), name
    return relative_error(model(x), whole(x))


@pytest.mark.parametrize("gate", ["naive", "switch"])
def test_each_rank_keeps_its_experts(two_ranks, gate):
    for error in values(two_ranks.run(split, gate)):
        assert error < 1e-5
