"""Multi-latent attention against the equations of DeepSeek-V2 (arXiv 2405.04434 section 2.1), and its checks."""

from dataclasses import replace

import pytest
from compare import assert_close
from engines import assert_split_equals_one, engine_of
from forks import only, values
from latent_reference import CONTENT, ENGINE, RANK, ROTARY, VALUE, both

from pretrain.config import ParallelConfig


@pytest.mark.parametrize("rank", [None, 12], ids=["full queries", "compressed queries"])
def test_output_and_gradients_are_those_of_the_paper(forks, rank):
    ours, expected = only(forks.run(1, both, rank))
    assert len(ours) == (7 if rank is None else 9)
    for name, value in expected.items():
        assert_close(ours[name].double(), value, 1e-5, name)


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
