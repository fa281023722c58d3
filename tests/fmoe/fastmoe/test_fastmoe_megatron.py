"""`fmoe.megatron` without Megatron; on a megatron-core model it is tests/megatron_patch/test_patch_fastmoe.py."""

import argparse
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fmoe.megatron import (
    MegatronMLP,
    add_fmoe_args,
    fmoefy,
    get_balance_profile,
    patch_forward_step,
    patch_model_provider,
    save_checkpoint,
)
from forks import values
from torch import nn

import fmoe
from fmoe.gates import GShardGate, NaiveGate, SwitchGate

S, B, D, H = 5, 2, 8, 24


class OldMLP(nn.Module):
    """The contract of Megatron-LM's MLP: output and a bias that is added later."""

    def __init__(self):
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(D, H), nn.Linear(H, D, bias=False)

    def forward(self, x):
        return self.dense_4h_to_h(nn.functional.gelu(self.dense_h_to_4h(x))), torch.zeros(D)


class OldLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = OldMLP()

    def forward(self, x):
        y, bias = self.mlp(x)
        return x + y + bias


class OldModel(nn.Module):
    def __init__(self, stacks):
        super().__init__()
        self.language_model = nn.Module()
        for name, depth in stacks.items():
            stack = nn.Module()
            stack.layers = nn.ModuleList(OldLayer() for _ in range(depth))
            setattr(self.language_model, name, stack)

    def layers(self):
        return [layer for stack in self.language_model.children() for layer in stack.layers]

    def forward(self, x):
        for layer in self.layers():
            x = layer(x)
        return x


@pytest.mark.parametrize("stacks", [{"transformer": 2}, {"encoder": 2}, {"encoder": 1, "decoder": 2}], ids=str)
def test_the_readmes_line_on_models_of_the_old_layout(stacks):
    """FastMoE's asserted for want of ``megatron_version``, and had no hidden width."""
    torch.manual_seed(0)
    model = OldModel(stacks).eval()
    assert fmoefy(model, fmoe_num_experts=3) is model
    for layer in model.layers():
        assert type(layer.mlp) is MegatronMLP and not layer.mlp.training
        assert (layer.mlp.num_expert, layer.mlp.top_k, layer.mlp.experts[0].htoh4.weight.shape) == (3, 2, (1, H, D))
        assert type(layer.mlp.gate) is NaiveGate
    model.train()(torch.randn(S, B, D)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    profile = get_balance_profile()
    assert len(profile["Lmax-over-Lmean"]) == sum(stacks.values())
    assert all(value >= 1 for value in profile["Lmax-over-Lmean"])


def test_everything_that_fmoefy_is_told():
    wrapped = nn.Module()
    wrapped.module = model = OldModel({"encoder": 1}).to(torch.bfloat16)
    fmoefy(wrapped, 4, distributed_experts=False, hidden_hidden_size=6, top_k=1, gate=GShardGate)
    mlp = model.layers()[0].mlp
    assert (mlp.num_expert, mlp.top_k, type(mlp.gate)) == (4, 1, GShardGate)
    assert mlp.experts[0].htoh4.weight.shape == (1, 6, D) and mlp.experts[0].htoh4.weight.dtype == torch.bfloat16
    assert {p.dp_comm for p in mlp.experts.parameters()} == {"dp"}
    with pytest.raises(fmoe.UserError, match="the mlp of layer 0 has experts already"):
        fmoefy(wrapped, 4)
    assert model.layers()[0].mlp is mlp
    with pytest.raises(fmoe.UserError, match="fmoe_num_experts is missing"):
        fmoefy(model)
    with pytest.raises(fmoe.UserError, match="found no feed-forward block"):
        fmoefy(nn.Linear(2, 2), 4)
    with pytest.raises(fmoe.UserError, match="megatron_version='v9'"):
        fmoefy(model, 4, megatron_version="v9")


def test_other_models_go_to_fmoefy():
    model = fmoefy(nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D)), fmoe_num_experts=4, gate=NaiveGate)
    assert fmoe.metrics(model) and isinstance(model[0], fmoe.MoE)
    with pytest.raises(fmoe.UserError, match="gate=Own has no counterpart"):
        fmoefy(nn.Sequential(nn.Linear(D, H)), 4, gate=type("Own", (NaiveGate,), {}))


def spread():
    model = fmoefy(OldModel({"transformer": 1}), fmoe_num_experts=2)
    mlp = model.layers()[0].mlp
    model(torch.randn(S, B, D)).sum().backward()
    other = fmoefy(nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D)), fmoe_num_experts=2)[0]
    weights = [None] * 2
    dist.all_gather_object(weights, mlp.experts[0].htoh4.weight.detach().numpy())
    different = bool((weights[0] != weights[1]).all())
    return mlp.world_size, mlp.num_experts, different, mlp.experts[0].htoh4.weight.dp_comm, other.num_experts


def test_experts_are_those_of_a_rank(two_ranks):
    assert values(two_ranks.run(spread)) == [(2, 4, True, "none", 4)] * 2


def args(**options):
    return SimpleNamespace(fmoe_num_experts=4, hidden_size=D, **options)


@pytest.mark.parametrize(("strategy", "kind"), [(None, NaiveGate), ("gshard", GShardGate), ("switch", SwitchGate)])
def test_megatron_mlp_from_arguments(strategy, kind):
    mlp = MegatronMLP(args(balance_strategy=strategy, num_layers=8, init_method_std=0.5, hidden_hidden_size=400), 0)
    assert type(mlp.gate) is kind and mlp.top_k == kind.default_top_k
    assert mlp.experts[0].htoh4.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert mlp.experts[0].h4toh.weight.std().item() == pytest.approx(0.5 / 4, rel=0.1)
    assert all((e.htoh4.bias == 0).all() and (e.h4toh.bias == 0).all() for e in mlp.experts)
    assert not torch.equal(mlp.experts[0].htoh4.weight, mlp.experts[1].htoh4.weight)
    y, bias = mlp(torch.randn(S, B, D))
    assert y.shape == (S, B, D) and torch.equal(bias, torch.zeros(D))


def test_a_gate_of_ones_own_counts():
    """FastMoE's took NaiveGate wherever no strategy was named."""
    own = type("Own", (NaiveGate,), {})
    assert type(MegatronMLP(args(), 0, gate=own).gate) is own
    with pytest.raises(fmoe.UserError, match="balance_strategy='best' is not known; valid names: naive"):
        MegatronMLP(args(balance_strategy="best"), 0)


def test_arguments_and_names_that_are_gone(monkeypatch):
    parsed = add_fmoe_args(argparse.ArgumentParser()).parse_args(["--num-experts", "8", "--balance-strategy", "swipe"])
    assert (parsed.num_experts, parsed.top_k, parsed.balance_strategy, parsed.fmoefy) == (8, 2, "swipe", False)
    monkeypatch.setattr("fmoe.fastmoe.megatron.megatron_args", lambda: parsed)
    assert fmoefy(OldModel({"encoder": 1})).layers()[0].mlp.num_expert == 8
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-experts", type=int)
    assert add_fmoe_args(parser).parse_args(["--fmoe-num-experts", "3"]).fmoe_num_experts == 3
    with pytest.raises(fmoe.UserError, match="save_checkpoint is not supported"):
        save_checkpoint(1, None, None, None)


def test_a_patched_provider_makes_experts_as_fmoefy_does(monkeypatch):
    def provider(pre_process=True):
        model = OldModel({"encoder": 1})
        model.pre_process = pre_process
        return model

    model = patch_model_provider(provider, gate=SwitchGate, fmoe_num_experts=2, top_k=1)(pre_process=False)
    (layer,) = model.layers()
    assert (layer.mlp.num_expert, layer.mlp.gate.top_k, model.pre_process) == (2, 1, False)
    # Megatron-LM's own arguments: 8 experts on 4 ranks.
    given = SimpleNamespace(num_experts=8, expert_model_parallel_size=4)
    monkeypatch.setattr("fmoe.fastmoe.megatron.megatron_args", lambda: given)
    (layer,) = patch_model_provider(provider)().layers()
    assert layer.mlp.num_expert == 2
    given.num_experts = None
    with pytest.raises(fmoe.UserError, match="fmoe_num_experts"):
        patch_model_provider(provider)()


def test_a_forward_step_needs_no_patch(monkeypatch):
    def forward_step(data_iterator, model):
        pass

    assert patch_forward_step(forward_step) is forward_step
    with pytest.raises(fmoe.UserError, match="patch_forward_step"):
        patch_forward_step(forward_step, Megatron_Version="v2.2")
    monkeypatch.setitem(sys.modules, "megatron.mpu", SimpleNamespace())  # Megatron-LM 2 and 3
    with pytest.raises(fmoe.UserError, match="patch_forward_step"):
        patch_forward_step(forward_step)
