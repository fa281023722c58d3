"""The default dtype and device decide about new parameters alone."""

import ast
import contextlib
import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import fmoe
from fmoe.fastmoe.faster_gate import gen_faster_gate
from fmoe.fastmoe.gates import GShardGate, NaiveGate, NoisyGate, SwipeGate, SwitchGate, ZeroGate
from fmoe.gates import GATES
from fmoe.optim import Adafactor, AdamW8bit, Lamb, Lars, Muon

ROOT = Path(__file__).parents[2]
FACTORIES = """
    arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_strided eye full hamming_window
    hann_window kaiser_window linspace logspace normal ones rand randint randn randperm range scalar_tensor tensor
    tril_indices triu_indices zeros
""".split()  # noqa: SIM905
DTYPES = [torch.float64, torch.bfloat16, torch.float16]
WIDTH, EXPERTS = 8, 4


def unnamed(source):
    """(line, what is missing) of each factory call without dtype= or device=.

    What `nn.Parameter` and `register_buffer` are given follows torch's defaults: a parameter in both, a buffer in its
    device.
    """
    tree, allowed = ast.parse(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "Parameter":
                allowed |= {id(argument): {"dtype", "device"} for argument in node.args}
            elif node.func.attr == "register_buffer":
                allowed |= {id(argument): {"device"} for argument in node.args}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in FACTORIES:
                given = {keyword.arg for keyword in node.keywords}
                missing = {"dtype", "device"} - given - allowed.get(id(node), set())
                if missing and None not in given:
                    yield node.lineno, sorted(missing)


@pytest.mark.parametrize("package", ["fmoe", "megatron_patch", "pretrain"])
def test_every_tensor_names_its_dtype_and_device(package):
    found = [
        f"{path.relative_to(ROOT)}:{line} lacks {missing}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, missing in unnamed(path.read_text())
    ]
    assert not found


def test_the_rule_finds_what_it_is_for():
    assert list(unnamed("torch.zeros(3)")) == [(1, ["device", "dtype"])]
    assert list(unnamed("torch.ones(3, device=d)\nself.register_buffer('a', torch.ones(2))")) == [
        (1, ["dtype"]),
        (2, ["dtype"]),
    ]
    assert not list(unnamed("nn.Parameter(torch.empty(3))\ntorch.ones(3, dtype=d, device=d)\nx.new_zeros(3)"))


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(gate, expert="ffn", **options):
    if gate == "topology":
        options["gate_options"] = {"num_nodes": 2}
    return fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, d_hidden=8, gate=gate, expert=expert, seed=1, **options)


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, WIDTH, generator=generator, dtype=torch.float32).to(dtype)
    return x.requires_grad_(), torch.arange(24).view(2, 12), torch.arange(24).view(2, 12) % 12 < 11


def one_pass(layer, x, ids, mask):
    """All that a pass of training gives, and one of evaluation."""
    fmoe.random.set_position(0, 3)
    y = layer(x, mask, token_ids=ids)
    y.square().sum().backward()
    seen = {"y": y, "x.grad": x.grad, "sums": layer.metrics.sums()}
    seen |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    fmoe.end_step(layer)
    return seen | {f"state {k}": v for k, v in layer.state_dict().items()} | {"eval": layer.eval()(x, token_ids=ids)}


class Block(nn.Linear):
    """A user's expert."""

    def __init__(self, d_model):
        super().__init__(d_model, d_model)


CASES = [
    *[(gate, "ffn", {}) for gate in GATES],
    ("sigmoid", "swiglu", {"shared_expert": 8, "shared_gate": True, "granularity": 2}),
    ("gshard", Block, {"gate_options": {"capacity_factor": 0.5}}),
    ("switch", lambda d: nn.Sequential(nn.Linear(d, 5), nn.ReLU(), nn.Linear(5, d)), {}),
    ("naive", "ffn", {"expert_options": {"dropout": 0.2}, "group_size": 5}),
    ("naive", "ffn", {"expert_options": {"backend": "torch"}}),
]


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {getattr(case[1], '__name__', case[1])}")
def test_a_float32_layer_computes_the_same_under_every_default(case, dtype):
    gate, expert, options = case
    layer = build(gate, expert, **options)
    other = copy.deepcopy(layer)
    expected = one_pass(layer, *inputs(torch.float32))
    with default(dtype):
        found = one_pass(other, *inputs(torch.float32))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {getattr(case[1], '__name__', case[1])}")
def test_a_layer_computes_the_same_under_every_default_device(case):
    gate, expert, options = case
    layer = build(gate, expert, **options)
    other = copy.deepcopy(layer)
    expected, given = one_pass(layer, *inputs(torch.float32)), inputs(torch.float32)
    with torch.device("meta"):
        found = one_pass(other, *given)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {getattr(case[1], '__name__', case[1])}")
def test_a_layer_built_under_a_default_trains_and_saves(case, dtype):
    gate, expert, options = case
    with default(dtype):
        layer = build(gate, expert, **options)
        assert {p.dtype for p in layer.parameters()} == {nn.Linear(1, 1).weight.dtype} == {dtype}
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        fmoe.attach_end_step(optimizer, layer)
        x, ids, mask = inputs(dtype)
        for _ in range(2):
            optimizer.zero_grad()
            layer(x, mask, token_ids=ids).square().sum().backward()
            optimizer.step()
        assert fmoe.metrics(layer)[""].tokens == 2 * 22
        assert all(p.isfinite().all() for p in layer.parameters())
        with torch.device("meta"):
            empty = build(gate, expert, **options)
        assert all(p.is_meta for p in empty.parameters())
        empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
        with torch.device("meta"):
            assigned = build(gate, expert, **options)
        assigned.load_state_dict(layer.state_dict(), assign=True)
        for twin in (empty, assigned):
            for name, value in layer.state_dict().items():
                assert torch.equal(twin.state_dict()[name], value) and twin.state_dict()[name].dtype == value.dtype
        assert layer.eval()(x, token_ids=ids).dtype == dtype


FASTMOE = [NaiveGate, NoisyGate, GShardGate, SwitchGate, SwipeGate, ZeroGate, gen_faster_gate(0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", FASTMOE, ids=lambda gate: gate.__name__)
def test_fastmoe_gates_compute_the_same_under_every_default(gate, dtype):
    torch.manual_seed(0)
    layer = fmoe.FMoE(num_expert=4, d_model=WIDTH, world_size=1, gate=gate, top_k=2, expert=[Block] * 4)
    results = []
    for under in (torch.float32, dtype):
        x = inputs(torch.float32)[0]
        layer.zero_grad()
        with default(under):
            torch.manual_seed(1)
            y = layer(x)
            loss = layer.gate.get_loss()
            (y.square().sum() + (0 if loss is None else loss.sum())).backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*results, strict=True))
    with default(dtype):
        made = fmoe.FMoE(num_expert=4, d_model=WIDTH, world_size=1, gate=gate, top_k=2, expert=[Block] * 4)
        made(inputs(dtype)[0]).sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [fmoe.SoftMoE, lambda d, e: fmoe.MMoE(d, e, 2)], ids=["soft", "mmoe"])
def test_other_layers_compute_the_same_under_every_default(make, dtype):
    torch.manual_seed(0)
    layer, x = make(WIDTH, EXPERTS), inputs(torch.float32)[0]
    expected = torch.cat([*layer(x)])
    with default(dtype):
        assert torch.equal(torch.cat([*layer(x)]), expected)
        made = make(WIDTH, EXPERTS)
        assert {p.dtype for p in made.parameters()} == {dtype}
        torch.cat([*made(x.to(dtype))]).sum().backward()


def moved(layer):
    """Steps of the bias by 1e-3 that add up to."""
    for _ in range(1000):
        load_E = torch.tensor([2.0, 0.0, 0.0, 0.0])
        stats = fmoe.RoutingStats(load_E, load_E.new_zeros(()), load_E.new_zeros(()), load_E.sum())
        layer.gate.record(fmoe.Routing(torch.empty(0, 1).long(), torch.empty(0, 1), stats=stats))
        fmoe.end_step(layer)
    return layer.gate.expert_bias_E.tolist()


def built_under(dtype):
    with default(dtype):
        return build("sigmoid")


def through_meta(change):
    def made(dtype):
        with torch.device("meta"):
            layer = change(build("sigmoid"), dtype)
        layer.to_empty(device="cpu").reset_parameters()
        return layer

    return made


def built_on_meta(dtype):
    with default(dtype), torch.device("meta"):
        layer = build("sigmoid")
    layer.to_empty(device="cpu").reset_parameters()
    return layer


def assigned(dtype):
    layer = build("sigmoid")
    layer.load_state_dict({name: value.to(dtype) for name, value in layer.state_dict().items()}, assign=True)
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        built_under,
        built_on_meta,
        lambda dtype: build("sigmoid").to(dtype),
        lambda dtype: build("sigmoid").type(dtype),
        lambda dtype: nn.Sequential(build("sigmoid")).to(dtype)[0],
        lambda dtype: copy.deepcopy(build("sigmoid").to(dtype)),
        lambda dtype: build("sigmoid").half().bfloat16().to(dtype),
        through_meta(lambda layer, dtype: layer.to(dtype)),
        assigned,
    ],
    ids=["default", "default, meta", "to", "type", "to, outside", "copy", "half", "meta", "assign"],
)
def test_the_bias_keeps_its_precision(make, dtype):
    layer = make(dtype)
    assert layer.gate.weight.dtype == dtype and layer.gate.expert_bias_E.dtype == torch.float32
    assert moved(layer) == pytest.approx([-1.0, 1.0, 1.0, 1.0], abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [Lamb, Lars, Muon, Adafactor], ids=lambda make: make.__name__)
def test_optimizers_step_the_same_under_every_default(make, dtype):
    results = []
    for under in (torch.float32, dtype):
        layer, (x, ids, _) = build("naive"), inputs(torch.float32)
        with default(under):
            optimizer = make(layer.parameters(), lr=1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                layer(x, token_ids=ids).square().sum().backward()
                optimizer.step()
                again = make(layer.parameters(), lr=1e-2)
                again.load_state_dict(optimizer.state_dict())
                optimizer = again
        results.append([p.detach() for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bit_moments_are_the_same_under_every_default(dtype):
    pytest.importorskip("torchao")
    results = []
    for under in (torch.float32, dtype):
        generator = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float32)) for size in (8192, 5)]
        with default(under):
            optimizer = AdamW8bit(weights, lr=1e-2)
            for _ in range(3):
                for weight in weights:
                    weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
                optimizer.step()
            moment = optimizer.state[weights[0]]["exp_avg"].dequantize()
            again = optimizer.moment_of(weights[0], "exp_avg", moment).dequantize()
        results.append([*weights, moment, again])
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_the_faster_gate_knows_its_node_after_meta(monkeypatch):
    monkeypatch.setenv("FMOE_TOPO_GPUS_PER_NODE", "1")
    make = gen_faster_gate(1)
    with torch.device("meta"):
        gate = make(WIDTH, 2, 3)
    assert gate.mask.is_meta
    gate = gate.to_empty(device="cpu")
    gate.mask.fill_(True)  # whatever memory held
    gate.reset_parameters()
    assert gate.mask.tolist() == make(WIDTH, 2, 3).mask.tolist() == [True, True, False, False, True, True]
