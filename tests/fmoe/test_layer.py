"""The layer's contracts beside its arithmetic."""

import dataclasses

import pytest
import torch
from compare import assert_close
from torch.utils.checkpoint import checkpoint

import fmoe
from fmoe.gates import NaiveRouter, SwitchRouter
from fmoe.kernels.gates import memory_shape
from fmoe.routing import Routing, RoutingGroups, RoutingStats


def layer_and_input(*shape, **options):
    torch.manual_seed(0)
    options = {"num_experts": 4, "d_hidden": 16, "seed": 1} | options
    return fmoe.FMoE(d_model=8, **options), torch.randn(*shape, 8, requires_grad=True)


def test_routing_groups_make_the_split_of_a_batch_irrelevant():
    """Capacity, noise and balance loss see sequences, whatever sequences lie beside them."""
    results = []
    for parts in (1, 3):
        layer, x = layer_and_input(6, 16, gate="gshard", loss_weights={"balance": 1.0})
        fmoe.set_loss_scale(1 / parts)
        try:
            outputs = []
            for i, part in enumerate(x.detach().chunk(parts)):
                fmoe.random.set_position(seed=0, step=0, first_token=i * (6 // parts) * 16)
                outputs.append(layer(part))
                outputs[-1].square().sum().backward()
        finally:
            fmoe.set_loss_scale(1.0)
        results.append((torch.cat(outputs), [p.grad for p in layer.parameters()], fmoe.metrics(layer)[""]))
    (whole, whole_grads, whole_report), (split, split_grads, split_report) = results
    assert_close(split, whole, 1e-6, "output")
    for a, b in zip(split_grads, whole_grads, strict=True):
        assert_close(a, b, 1e-5, "gradient")
    assert split_report.load == whole_report.load
    assert split_report.losses["balance"] == pytest.approx(whole_report.losses["balance"], rel=1e-5)


@pytest.mark.parametrize("sequences", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 3, 4, 100])
def test_groups_are_of_consecutive_tokens_of_a_sequence(sequences, size):
    groups = RoutingGroups(sequences, 4, size=size, sequence_first=True)
    in_order = torch.arange(sequences * 4)
    in_memory = in_order.view(sequences, 4).t().reshape(-1)
    sizes = [len(part) for part in in_order.split(size)]
    assert (groups.count, groups.sizes(), groups.padding) == (len(sizes), sizes, len(sizes) * size - len(in_order))
    assert groups.split(in_memory, pad=-1).flatten().tolist() == in_order.tolist() + [-1] * groups.padding
    assert torch.equal(groups.join(groups.split(in_memory)), in_memory)
    assert groups.valid(in_memory.device).sum() == len(in_order)
    assert memory_shape(groups) == ((sequences, 4) if sequences > 1 else (1, 4))


def test_sequence_first_is_the_transposed_input():
    layer, x = layer_and_input(5, 12, gate="gshard", gate_options={"capacity_factor": 0.5})
    fmoe.random.set_position(0, 0)
    expected = layer(x)
    layer.sequence_first = True
    fmoe.random.set_position(0, 0)
    assert torch.allclose(layer(x.transpose(0, 1).contiguous()).transpose(0, 1), expected, atol=1e-6)


def test_decisions_are_frozen_and_compare_by_identity():
    for kind, number in ((Routing, 2), (RoutingStats, 4)):
        one, other = (kind(*[torch.zeros(3, 2)] * number) for _ in range(2))
        assert one != other and len({one, other}) == 2
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.max_load = 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_changes_neither_noise_nor_statistics(use_reentrant):
    layer, x = layer_and_input(2, 8, gate="gshard")

    def gradients(call):
        layer.zero_grad()
        x.grad = None
        fmoe.random.set_position(seed=5, step=9)
        y = call(x)
        fmoe.random.set_position(seed=5, step=10)  # the next micro batch begins before this one's backward pass
        y.square().sum().backward()
        return [x.grad.clone(), *(p.grad.clone() for p in layer.parameters())], fmoe.metrics(layer, reset=True)[""]

    plain, plain_report = gradients(layer)
    again, report = gradients(lambda x: checkpoint(layer, x, use_reentrant=use_reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert report == plain_report


def test_noise_without_a_position_follows_manual_seed():
    layer, x = layer_and_input(2, 8, gate="switch", gate_options={"jitter": 0.5, "capacity_factor": None})
    torch.manual_seed(1)
    a, b = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), a)
    assert not torch.equal(a, b)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_losses_reach_the_router_by_default_and_can_be_turned_off():
    for weights, moved in (({}, True), ({"balance": 0.0, "z": 0.0}, False)):
        layer, x = layer_and_input(2, 8, loss_weights=weights)
        (layer(x).sum() * 0).backward()
        assert bool(layer.gate.weight.grad.abs().sum() > 0) is moved
    layer, x = layer_and_input(2, 8)
    layer.eval()
    (layer(x).sum() * 0).backward()
    assert layer.gate.weight.grad.abs().sum() == 0


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_the_input_is_one_view(is_contiguous):
    """Autograd adds up gradients of one tensor's uses in place, those of two views of it in memory of its own."""
    layer = fmoe.FMoE(d_model=8, num_experts=4, d_hidden=16, top_k=2, seed=0)
    x = torch.randn(3, 8, 5).transpose(1, 2) if not is_contiguous else torch.randn(3, 5, 8)
    x.requires_grad_()
    nodes, seen, into_x = [layer(x).grad_fn], set(), 0
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is not None:
                into_x += getattr(following, "variable", None) is x
                nodes.append(following)
    assert into_x == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropy_of_a_router(dtype):
    logits_TE = torch.randn(64, 16, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 50  # some are zero
    gate = NaiveRouter(16, 16).to(dtype)
    gate.weight.data = torch.eye(16, dtype=dtype)
    for rows in (logits_TE, 1e4 * torch.eye(16, dtype=dtype), torch.zeros(1, 16, dtype=dtype)):
        probs_TE = rows.double().softmax(-1)
        entropy = gate(rows, RoutingGroups(1, len(rows))).stats.entropy
        assert_close(entropy, torch.special.entr(probs_TE).sum(), 1e-5, "entropy")
    assert gate(torch.full((1, 16), torch.nan, dtype=dtype), RoutingGroups(1, 1)).stats.entropy.isnan()


def test_a_gate_is_a_name_a_class_or_an_instance():
    torch.manual_seed(0)
    by_name, x = layer_and_input(4, gate="naive")
    by_class, _ = layer_and_input(4, gate=NaiveRouter)
    assert torch.equal(by_name(x), by_class(x))
    gate = SwitchRouter(8, 4, jitter=0.0)
    by_instance, _ = layer_and_input(4, gate=gate)
    assert by_instance.gate is gate
    assert by_instance(x).shape == x.shape


def test_transformer_mlp_is_the_layer_with_ffn_experts():
    torch.manual_seed(0)
    mlp = fmoe.FMoETransformerMLP(d_model=8, d_hidden=16, num_experts=4, activation="relu", seed=1)
    layer, x = layer_and_input(4, expert_options={"activation": "relu"})
    assert torch.equal(mlp(x), layer(x))
    other = fmoe.FMoETransformerMLP(d_model=8, d_hidden=16, num_experts=4, expert="swiglu", seed=1)
    assert torch.equal(other(x), layer_and_input(4, expert="swiglu")[0](x))
    for name, value in (("expert_dp_comm", "dp"), ("expert_rank", 1)):
        with pytest.raises(fmoe.UserError, match=name):
            fmoe.FMoETransformerMLP(d_model=8, d_hidden=16, num_experts=4, **{name: value})


LIMIT = "num_experts=4"


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"top_k": 5}, LIMIT),
        ({"top_k": 0}, LIMIT),
        ({"top_k": 2.0}, "whole number"),
        ({"top_k": True}, "whole number"),
        ({"granularity": 2, "top_k": 0}, LIMIT),
        ({"granularity": 2, "top_k": 5}, LIMIT),
        ({"granularity": 3}, "d_hidden=16"),
        ({"seed": "x"}, "whole number"),
        ({"d_model": 0}, "positive"),
        ({"num_experts": 0}, "positive"),
        ({"d_hidden": 0}, "positive"),
        ({"d_model": None}, ""),
        ({"moe_group": 2}, "process group"),
        ({"loss_scale": 2.0}, "function"),
        ({"aux_loss": "atuo"}, "auto"),
        ({"shared_expert": 0}, "positive"),
        ({"shared_expert": True}, "whole number"),
        ({"exchange_options": 3}, "mapping"),
        ({"expert_options": "x"}, "mapping"),
        ({"expert_options": {"dropout": "x"}}, "number"),
        ({"expert_options": {"dropout": 1.0}}, "1)"),
        ({"expert_options": {"activation": "gulu"}}, "gelu"),
        ({"expert": "swiglu", "expert_options": {"gated": 2}}, "true or false"),
        ({"expert": "fnn"}, "'ffn'"),
        ({"shared_expert": 8, "shared_options": {"gate": True}}, "activation, "),
        ({"gate_options": [1]}, "mapping"),
        ({"gate": "swich"}, "'switch'"),
        ({"gate": "switch", "gate_options": {"jiter": 0.1}}, "jitter"),
        ({"gate": "switch", "gate_options": {"jitter": 1.5}}, "1)"),
        ({"gate": "switch", "gate_options": {"capacity_factor": 0}}, "positive"),
        ({"gate": "sigmoid", "gate_options": {"routed_scale": "x"}}, "number"),
        ({"moegroup": None}, "'moe_group'"),
        ({"capacity": 3}, ""),
    ],
    ids=str,
)
def test_invalid_options(options, limit):
    """The error has key, value and limit."""
    with pytest.raises(fmoe.UserError) as error:
        fmoe.MoE.build(**{"d_model": 8, "num_experts": 4, "d_hidden": 16} | options)
    key, value = list(options.items())[-1]
    if isinstance(value, dict):
        key, value = list(value.items())[-1]
    message = str(error.value)
    assert key in message and (repr(value) in message or value is None) and limit in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fmoe.FMoE(d_model=8, num_experts=4, gate=NaiveRouter(8, 5)), ["gate.num_experts=5", LIMIT]),
        (lambda: fmoe.FMoE(d_model=8, num_experts=4)(torch.randn(3, 7)), ["(3, 7)", "d_model=8"]),
        (lambda: fmoe.FMoE(d_model=8, num_experts=4)(torch.ones(3, 8, dtype=torch.int64)), ["torch.int64"]),
        (
            lambda: fmoe.FMoE(d_model=8, num_experts=4)(torch.randn(3, 8), torch.ones(2, dtype=torch.bool)),
            ["mask", "(2,)", "(3,)"],
        ),
        (lambda: fmoe.FMoE(d_model=8, num_experts=4)(torch.randn(3, 8), torch.ones(3)), ["mask", "torch.float32"]),
        (lambda: fmoe.FMoE(d_model=8, num_experts=4)(torch.randn(3, 8).double()), ["torch.float64"]),
        (lambda: fmoe.FMoE(num_experts=4), ["d_model"]),
        (lambda: fmoe.FMoE(d_model=8, num_experts=4, loss_weights={"balnce": 0}), ["'balnce'", "balance"]),
        (lambda: fmoe.fmoefy(torch.nn.Linear(2, 2), 4), ["Linear"]),
    ],
)
def test_invalid_inputs(make, says):
    with pytest.raises(fmoe.UserError) as error:
        make()
    assert all(part in str(error.value) for part in says) and "\n" not in str(error.value)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_losses_share_on_a_rank_may_be_a_tensor(scale):
    """As in Megatron, which multiplies it by the number of tokens."""
    layer, _ = layer_and_input(1, loss_scale=lambda: scale)
    arguments = (torch.device("cpu"), torch.float32)
    of_tensor = layer.aux.gradients((0.5, 2.0), torch.tensor(3.0), *arguments)
    assert of_tensor.tolist() == layer.aux.gradients((0.5, 2.0), 3.0, *arguments).tolist() == [1.5 * scale, 6 * scale]
