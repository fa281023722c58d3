"""Soft MoE and MMoE against their formulas, token by token in float64."""

import pytest
import torch
from compare import assert_close

import fmoe
from fmoe.optim import hidden_matrices


def expert(layer, e, x):
    p = {name: value[e].double() for name, value in layer.experts.named_parameters()}
    return p["weight_out"] @ torch.nn.functional.gelu(p["weight_in"] @ x + p["bias_in"]) + p["bias_out"]


def test_soft_moe_is_algorithm_1():
    torch.manual_seed(0)
    layer = fmoe.SoftMoE(8, num_experts=3, slots_per_expert=2, d_hidden=16, seed=1)
    with torch.no_grad():
        layer.scale.fill_(3.0)
    x = torch.randn(2, 5, 8, requires_grad=True)
    y = layer(x)
    x64 = x.detach().double().requires_grad_()
    rows = []
    for sequence in x64:
        unit = torch.stack([t / t.norm() for t in sequence])
        phi = torch.stack([3.0 * s / s.norm() for s in layer.slots.double()])
        logits = unit @ phi.T
        dispatch, combine = logits.exp() / logits.exp().sum(0), logits.exp() / logits.exp().sum(1, keepdim=True)
        slots = [sum(dispatch[t, q] * sequence[t] for t in range(5)) for q in range(6)]
        outs = [expert(layer, q // 2, slot) for q, slot in enumerate(slots)]
        rows.append(torch.stack([sum(combine[t, q] * outs[q] for q in range(6)) for t in range(5)]))
    expected = torch.stack(rows)
    assert_close(y, expected, 1e-5, "output")
    weight = torch.randn(2, 5, 8)
    (y * weight).sum().backward()
    (expected * weight.double()).sum().backward()
    assert_close(x.grad, x64.grad, 1e-5, "gradient of the input")
    assert all(p.grad is not None for p in layer.parameters())


def test_soft_moe_leaves_padding_out():
    layer = fmoe.SoftMoE(8, num_experts=3, slots_per_expert=2, seed=1)
    x = torch.randn(2, 6, 8)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[:, 4:] = False
    x[:, 5] = float("nan")
    y = layer(x, mask)
    assert (y[:, 4:] == 0).all()
    assert_close(y[:, :4], layer(x[:, :4]), 1e-5, "the tokens that are there")
    for wrong in (mask.t(), mask.int()):
        with pytest.raises(fmoe.UserError, match=r"mask is torch.*torch\.bool \(2, 6\)"):
            layer(x, wrong)


def test_mmoe_mixes_the_same_experts_for_each_task():
    layer = fmoe.MMoE(8, num_experts=4, num_tasks=3, d_hidden=16, seed=1)
    x = torch.randn(2, 5, 8, requires_grad=True)
    outputs = layer(x)
    assert len(outputs) == 3
    for n, y in enumerate(outputs):
        for t, token in enumerate(x.detach().double().reshape(-1, 8)):
            weight = (layer.gates[n].double() @ token).softmax(0)
            expected = sum(weight[e] * expert(layer, e, token) for e in range(4))
            assert_close(y.reshape(-1, 8)[t], expected, 1e-5, f"task {n} token {t}")
    outputs[1].sum().backward()
    assert (layer.gates.grad[0] == 0).all() and (layer.gates.grad[1] != 0).any()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fmoe.SoftMoE(8, 0), "num_experts=0"),
        (lambda: fmoe.SoftMoE(8, 2, 0), "slots_per_expert=0"),
        (lambda: fmoe.MMoE(8, 2, 0), "num_tasks=0"),
        (lambda: fmoe.MMoE(8, 2, 2)(torch.randn(3, 7)), "(3, 7)"),
    ],
)
def test_what_cannot_be_says_so(make, says):
    with pytest.raises(fmoe.UserError) as error:
        make()
    assert says in str(error.value)


class Block(torch.nn.Linear):
    """A user's expert."""

    def __init__(self, d_model):
        super().__init__(d_model, d_model)


@pytest.mark.cover(1)
@pytest.mark.parametrize("expert", ["ffn", "swiglu", Block])
@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (0, 8), (2, 0, 3, 8), (0, 0, 8)])
@pytest.mark.parametrize("make", [fmoe.SoftMoE, lambda d, e, n, **o: fmoe.MMoE(d, e, n, **o)], ids=["soft", "mmoe"])
def test_no_tokens_give_no_outputs_and_gradients_of_zero(make, shape, expert):
    layer, x = make(8, 4, 3, expert=expert), torch.zeros(shape, requires_grad=True)
    options = [{}]
    if isinstance(layer, fmoe.SoftMoE):
        options.append({"mask": torch.ones(shape[:-1], dtype=torch.bool)})
    for given in options:
        layer.zero_grad()
        outputs = layer(x, **given)
        outputs = outputs if isinstance(outputs, list) else [outputs]
        assert all(y.shape == shape for y in outputs)
        sum(y.sum() for y in outputs).backward()
        assert x.grad.shape == shape
        assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("expert", ["ffn", Block, lambda d: torch.nn.Sequential(torch.nn.Linear(d, d))])
@pytest.mark.parametrize("make", [fmoe.SoftMoE, fmoe.MMoE], ids=["soft", "mmoe"])
def test_what_was_built_on_the_meta_device_is_drawn_as_any_other(make, expert):
    layer = make(8, 4, 3, expert=expert, seed=5)
    with torch.device("meta"):
        other = make(8, 4, 3, expert=expert, seed=5)
    assert all(p.is_meta for p in other.parameters())
    other.to_empty(device="cpu")
    for parameter in other.parameters():
        parameter.data.fill_(float("nan"))
    other.reset_parameters()
    for name, value in layer.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize("make", [fmoe.SoftMoE, fmoe.MMoE], ids=["soft", "mmoe"])
def test_routers_are_no_hidden_matrices(make):
    layer = make(8, 4, 3)
    names = {p: name for name, p in layer.named_parameters()}
    assert {names[p] for p in hidden_matrices(layer)} == {"experts.weight_in", "experts.weight_out"}
