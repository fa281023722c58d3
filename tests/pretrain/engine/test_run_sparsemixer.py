"""Training with the gate of Phi-3.5-MoE and biases like its: noise and gradients do not depend on the split."""

from dataclasses import replace

import pytest
from engines import STEADY, assert_split_equals_one

from pretrain.config import ParallelConfig

MODEL = {
    "moe.gate": "sparsemixer",
    "moe.gate_options": {"margin": 0.6},
    "moe.top_k": 2,
    "moe.capacity_factor": None,
    "attention.num_heads": 4,
    "attention.num_query_groups": 2,
    "gated": True,
    "activation": "silu",
    "tie_embeddings": False,
    "attention.qkv_bias": True,
    "attention.output_bias": True,
    "output_bias": True,
}


def recipe_of(mtp=0, **parallel):
    is_alone = not parallel
    model = STEADY.model.with_values({**MODEL, "mtp_layers": mtp})
    return replace(STEADY, model=model, parallel=ParallelConfig(**parallel, shard="none" if is_alone else "optimizer"))


SPLITS = {
    "EP2": {"expert": 2, "recompute": "full"},
    "TP2 SP": {"tensor": 2, "recompute": "selective"},
    "CP2": {"context": 2},
    "PP2, MTP": {"pipeline": 2, "mtp": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_splits_equal_one_process(forks, split):
    recipe = recipe_of(**SPLITS[split])
    alone = recipe_of(mtp=recipe.model.mtp_layers)
    assert_split_equals_one(forks, recipe, alone, "linear_proj.bias", "output_layer.bias", "gate.weight")
