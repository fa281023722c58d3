"""Multi-latent attention against the equations of DeepSeek-V2 (arXiv 2405.04434 section 2.1), and its checks."""

from dataclasses import replace

import pytest
from compare import assert_close
from engines import assert_split_equals_one, engine_of
from forks import only, values
from latent_reference import CONTENT, ENGINE, MODEL, RANK, ROTARY, VALUE, both

from fmoe.errors import UserError
from pretrain.config import ParallelConfig, Recipe


@pytest.mark.parametrize("rank", [None, 12], ids=["full queries", "compressed queries"])
def test_output_and_gradients_are_those_of_the_paper(forks, rank):
    ours, expected = only(forks.run(1, both, rank))
    assert len(ours) == (7 if rank is None else 9)
    for name, value in expected.items():
        assert_close(ours[name].double(), value, 1e-5, name)


REFUSED = {
    "a key without the rank": (
        {"attention.kv_lora_rank": None},
        {},
        ["attention.qk_head_dim=6", "attention.kv_lora_rank"],
    ),
    "no width": ({"attention.v_head_dim": None}, {}, ["attention.kv_lora_rank=10", "attention.v_head_dim"]),
    "odd rotary width": ({"attention.qk_rope_head_dim": 3}, {}, ["attention.qk_rope_head_dim=3", "multiple of 2"]),
    "no rank": ({"attention.kv_lora_rank": 0}, {}, ["attention.kv_lora_rank=0"]),
    "negative rank of queries": ({"attention.q_lora_rank": -1}, {}, ["attention.q_lora_rank=-1"]),
    "t5": ({"kind": "t5"}, {}, ["attention.kv_lora_rank=10", "model.kind=gpt", "t5"]),
    "bert": ({"kind": "bert"}, {}, ["attention.kv_lora_rank=10", "model.kind=gpt", "bert"]),
    "learned positions": (
        {"position.encoding": "learned_absolute"},
        {},
        ["attention.kv_lora_rank=10", "learned_absolute"],
    ),
    "groups": ({"attention.num_query_groups": 3}, {}, ["attention.num_query_groups=3", "attention.kv_lora_rank=10"]),
    "width of heads": ({"attention.head_dim": 4}, {}, ["attention.head_dim=4", "attention.kv_lora_rank=10"]),
    "norms of heads": ({"attention.qk_norm": True}, {}, ["attention.qk_norm=true", "attention.kv_lora_rank=10"]),
    "biases": ({"attention.qkv_bias": True}, {}, ["attention.qkv_bias=true", "attention.kv_lora_rank=10"]),
    "rotary fraction": (
        {"position.rotary_fraction": 0.5},
        {},
        ["position.rotary_fraction=0.5", "attention.kv_lora_rank"],
    ),
    "context": ({"attention.num_heads": 4}, {"context": 2}, ["parallel.context=2", "attention.kv_lora_rank=10"]),
    "ranks of keys": (
        {"attention.num_heads": 4, "attention.kv_lora_rank": 9},
        {"tensor": 2},
        ["parallel.tensor=2", "attention.kv_lora_rank + attention.qk_rope_head_dim=13"],
    ),
    "ranks of queries": (
        {"attention.num_heads": 4, "attention.q_lora_rank": 9},
        {"tensor": 2},
        ["parallel.tensor=2", "q_lora_rank=9"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_combination_is_named(case):
    model, parallel, parts = REFUSED[case]
    with pytest.raises(UserError) as error:
        Recipe(model=MODEL.with_values(model), parallel=ParallelConfig(**parallel)).check()
    assert all(part in str(error.value) for part in parts) and "\n" not in str(error.value), str(error.value)


def recipe_of(optimizer, distributed=False, **parallel):
    options = {"adamw": {}, "lamb": {"lr": 2e-2, "max_trust": 20.0}, "adafactor": {"lr": 5e-2, "min_lr": 1e-2}}
    options |= {"lars": {"lr": 0.5, "trust_coefficient": 0.05}, "muon": {}}
    optimizer = replace(ENGINE.optimizer, name=optimizer, distributed=distributed, **options[optimizer])
    return replace(ENGINE, optimizer=optimizer, parallel=ParallelConfig(**parallel))


SPLITS = {
    "adamw, TP2": recipe_of("adamw", tensor=2, sequence=False),
    "adamw, TP2 SP": recipe_of("adamw", True, tensor=2),
    "adamw, EP2": recipe_of("adamw", True, expert=2, recompute="full"),
    "muon, TP2 SP": recipe_of("muon", True, tensor=2),
    "lamb, TP2": recipe_of("lamb", True, tensor=2, sequence=False),
    "lars, TP2 SP": recipe_of("lars", tensor=2),
    "adafactor, EP2": recipe_of("adafactor", expert=2),
}


@pytest.mark.by_default("muon, TP2 SP")
@pytest.mark.parametrize("case", SPLITS)
def test_splits_equal_one_process(forks, case):
    """Losses, gradient norms, weights and moments; see tests/conformance/test_megatron_matrix.py for more splits."""
    recipe = SPLITS[case]
    assert_split_equals_one(forks, recipe, recipe_of(recipe.optimizer.name), "linear_q_down_proj")


def matrices():
    """By name: sections, axis of the split and size of the group, of the first layer's attention."""
    from megatron_patch.muon import megatron_matrices

    engine = engine_of(recipe_of("muon", tensor=2))
    names = {parameter: name for name, parameter in engine.chunks[0].named_parameters()}
    found = {names[p].partition("layers.0.self_attention.")[2]: m for p, m in megatron_matrices(engine.chunks).items()}
    return {name: (m.sections, m.axis, m.group.size()) for name, m in found.items() if name}


def test_every_linear_layer_is_a_matrix_for_muon(forks):
    """Those of all heads together: down projections too are split by rows."""
    rows = {"linear_q_down_proj": 12, "linear_q_up_proj": 2 * (CONTENT + ROTARY)}
    rows |= {"linear_kv_down_proj": RANK + ROTARY, "linear_kv_up_proj": 2 * (CONTENT + VALUE)}
    expected = {f"{name}.weight": ((n // 2,), 0, 2) for name, n in rows.items()}
    expected["linear_proj.weight"] = ((32,), 1, 2)
    for found in values(forks.run(2, matrices)):
        assert found == expected
