"""`MoE` by itself and under `FMoE`: what users of a layer rely on besides its numbers."""

import copy

import pytest
import torch
from torch import nn

import fmoe
from fmoe import random
from fmoe.gates import GATES
from fmoe.parallel import is_expert

OPTIONS = {"d_model": 16, "num_experts": 4, "d_hidden": 24, "top_k": 2, "seed": 3}


def tokens(dtype=torch.float32):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("gate", sorted(GATES))
def test_both_classes_compute_the_same(gate):
    options = {**OPTIONS, "gate": gate, "top_k": None, "shared_expert": 8}
    ids = torch.arange(8)
    results = []
    for build in (fmoe.MoE.build, fmoe.FMoE, fmoe.FMoE.build):
        layer, x = build(**options), tokens().requires_grad_()
        torch.manual_seed(7)  # of the gate's noise
        y = layer(x, token_ids=ids)
        y.square().sum().backward()
        gradients = [None if p.grad is None else p.grad for p in layer.parameters()]
        results.append([y, x.grad, *gradients, torch.tensor(fmoe.metrics(layer)[""].load)])
    for other in results[1:]:
        assert len(other) == len(results[0])
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_parameters_keep_their_order_which_optimizer_states_follow():
    names = [name.split(".")[0] for name, _ in fmoe.FMoE(**OPTIONS, shared_expert=8).named_parameters()]
    assert list(dict.fromkeys(names)) == ["gate", "experts", "shared"]


def test_check_finds_weights_that_are_not_finite_of_any_gate():
    old = fmoe.FMoE(num_expert=4, d_model=16, expert=lambda width: nn.Linear(width, width), check=True)
    for layer in (old, fmoe.FMoE(**OPTIONS, check=True)):
        with pytest.raises(fmoe.UserError, match="not finite"):
            layer(tokens() * float("nan"))


class Untold(nn.Module):
    """A user's gate, which takes float32 only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        value, index = self.linear(x).topk(2)
        return index, value.softmax(-1)


def test_a_wrong_dtype_is_refused_before_the_gate():
    with pytest.raises(fmoe.UserError, match=r"torch\.float64, its experts are torch\.float32"):
        fmoe.FMoE(**{**OPTIONS, "gate": Untold()})(tokens(torch.float64))


def test_the_gate_that_decides_records():
    layer = fmoe.MoE.build(**OPTIONS, gate="sigmoid")
    replica = copy.copy(layer)  # as nn.DataParallel makes one
    replica.__dict__["_modules"] = dict(layer._modules)
    replica.gate = copy.deepcopy(layer.gate)
    layer(tokens()).sum().backward()
    assert layer.gate._load_E.sum() == 16 and replica.gate._load_E.sum() == 0
    layer.add_module("gate", copy.deepcopy(replica.gate))
    layer(tokens()).sum().backward()
    assert layer.gate._load_E.sum() == 16
    found = []
    layer.gate.record = found.append
    layer(tokens()).sum().backward()
    assert len(found) == 1


def test_a_module_may_show_the_metrics_of_its_layer():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = fmoe.FMoE(**OPTIONS)
            self.metrics = self.layer.metrics

    block = Block().eval()
    with fmoe.metrics.counting(block):
        block.layer(tokens())
        assert fmoe.metrics(block.layer)[""].tokens == 8


def test_settings_can_be_changed_after_the_constructor():
    layer = fmoe.FMoE(**OPTIONS, gate="switch")
    layer.name, layer.num_experts, layer.first_expert = "block 7", 4, 0
    layer.loss_weights = {"balance": 1.0}
    with pytest.raises(fmoe.UserError, match="loss_weights of block 7 has no entry for"):
        layer(tokens())
    layer.loss_weights, layer.aux_loss = {"balance": 1.0, "z": 0.0}, "manual"
    layer(tokens())
    assert fmoe.collect_losses(layer).requires_grad and layer.aux_loss == "manual"
    layer.metrics = type(layer.metrics)(4, ("balance",))
    assert fmoe.metrics(layer)[""].tokens == 0


def test_granularity_multiplies_the_gates_default_top_k():
    for gate, top_k in (("naive", 8), ("switch", 4)):
        layer = fmoe.MoE.build(d_model=8, num_experts=8, d_hidden=8, granularity=4, gate=gate, seed=0)
        assert (layer.num_experts, layer.gate.top_k, layer.experts.d_hidden) == (32, top_k, 2)


@pytest.mark.parametrize("first", [True, False])
def test_each_bias_follows_the_initialiser_of_its_matrix(first):
    options = {"init_method" if first else "output_init_method": torch.nn.init.ones_}
    layer = fmoe.MoE.build(d_model=8, num_experts=2, d_hidden=8, expert_options=options, seed=0)
    given, other = ("in", "out") if first else ("out", "in")
    parameters = dict(layer.experts.named_parameters())
    assert (parameters[f"weight_{given}"] == 1).all() and (parameters[f"bias_{given}"] == 0).all()
    assert parameters[f"weight_{other}"].std() > 0 and parameters[f"bias_{other}"].std() > 0


@pytest.mark.parametrize("gate", sorted(set(GATES) - {"topology"}))
@pytest.mark.parametrize("cls", [fmoe.MoE, fmoe.FMoE])
def test_values_of_padding_change_nothing(cls, gate):
    layer = cls.build(d_model=8, num_experts=4, d_hidden=16, gate=gate, seed=0, shared_expert=8)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[:, 4:] = False
    ids, results = torch.randint(0, 50, (2, 6)), []
    for fill in (0.0, torch.nan):
        random.set_position(seed=1, step=2)
        x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3)).masked_fill(~mask.unsqueeze(-1), fill)
        x.requires_grad_()
        layer.zero_grad()
        y = layer(x, mask, token_ids=ids)
        y.sum().backward()
        gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        results.append([y.detach(), x.grad, *gradients, layer.metrics.take()])
    for zero, nan in zip(*results, strict=True):
        assert torch.equal(zero, nan) if isinstance(zero, torch.Tensor) else zero == nan


@pytest.mark.parametrize(
    "expert", ["ffn", lambda width: nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width))]
)
def test_reset_parameters_draws_what_the_constructor_drew(expert):
    """Also of a layer from the meta device, whose experts keep their mark."""
    options = {**OPTIONS, "expert": expert, "shared_expert": 8, "shared_gate": True, "gate": "switch"}
    drawn = fmoe.MoE.build(**options).state_dict()
    with torch.device("meta"):
        empty = fmoe.MoE.build(**options).to_empty(device="cpu")
    for layer in (fmoe.MoE.build(**options), empty):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(torch.nan)
        layer.reset_parameters()
        assert layer.state_dict().keys() == drawn.keys()
        assert all(torch.equal(value, drawn[name]) for name, value in layer.state_dict().items())
        assert all(is_expert(parameter) for parameter in layer.experts.parameters())


class HasBaseLayer(fmoe.gates.NaiveRouter):
    """A user's gate with names that PEFT's adapters have too."""

    get_base_layer = True
    modules_to_save = original_module = None


def test_a_gate_may_have_the_names_of_an_adapter():
    layer = fmoe.MoE.build(d_model=8, num_experts=4, gate=HasBaseLayer(8, 4))
    assert layer(torch.randn(5, 8)).shape == (5, 8)
