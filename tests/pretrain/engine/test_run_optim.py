"""Every optimizer through the engine: splits equal one process, saved state too; a resumed run is the one before.

`SPLITS` and `CHAINS` are lists: other splits join by adding to them.
"""

import importlib.util
from dataclasses import replace

import pytest
import torch
from compare import assert_close, relative_error
from engines import (
    OPTIMIZERS,
    RECIPE,
    SHARDED,
    Samples,
    Split,
    assert_trained_the_same,
    chained,
    engine_of,
    figures,
    in_one_micro_batch,
    load,
    save,
    trained,
    with_optimizer,
)
from forks import only, values

from pretrain.config import OptimizerConfig

without_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
NAMES = [pytest.param(n, marks=without_torchao) if n == "adamw8bit" else n for n in OPTIMIZERS]


SPLITS = ["EP2", "DP2", "TP2", "EP2 ZeRO1", "DP2 ZeRO1", "TP2 ETP2", "TP2 DP2 ZeRO1", "PP2"]
UNCUT = ["EP2", "DP2", "PP2", "EP2 ZeRO1", "DP2 ZeRO1"]  # without tensor parallelism
CASES = [(name, split) for name in ("lamb", "lars", "muon") for split in SPLITS]
CASES += [("adafactor", split) for split in UNCUT] + [("sgd", "EP2 ZeRO1")]


@pytest.fixture(scope="module")
def alone(forks):
    """One process, in one micro batch."""
    ends = {}

    def run(name):
        if name not in ends:
            ends[name] = values(forks.run(1, trained, in_one_micro_batch(with_optimizer(name))))
        return ends[name]

    return run


@pytest.mark.by_default("lamb-TP2 ETP2", "muon-TP2 DP2 ZeRO1")
@pytest.mark.parametrize(("name", "split"), CASES)
def test_processes_equal_one(forks, alone, name, split):
    """Losses, norms, weights, every moment and the trust ratios."""
    expected, split = alone(name), Split.of(split)
    recipe = split.recipe(with_optimizer(name))
    recipe = replace(recipe, train=replace(recipe.train, steps=RECIPE.train.steps))
    ranks = values(forks.run(split.parallel.world_size, trained, recipe))
    for _, _, ratios in ranks:
        for found, wanted, kind in zip(ratios, expected[0][2], ("dense", "experts"), strict=True):
            assert len(wanted) == (0 if name not in ("lamb", "lars") else 16 if kind == "experts" else 7)
            assert_close(found, wanted, 1e-5, f"trust ratios, {kind}")
    tensors = assert_trained_the_same(ranks, expected)
    assert any(key.startswith("optimizer/") for key in tensors)


CHAINS = [
    "EP2, one, EP4",
    "DP2 ZeRO1, one ZeRO1, EP2 ZeRO1",
    "TP2 DP2 ZeRO1, EP2, one ZeRO1",
    "DP2 ZeRO1, EP2, EP2 DP2, one ZeRO1",
]


@pytest.mark.by_default("muon-TP2 DP2 ZeRO1, EP2, one ZeRO1")
@pytest.mark.parametrize(
    ("name", "chain"),
    [
        (name, chain)
        for name in OPTIMIZERS
        for chain in CHAINS
        if name in SHARDED and not (name == "adafactor" and "TP" in chain)
    ],
)
def test_the_next_loss_is_the_same_at_another_split(forks, tmp_path, name, chain):
    chained(forks, tmp_path, chain, with_optimizer(name), {"fp32": 1e-5})


def resumed(folder, recipe):
    """Weights after four steps, and after two of them, a checkpoint, a reload over other values, two more."""
    engine = engine_of(recipe)
    for step in range(2):
        engine.train_step(step, Samples())
    save(engine, folder, 2)
    ends = []
    for _ in range(2):
        for step in range(2, 5):
            engine.train_step(step, Samples())
        ends.append({name: p.detach().clone() for name, p in engine.gpt.named_parameters()})
        load(engine, folder)
    moments = [value for part in engine.optimizer.chained_optimizers for value in part.optimizer.state.values()]
    return ends, sum(hasattr(m.get("exp_avg"), "codes") for m in moments)


@pytest.mark.by_default("lamb-fp32", "adamw8bit-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_same_bit_for_bit(forks, tmp_path, name, precision):
    base = replace(RECIPE, model=replace(RECIPE.model, ffn_hidden_size=64))  # enough elements to be quantized
    recipe = Split(precision=precision).recipe(with_optimizer(name, base))
    (first, second), quantized = only(forks.run(1, resumed, tmp_path, recipe))
    different = [key for key in first if not torch.equal(first[key], second[key])]
    assert not different
    assert quantized == (4 if name == "adamw8bit" else 0)


@pytest.mark.by_default("DP2 ZeRO1")
@pytest.mark.parametrize("split", ["DP2 ZeRO1", "TP2 DP2 ZeRO1", "EP2", "PP2"])
def test_muon_resumes_bit_for_bit_at_a_split(forks, tmp_path, split):
    """Matrices that shards cut and ranks gather included."""
    recipe = Split.of(split).recipe(with_optimizer("muon"))
    for (first, second), _ in values(forks.run(recipe.parallel.world_size, resumed, tmp_path, recipe)):
        assert not [key for key in first if not torch.equal(first[key], second[key])]


@without_torchao
def test_8_bit_training_is_close_to_32_bit(forks):
    base = replace(RECIPE, model=replace(RECIPE.model, ffn_hidden_size=64))
    ends = [only(forks.run(1, figures, with_optimizer("adamw8bit", base)))]
    adamw = replace(base, optimizer=replace(base.optimizer, lr=1e-2, min_lr=1e-3))
    ends.append(only(forks.run(1, figures, adamw)))
    assert ends[0]["validation"] == pytest.approx(ends[1]["validation"], rel=1e-2)
    for name, value in ends[1].items():
        if torch.is_tensor(value) and name.endswith("weight_in"):
            assert 0 < relative_error(ends[0][name], value) < 0.02


def lr_of(recipe, step):
    """By the rule, in closed form."""
    ratio = recipe.train.global_batch / recipe.optimizer.base_batch
    factor = ratio if recipe.optimizer.lr_scaling == "linear" else ratio**0.5
    return factor * recipe.optimizer.lr * min(1.0, (step + 1) / recipe.warmup_steps)


@pytest.mark.by_default("sqrt")
@pytest.mark.parametrize("scaling", ["linear", "sqrt"])
def test_learning_rates_scale_with_the_batch(forks, scaling):
    optimizer = OptimizerConfig(
        lr=1e-3, min_lr=0.0, lr_scaling=scaling, base_batch=2, warmup_tokens=3 * 8 * 16 - 1, schedule="constant"
    )
    recipe = replace(RECIPE, optimizer=optimizer)
    assert recipe.warmup_steps == 3, "rounded up"
    seen = only(forks.run(1, figures, recipe))
    assert [seen[f"lr {step}"] for step in range(5)] == pytest.approx([lr_of(recipe, step) for step in range(5)])


def resumed_with_empty_parameters(folder, names, shard):
    """Return the differences of a resumed run's weights, for a gate with an empty matrix and an empty vector."""
    from megatron.core import parallel_state

    from fmoe import register_gate
    from fmoe.gates import NaiveRouter

    class Gate(NaiveRouter):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.matrix = torch.nn.Parameter(torch.empty(0, 32))
            self.vector = torch.nn.Parameter(torch.empty(0))

    register_gate("with_empty_parameters", Gate)
    model = RECIPE.model.with_values(
        {"moe.gate": "with_empty_parameters", "moe.gate_options": {}, "moe.jitter": 0.0, "moe.balance_loss": 0.0}
    )
    different = {}
    for name in names:
        recipe = with_optimizer(name, replace(RECIPE, model=model))
        recipe = replace(recipe, parallel=replace(recipe.parallel, shard=shard))
        (first, second), _ = resumed(folder / name, recipe)
        assert any(value.numel() == 0 for value in first.values())
        different[name] = [key for key in first if not torch.equal(first[key], second[key])]
        parallel_state.destroy_model_parallel()
    return different


@pytest.mark.parametrize(
    ("names", "shard"),
    [
        (("adamw", "adafactor"), "none"),
        (("adamw",), "optimizer"),
        pytest.param(("lamb", "lars", "muon", "sgd"), "none", marks=pytest.mark.slow),
        pytest.param(("adamw8bit",), "none", marks=[pytest.mark.slow, without_torchao]),
        pytest.param(SHARDED, "optimizer", marks=pytest.mark.slow),
    ],
)
def test_a_run_with_empty_parameters_resumes(forks, tmp_path, names, shard):
    found = only(forks.run(1, resumed_with_empty_parameters, tmp_path, names, shard))
    assert found == {name: [] for name in names}


def with_momentum_from_a_checkpoint(folder, recipe):
    """Return the weights after three steps without momentum and one with it, and after resuming before the last."""
    from megatron.core import parallel_state

    engine = engine_of(replace(recipe, optimizer=replace(recipe.optimizer, momentum=0.0)))
    for step in range(3):
        engine.train_step(step, Samples())
    save(engine, folder, 3, recipe={"optimizer": {"name": "sgd", "momentum": 0.0}})
    engine.train_step(3, Samples())  # the first step of momentum is the same
    expected = {name: p.detach().clone() for name, p in engine.gpt.named_parameters()}
    parallel_state.destroy_model_parallel()
    engine = engine_of(recipe)
    load(engine, folder)
    engine.train_step(3, Samples())
    return expected, {name: p.detach().clone() for name, p in engine.gpt.named_parameters()}


def test_momentum_may_begin_on_resume(forks, tmp_path):
    recipe = Split(precision="bf16").recipe(with_optimizer("sgd"))
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, momentum=0.9))
    expected, found = only(forks.run(1, with_momentum_from_a_checkpoint, tmp_path, recipe))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
