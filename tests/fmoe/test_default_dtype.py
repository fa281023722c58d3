"""The default dtype and device decide about new parameters alone."""

import ast
import contextlib
import copy
import functools
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


@contextlib.contextmanager
def default(dtype_or_device):
    """Set torch's default dtype, or device."""
    if isinstance(dtype_or_device, str):
        with torch.device(dtype_or_device):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_or_device)
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


class Block(nn.Linear):
    """A user's expert."""

    def __init__(self, d_model):
        super().__init__(d_model, d_model)


LAYERS = [
    *[(gate, "ffn", {}) for gate in GATES],
    ("sigmoid", "swiglu", {"shared_expert": 8, "shared_gate": True, "granularity": 2}),
    ("gshard", Block, {"gate_options": {"capacity_factor": 0.5}}),
    ("switch", lambda d: nn.Sequential(nn.Linear(d, 5), nn.ReLU(), nn.Linear(5, d)), {}),
    ("naive", "ffn", {"expert_options": {"dropout": 0.2}, "group_size": 5}),
    ("naive", "ffn", {"expert_options": {"backend": "torch"}}),
]


FASTMOE = [NaiveGate, NoisyGate, GShardGate, SwitchGate, SwipeGate, ZeroGate, gen_faster_gate(0)]
DENSE = {"soft": fmoe.SoftMoE, "mmoe": lambda d, e: fmoe.MMoE(d, e, 2)}


def with_gradients(layer, x, **results):
    return results | {"x": x.grad} | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def layer_pass(gate, expert, options):
    """All that a pass of training gives, and one of evaluation."""
    layer = build(gate, expert, **options)
    x, ids, mask = inputs(torch.float32)

    def run():
        fmoe.random.set_position(0, 3)
        y = layer(x, mask, token_ids=ids)
        y.square().sum().backward()
        results = with_gradients(layer, x, y=y, sums=layer.metrics.sums())
        fmoe.end_step(layer)
        state = {f"state {key}": value for key, value in layer.state_dict().items()}
        return results | state | {"eval": layer.eval()(x, token_ids=ids)}

    return run


def fastmoe_layer(gate):
    return fmoe.FMoE(num_expert=4, d_model=WIDTH, world_size=1, gate=gate, top_k=2, expert=[Block] * 4)


def fastmoe_pass(gate):
    torch.manual_seed(0)
    layer = fastmoe_layer(gate)
    x = inputs(torch.float32)[0]

    def run():
        torch.manual_seed(1)
        y = layer(x)
        loss = layer.gate.get_loss()
        (y.square().sum() + (0 if loss is None else loss.sum())).backward()
        return with_gradients(layer, x, y=y)

    return run


def dense_pass(make):
    torch.manual_seed(0)
    layer = make(WIDTH, EXPERTS)
    return lambda: {"y": torch.cat([*layer(inputs(torch.float32)[0])])}


def optimizer_steps(make):
    layer = build("naive")
    x, ids, _ = inputs(torch.float32)

    def run():
        optimizer = make(layer.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            layer(x, token_ids=ids).square().sum().backward()
            optimizer.step()
            again = make(layer.parameters(), lr=1e-2)
            again.load_state_dict(optimizer.state_dict())
            optimizer = again
        return dict(layer.named_parameters())

    return run


def steps_of_8_bits():
    pytest.importorskip("torchao")
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float32)) for size in (8192, 5)]

    def run():
        optimizer = AdamW8bit(weights, lr=1e-2)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            optimizer.step()
        moment = optimizer.state[weights[0]]["exp_avg"].dequantize()
        again = optimizer.moment_of(weights[0], "exp_avg", moment).dequantize()
        return {"large": weights[0], "small": weights[1], "moment": moment, "again": again}

    return run


# Functions that make what is then computed under a default.
COMPUTATIONS = {
    f"layer {layer[0]} {getattr(layer[1], '__name__', layer[1])} {number}": functools.partial(layer_pass, *layer)
    for number, layer in enumerate(LAYERS)
}
COMPUTATIONS |= {f"fastmoe {gate.__name__}": functools.partial(fastmoe_pass, gate) for gate in FASTMOE}
COMPUTATIONS |= {name: functools.partial(dense_pass, make) for name, make in DENSE.items()}
COMPUTATIONS |= {make.__name__: functools.partial(optimizer_steps, make) for make in (Lamb, Lars, Muon, Adafactor)}
COMPUTATIONS["AdamW8bit"] = steps_of_8_bits


@pytest.mark.cover(1)
@pytest.mark.parametrize("under", [*DTYPES, "meta"], ids=str)
@pytest.mark.parametrize("name", COMPUTATIONS)
def test_a_float32_module_computes_the_same_under_every_default(name, under):
    if under == "meta" and not name.startswith("layer"):
        under = torch.float64
    results = []
    for chosen in (torch.float32, under):
        run = COMPUTATIONS[name]()
        with default(chosen):
            results.append(run())
    expected, found = results
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [*DENSE.values(), *FASTMOE], ids=[*DENSE, *(gate.__name__ for gate in FASTMOE)])
def test_other_layers_are_built_under_a_default(make, dtype):
    with default(dtype):
        layer = fastmoe_layer(make) if make in FASTMOE else make(WIDTH, EXPERTS)
        assert {p.dtype for p in layer.parameters()} == {dtype}
        torch.cat([*layer(inputs(dtype)[0])]).sum().backward()


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("gate", "expert", "options"), LAYERS)
def test_a_layer_built_under_a_default_trains_and_saves(gate, expert, options, dtype):
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


def moved(layer):
    """Steps of the bias by 1e-3 that add up to."""
    for _ in range(1000):
        load_E = torch.tensor([2.0, 0.0, 0.0, 0.0])
        stats = fmoe.RoutingStats(load_E, load_E.new_zeros(()), load_E.new_zeros(()), load_E.sum())
        layer.gate.record(fmoe.Routing(torch.empty(0, 1).long(), torch.empty(0, 1), stats=stats))
        fmoe.end_step(layer)
    return layer.gate.expert_bias_E.tolist()


def built(dtype, device="cpu", change=lambda layer: layer):
    """A layer that was made under defaults of dtype and device, and changed."""
    with default(dtype), torch.device(device):
        layer = change(build("sigmoid"))
    return layer.to_empty(device="cpu").reset_parameters() or layer if device == "meta" else layer


def assigned(layer, dtype):
    layer.load_state_dict({name: value.to(dtype) for name, value in layer.state_dict().items()}, assign=True)
    return layer


WAYS = {
    "default": built,
    "default, meta": lambda dtype: built(dtype, "meta"),
    "to": lambda dtype: build("sigmoid").to(dtype),
    "type": lambda dtype: build("sigmoid").type(dtype),
    "to, outside": lambda dtype: nn.Sequential(build("sigmoid")).to(dtype)[0],
    "copy": lambda dtype: copy.deepcopy(build("sigmoid").to(dtype)),
    "half": lambda dtype: build("sigmoid").half().bfloat16().to(dtype),
    "meta": lambda dtype: built(torch.float32, "meta", lambda layer: layer.to(dtype)),
    "assign": lambda dtype: assigned(build("sigmoid"), dtype),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_bias_keeps_its_precision(way, dtype):
    layer = WAYS[way](dtype)
    assert layer.gate.weight.dtype == dtype and layer.gate.expert_bias_E.dtype == torch.float32
    assert moved(layer) == pytest.approx([-1.0, 1.0, 1.0, 1.0], abs=1e-4)


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
