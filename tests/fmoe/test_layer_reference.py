"""FMoE against a float64 loop over tokens: values, every gradient, for each gate, with capacity and without."""

import pytest
import torch
from compare import assert_close
from loop_reference import LoopMoE

import fmoe
from fmoe.layout import Layout

BATCH, LENGTH, WIDTH, HIDDEN, EXPERTS = 3, 10, 12, 20, 5


def build(gate, top_k, capacity_factor, *, dtype=torch.float32, training=True, **options):
    layer = fmoe.FMoE(
        d_model=WIDTH,
        num_experts=EXPERTS,
        d_hidden=HIDDEN,
        top_k=top_k,
        gate=gate,
        gate_options={"capacity_factor": capacity_factor, "eval_capacity_factor": capacity_factor},
        loss_weights={"balance": 0.5, "z": 0.1},
        seed=7,
        **options,
    ).to(dtype)
    with torch.no_grad():
        layer.gate.weight.mul_(6)  # decided routers: uneven loads, second choices that are dropped now and then
    return layer.train(training)


def noise_of(layer, x):
    """The noise that the layer will use, as inputs for the loop."""
    _, groups = Layout(WIDTH).tokens(x, seed=layer.seed)
    jitter = groups.local_uniform16(WIDTH, "switch jitter", x.device).view(BATCH, LENGTH, WIDTH)
    second = groups.uniform(max(layer.gate.top_k - 1, 1), "gshard second expert", x.device)
    return jitter.double(), second.view(BATCH, LENGTH, -1).double()


CASES = [
    pytest.param(gate, top_k, factor, id=f"{gate}-top{top_k}-{'dropless' if factor is None else f'capacity{factor}'}")
    for gate, tops in (("naive", (1, 2, 5)), ("switch", (1, 2)), ("gshard", (1, 2, 3)))
    for top_k in tops
    for factor in (None, 0.6, 1.25)
]


@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("gate", "top_k", "factor"), CASES)
def test_values_and_every_gradient(gate, top_k, factor, training, dtype):
    torch.manual_seed(3)
    layer = build(gate, top_k, factor, dtype=dtype, training=training)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype)
    fmoe.random.set_position(seed=1, step=4)  # fixes the noise
    noise = noise_of(layer, x)
    y = layer(x)
    (y * weight).sum().backward()

    loop = LoopMoE(layer, factor)
    x64 = x.detach().double().requires_grad_()
    y64, auxiliary, dropped = loop.forward(x64, *noise)
    loss = (y64 * weight.double()).sum() + (auxiliary if training else 0)
    loss.backward()

    limit = 1e-5 if dtype == torch.float32 else 1e-10
    assert_close(y, y64, limit, "output")
    assert_close(x.grad, x64.grad, limit, "gradient of the input")
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, loop.parameters[name].grad, limit, f"gradient of {name}")
    if factor == 0.6:
        assert dropped > 0, "the case is meant to drop tokens"
    if training:
        report = fmoe.metrics(layer)[""]
        kept = sum(round(share * report.tokens * top_k) for share in report.load)
        assert report.tokens == BATCH * LENGTH
        assert kept or not report.load
        assert report.drop_rate == pytest.approx(dropped / (dropped + _kept(layer, x, noise)), abs=1e-6)


def _kept(layer, x, noise):
    fmoe.random.set_position(seed=1, step=4)
    x_TD, groups = Layout(WIDTH).tokens(x, seed=layer.seed)
    return int((layer.gate(x_TD, groups).expert_TK >= 0).sum())


@pytest.mark.parametrize("gated", [False, True], ids=["ffn", "glu"])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_expert_variants(gated, bias):
    torch.manual_seed(0)
    layer = build("naive", 2, None, expert_options={"gated": gated, "bias": bias})
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    layer(x).square().sum().backward()
    loop = LoopMoE(layer, None)
    x64 = x.detach().double().requires_grad_()
    y64, auxiliary, _ = loop.forward(x64, torch.zeros(BATCH, LENGTH, WIDTH), torch.zeros(BATCH, LENGTH, 1))
    (y64.square().sum() + auxiliary).backward()
    assert_close(x.grad, x64.grad, 1e-5, "gradient of the input")
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, loop.parameters[name].grad, 1e-5, f"gradient of {name}")


def test_bf16_model_keeps_the_router_in_fp32():
    torch.manual_seed(0)
    layer = build("naive", 2, None, dtype=torch.bfloat16)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.float().square().sum().backward()
    loop = LoopMoE(layer, None)
    y64, _, _ = loop.forward(x.detach().double(), torch.zeros(BATCH, LENGTH, WIDTH), torch.zeros(BATCH, LENGTH, 1))
    assert y.dtype == torch.bfloat16
    assert_close(y, y64, 2e-2, "output")
    x_TD, groups = Layout(WIDTH).tokens(x)
    assert layer.gate(x_TD, groups).weight_TK.dtype == torch.float32


def test_autocast_equals_a_16_bit_layer_within_rounding():
    torch.manual_seed(0)
    layer = build("naive", 2, None)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert_close(y, expected, 2e-2, "output under autocast")
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
