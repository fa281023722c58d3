"""Upcycling: for which gates the output is unchanged, what is rescaled, what is refused; noise, granularity, seeds."""

import copy

import pytest
import torch
from compare import assert_close, relative_error
from torch import nn
from torch.nn import functional as F

import fmoe
from fmoe.gates import GATES
from fmoe.gates.router import Choice

DROPLESS = {"capacity_factor": None, "eval_capacity_factor": None}


class Net(nn.Module):
    def __init__(self, width=16, hidden=24, depth=2, activation=nn.GELU, bias=True):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden, bias), activation(), nn.Linear(hidden, width, bias))
            for _ in range(depth)
        )

    def forward(self, x):
        for block in self.blocks:
            x = F.layer_norm(x + block(x), x.shape[-1:])
        return x


def net_and_input(**options):
    torch.manual_seed(0)
    return Net(**options), torch.randn(4, 32, options.get("width", 16))


def moe_of(model, index=0):
    return model.blocks[index][0]


def assert_unchanged(model, dense, x, limit=1e-5):
    for training in (True, False):
        model.train(training)
        assert_close(model(x), dense(x), limit, f"output, training={training}")


@pytest.mark.parametrize(
    ("experts", "options"),
    [
        (4, {}),
        (4, {"gate": "naive", "top_k": 1}),
        (4, {"gate": "naive", "top_k": 4}),
        (1, {"top_k": 1}),
        (4, {"gate": "gshard", "gate_options": {**DROPLESS, "random_routing": False}}),
        (2, {"gate": "gshard"}),  # both experts of every token, room for all: it drops the second at random, see below
        (8, {"gate": "switch", "gate_options": DROPLESS}),
        (8, {"gate": "switch", "gate_options": {**DROPLESS, "jitter": 0.5}}),
        (8, {"gate": "switch", "top_k": 3, "gate_options": DROPLESS}),
        (4, {"gate": "switch", "gate_options": {"capacity_factor": 4.0, "eval_capacity_factor": 4.0}}),
        (4, {"group_size": 8}),
    ],
    ids=str,
)
def test_output_is_unchanged(experts, options):
    model, x = net_and_input()
    dense = copy.deepcopy(model)
    if options == {"gate": "gshard"}:
        options = {"gate": "gshard", "gate_options": {"random_routing": False}}
    fmoe.fmoefy(model, experts, **options)
    assert_unchanged(model, dense, x)
    assert moe_of(model).num_experts == experts


def test_probabilities_are_made_up_for_in_the_output_map():
    model, x = net_and_input()
    dense = copy.deepcopy(model)
    fmoe.fmoefy(model, 8, gate="switch", gate_options=DROPLESS, seed=0)
    experts = moe_of(model).experts
    assert_close(experts.weight_out[5] / 8, dense.blocks[0][2].weight, 1e-5, "weight_out")
    assert_close(experts.bias_out[5] / 8, dense.blocks[0][2].bias, 1e-5, "bias_out")
    assert torch.equal(experts.weight_in[5], dense.blocks[0][0].weight)
    model(x).sum().backward()
    assert max(fmoe.metrics(model)["blocks.0.0"].load) < 0.5, "near zero, the router must tell experts apart still"
    assert moe_of(model).gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"gate": "switch"},
            ["'switch'", "capacity_factor=1.25, eval_capacity_factor=2.0", f"gate_options={DROPLESS}"],
        ),
        (
            {"gate": "gshard"},
            ["capacity_factor=1.0", "at random", f"gate_options={ {**DROPLESS, 'random_routing': False} }"],
        ),
        ({"gate": "gshard", "gate_options": DROPLESS}, ["at random", "gate_options={'random_routing': False}"]),
        ({"gate_options": {"capacity_factor": 1.0}}, ["NaiveGate|NaiveRouter", "capacity_factor=1.0"]),
        ({"granularity": 0}, ["granularity=0 must be at least 1"]),
        ({"granularity": 5}, ["granularity=5", "24 hidden units of blocks.0"]),
        ({"granularity": 2, "top_k": 1}, ["top_k=1", "granularity=2"]),
        ({"granularity": 3, "top_k": 3}, ["num_experts=8", "granularity=3"]),
        ({"granularity": 2, "gate": "switch", "top_k": 2, "gate_options": DROPLESS}, ["'switch'", "granularity=2"]),
        # Its weights are below one only where the logits of two experts are close.
        ({"gate": "sparsemixer", "top_k": 1}, ["'sparsemixer'", "times the dense block's output"]),
        ({"noise": -0.1}, ["noise=-0.1"]),
        ({"noise": 0.1, "upcycle": False}, ["noise=0.1", "upcycle=False"]),
        ({"d_hidden": 12}, ["d_hidden"]),
        ({"expert": "ffn"}, ["expert"]),
        ({"expert_options": {"activation": "relu"}}, ["expert_options['activation']"]),
        ({"top_k": 9}, ["top_k=9"]),
        ({"gate": "swich"}, ["did you mean 'switch'"]),
        ({"d_model": 16}, ["d_model=16"]),
    ],
    ids=str,
)
def test_what_stands_against_it_is_told_and_nothing_changed(options, parts):
    model, _ = net_and_input()
    before = copy.deepcopy(model)
    with pytest.raises(fmoe.UserError) as error:
        fmoe.fmoefy(model, 8, **options)
    for part in parts:
        assert any(choice in str(error.value) for choice in part.split("|")), str(error.value)
    assert "\n" not in str(error.value)
    assert str(model) == str(before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_exact_false_takes_what_drops_tokens():
    model, x = net_and_input()
    dense = copy.deepcopy(model)
    fmoe.fmoefy(model, 4, gate="gshard", exact=False)
    assert 1e-3 < relative_error(model(x), dense(x)) < 1
    assert torch.equal(moe_of(model).experts.weight_out[0], dense.blocks[0][2].weight)


class TwoThirds(GATES["naive"]):
    """Weights that sum to 2/3 whatever the token: a factor that the experts can take."""

    def choose(self, scores, groups):
        logit_TK, expert_TK = scores.logits_TE.topk(self.top_k, dim=-1)
        return Choice(expert_TK, logit_TK.softmax(-1) * 2 / 3)


class ByToken(GATES["naive"]):
    """Weights that sum to something else for each token, by no router that could be made quiet."""

    def choose(self, scores, groups):
        weight_TK, expert_TK = scores.probs_TE.topk(self.top_k, dim=-1)
        return Choice(expert_TK, weight_TK + torch.linspace(0, 1, len(weight_TK)).unsqueeze(1))


def test_a_gate_of_the_users_own_is_measured():
    model, x = net_and_input()
    dense = copy.deepcopy(model)
    fmoe.fmoefy(model, 4, gate=TwoThirds)
    assert_unchanged(model, dense, x)
    assert_close(moe_of(model).experts.weight_out[0] / 1.5, dense.blocks[0][2].weight, 1e-5, "weight_out")
    model, _ = net_and_input()
    with pytest.raises(fmoe.UserError, match=r"gate=ByToken: tokens get 0\.\d+ to \d\.\d+ times"):
        fmoe.fmoefy(model, 4, gate=ByToken)


def test_a_ready_gate_serves_one_layer_and_is_left_alone_by_an_error():
    gate = GATES["switch"](d_model=16, num_experts=8, top_k=1, **DROPLESS)
    weight = gate.weight.detach().clone()
    model, x = net_and_input()
    with pytest.raises(fmoe.UserError, match="2 layers need one each"):
        fmoe.fmoefy(model, 8, gate=gate)
    with pytest.raises(fmoe.UserError, match="granularity=2"):
        fmoe.fmoefy(model, 8, gate=gate, layers=[1], granularity=2)
    assert torch.equal(gate.weight, weight)
    dense = copy.deepcopy(model)
    fmoe.fmoefy(model, 8, gate=gate, layers=[1])
    assert moe_of(model, 1).gate is gate
    assert_unchanged(model, dense, x)


@pytest.mark.parametrize(("granularity", "top_k"), [(2, 2), (2, 4), (4, 4), (3, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_slices_of_the_block_add_up(granularity, top_k, bias):
    model, x = net_and_input(bias=bias)
    dense = copy.deepcopy(model)
    fmoe.fmoefy(model, 12, granularity=granularity, top_k=top_k, gate="naive")
    layer = moe_of(model)
    assert layer.experts.d_hidden == 24 // granularity
    assert_unchanged(model, dense, x)
    first, second = layer.gate.weight[:granularity], layer.gate.weight[granularity]
    assert torch.equal(first, first[:1].expand_as(first))
    assert not torch.equal(first[0], second)


def test_a_shared_expert_would_change_the_output():
    model, x = net_and_input()
    dense = copy.deepcopy(model)
    for exact in (True, False):
        with pytest.raises(fmoe.UserError, match=r"shared_expert .*upcycle=True"):
            fmoe.fmoefy(model, 4, shared_expert=8, exact=exact)
    assert_unchanged(model, dense, x)


class Larger(nn.Module):
    """Replaces both values of a pair by the larger one."""

    def forward(self, x):
        return x.unflatten(-1, (-1, 2)).amax(-1).repeat_interleave(2, -1)


@pytest.mark.parametrize("activation", [lambda: nn.Softmax(dim=-1), Larger])
def test_granularity_needs_an_activation_of_single_values(activation):
    model, _ = net_and_input(activation=activation)
    with pytest.raises(fmoe.UserError, match="elementwise"):
        fmoe.fmoefy(model, 4, granularity=2)
    fmoe.fmoefy(model, 4)


def test_noise_is_relative_keyed_and_on_weights_alone():
    dense, _ = net_and_input(width=64, hidden=128)
    made = {}
    for name, options in (("all", {}), ("again", {}), ("second", {"layers": [1]}), ("other", {"seed": 2})):
        torch.manual_seed(len(made))
        state = torch.get_rng_state()
        made[name] = fmoe.fmoefy(copy.deepcopy(dense), 4, noise=0.1, **{"seed": 1, **options})
        assert torch.equal(torch.get_rng_state(), state), "a seed was given: torch's generator is not touched"
    for a, b in zip(made["all"].parameters(), made["again"].parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(moe_of(made["all"], 1).parameters(), moe_of(made["second"], 1).parameters(), strict=True):
        assert torch.equal(a, b), "a layer depends on which others were chosen"
    experts, weight = moe_of(made["all"]).experts, dense.blocks[0][0].weight
    noise = (experts.weight_in - weight).detach()
    assert noise.std() == pytest.approx(0.1 * weight.square().mean().sqrt().item(), rel=0.05)
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(experts.bias_in[2], dense.blocks[0][0].bias)
    for name, parameter in moe_of(made["other"]).named_parameters():
        assert "bias" in name or not torch.equal(parameter, dict(moe_of(made["all"]).named_parameters())[name]), name


def test_expert_dropout_can_be_added_and_weights_drawn_anew():
    model, x = net_and_input()
    fmoe.fmoefy(model, 4, expert_options={"dropout": 0.5})
    assert not torch.equal(model.train()(x), model(x))
    layer = moe_of(model)
    layer.reset_parameters()
    assert not torch.equal(layer.experts.weight_in[0], layer.experts.weight_in[1])


def test_meta_device():
    with torch.device("meta"):
        model, _ = net_and_input()
    with pytest.raises(fmoe.UserError, match=r"weights of blocks\.0\.0, which is on the meta device"):
        fmoe.fmoefy(model, 4)
    with torch.device("meta"):
        fmoe.fmoefy(model, 4, upcycle=False)
    assert all(p.is_meta for p in model.parameters())
    assert moe_of(model).experts.weight_in.allreduce is False
