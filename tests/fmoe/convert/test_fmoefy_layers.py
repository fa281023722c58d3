"""`layers`, a module in two places, a family of one's own, and models that are refused."""

import copy

import pytest
import torch
from compare import assert_close, relative_error
from forks import values
from test_fmoefy_blocks import FOUND
from tiny_models import tiny
from torch import nn
from torch.nn import functional as F

import fmoe
from fmoe.convert import FAMILIES, Block, find_blocks, linear_map


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
    assert [i for i, block in enumerate(model) if isinstance(block[0], fmoe.MoE)] == chosen


@pytest.mark.parametrize("layers", [[0, 5], [-1], 6, 0, -2, [], "odd", True, [1.0], 2.0, None], ids=repr)
def test_layers_that_are_not_there(layers):
    model = deep(5)
    with pytest.raises(fmoe.UserError, match="number of feed-forward blocks: 5; indices start at 0") as error:
        fmoe.fmoefy(model, 2, layers=layers)
    assert repr(layers) in str(error.value)
    assert isinstance(model[0][0], nn.Linear)


def deep(depth):
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(depth)))


def test_a_module_used_in_two_places_becomes_one_layer():
    shared = FOUND["function"]()
    model = nn.ModuleDict({"a": nn.Sequential(shared, shared), "b": nn.ModuleList([shared])})
    fmoe.fmoefy(model, 4)
    assert isinstance(model["b"][0], fmoe.MoE)
    assert model["a"][0] is model["a"][1] is model["b"][0]


class Post(nn.Module):
    """A layer that holds the block's maps between others, as OPT's and BART's do."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.norm(x + self.fc2(F.relu(self.fc1(x))))


def test_a_family_of_ones_own():
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
    fmoe.register_family("post", post)
    try:
        assert [(f.name, f.family) for f in find_blocks(model)] == [("0", "post"), ("1", "post")]
        model[0].forward = lambda x, m=model[0]: m.norm(x + m.fc2(x))
        model[1].forward = lambda x, m=model[1]: m.norm(x + m.fc2(x))
        fmoe.fmoefy(model, 4)
    finally:
        del FAMILIES["post"]
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
    assert all(m.layout.sequence_first for m in model.modules() if isinstance(m, fmoe.MoE))
    model = nn.TransformerDecoderLayer(16, 2, 24, batch_first=True, bias=False, activation=nn.SiLU())
    fmoe.fmoefy(model, 4)
    assert not model.linear1.layout.sequence_first
    assert model.linear1.experts.bias_in is None
    assert model(torch.randn(2, 5, 16), torch.randn(2, 3, 16)).shape == (2, 5, 16)


def mixed():
    model = deep(2)
    model[1][2].half()
    return model


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: fmoe.fmoefy(deep(2), 4), r"the model already has MoE layers \(2\)"),
        (mixed, r"weights of 1\.0 differ in dtype or device \(float16 on cpu, float32 on cpu\)"),
        (FOUND["function"], "model itself is one feed-forward block (Mlp)"),
        (lambda: nn.DataParallel(deep(2)), "wrapped in DataParallel"),
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
        assert f"the model is wrapped in {name}:" in message and "\n" not in message


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
