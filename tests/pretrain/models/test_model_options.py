"""Keys of [model] for other families' attention and shared experts: every split equals one process."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compare import assert_close
from engines import STEADY, assert_split_equals_one

from pretrain.config import ParallelConfig

OPTIONS = {
    "norm": "rms",
    "attention.num_heads": 4,
    "attention.num_query_groups": 2,
    "position.rotary_fraction": 0.5,
    "dropout": 0.1,
    "attention.scale": 0.2,
    "embedding_scale": 3.0,
    "residual_scale": 0.4,
    "logit_divisor": 2.0,
    "attention.qk_norm": True,
    "attention.qk_norm_over": "all",
    "attention.qkv_bias": True,
    "attention.output_bias": True,
    "output_bias": True,
    "moe.num_shared_experts": 2,
    "moe.shared_ffn_hidden_size": 20,
    "moe.shared_expert_gate": True,
}
ENGINE = replace(STEADY, model=STEADY.model.with_values(OPTIONS))
LOCAL = {
    "norm": "rms",
    "attention.num_heads": 4,
    "attention.num_query_groups": 2,
    "dropout": 0.0,
    "attention.qkv_bias": True,
    "attention.output_bias": True,
    "attention.sinks": True,
    "attention.sliding_window": 3,
    "attention.sliding_layers": (1,),
    "attention.sliding_stride": 3,
    "activation": "swiglu_oai",
    "gated": True,
    "moe.gate": "naive",
    "moe.gate_options": {"bias": True},
    "moe.expert_options": {"bias": True},
    "moe.layers": (2,),
}


def local_recipe(precision="fp32", dropout=0.0, **parallel):
    """GPT-OSS's parts, and a layer without experts."""
    return replace(
        ENGINE,
        model=STEADY.model.with_values(LOCAL | {"dropout": dropout}),
        train=replace(ENGINE.train, precision=precision),
        parallel=ParallelConfig(**parallel),
    )


def recipe_of(optimizer, **parallel):
    options = {"adamw": {}, "lamb": {"lr": 2e-2, "max_trust": 20.0}, "muon": {}}[optimizer]
    optimizer = replace(ENGINE.optimizer, name=optimizer, **options)
    return replace(ENGINE, optimizer=optimizer, parallel=ParallelConfig(**parallel))


def test_the_norm_of_all_heads_by_hand():
    """Output and gradients, in double precision."""
    from megatron_patch.qk_norm import AllHeadsRMSNorm

    norm = AllHeadsRMSNorm(6, SimpleNamespace(tensor_model_parallel_size=1), 1e-3, num_heads=3)
    x, d_y = torch.randn(2, 5, 2, 3, 6)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    found = norm(x.requires_grad_())
    found.backward(d_y)
    rows, weight = (tensor.detach().double().requires_grad_() for tensor in (x.view(-1, 18), norm.weight))
    expected = torch.stack([row / (row.square().mean() + 1e-3).sqrt() * weight for row in rows])
    expected.backward(d_y.view(-1, 18).double())
    assert_close(found.view(-1, 18).double(), expected, 1e-6, "output")
    assert_close(x.grad.view(-1, 18).double(), rows.grad, 1e-6, "gradient of the input")
    assert_close(norm.weight.grad.double(), weight.grad, 1e-6, "gradient of the weight")


SPLITS = {
    "adamw, TP2": recipe_of("adamw", tensor=2, sequence=False),
    "adamw, TP2 SP": recipe_of("adamw", shard="optimizer", tensor=2),
    "adamw, EP2": recipe_of("adamw", shard="optimizer", expert=2, recompute="full"),
    "adamw, PP2": recipe_of("adamw", pipeline=2),
    "muon, TP2 SP": recipe_of("muon", shard="optimizer", tensor=2),
    "lamb, TP2 SP": recipe_of("lamb", tensor=2),
}


@pytest.mark.by_default("muon, TP2 SP")
@pytest.mark.parametrize("case", SPLITS)
def test_splits_equal_one_process(forks, case):
    """Losses, gradient norms, weights and moments."""
    recipe = SPLITS[case]
    assert_split_equals_one(
        forks,
        recipe,
        recipe_of(recipe.optimizer.name),
        "linear_qkv.bias",
        "q_layernorm.weight",
        "shared.output_gate.weight",
    )


LOCAL_SPLITS = {
    "TP2": {"tensor": 2, "sequence": False},
    "TP2 SP": {"shard": "optimizer", "tensor": 2},
    "EP2": {"shard": "optimizer", "expert": 2, "recompute": "full"},
    "PP2": {"pipeline": 2, "recompute": "selective"},
    "CP2": {"shard": "optimizer", "context": 2},
    "CP2, dropout": {"context": 2, "dropout": 0.1},
    "TP2 SP, experts cut, dropout": {"tensor": 2, "expert_tensor": 2, "dropout": 0.1},
}


@pytest.mark.by_default("CP2")
@pytest.mark.parametrize("split", LOCAL_SPLITS)
def test_splits_of_windows_sinks_and_biases_equal_one_process(forks, split):
    options = LOCAL_SPLITS[split]
    recipe = local_recipe(**options)
    alone = local_recipe(dropout=options.get("dropout", 0.0))
    parts = ("core_attention.softmax_offset", "linear_proj.bias", "experts.bias_in", "gate.bias")
    assert_split_equals_one(forks, recipe, alone, *parts)
