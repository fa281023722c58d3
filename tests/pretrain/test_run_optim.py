"""Every optimizer through the engine: splits equal one process, saved state too; a resumed run is the one before.

`SPLITS` and `CHAINS` are lists: other splits join by adding to them.
"""

import importlib.util
from dataclasses import replace

import pytest
import torch
from compare import assert_close, relative_error
from forks import only, values
from test_run_resharded import ONE, ONE_D, Split, stage
from test_run_split_engine import RECIPE, Samples, engine_of, train

from fmoe import UserError
from pretrain.checkpoint.geometry import Region
from pretrain.config import ModelConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig

OPTIMIZERS = {
    "lamb": {"lr": 2e-2, "max_trust": 20.0},
    "lars": {"lr": 0.5, "trust_coefficient": 0.05, "weight_decay": 0.01},
    "muon": {"lr": 1e-2},
    "adafactor": {"lr": 5e-2, "min_lr": 1e-2, "weight_decay": 0.01},
    "sgd": {"lr": 0.5, "weight_decay": 0.01},
    "adamw8bit": {"lr": 1e-2},
}
SHARDED = ("lamb", "lars", "muon", "sgd")  # over data parallel ranks, in flat parts
without_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
NAMES = [pytest.param(n, marks=without_torchao) if n == "adamw8bit" else n for n in OPTIMIZERS]


def recipe_of(name, base=RECIPE):
    optimizer = {"min_lr": 1e-3, **OPTIMIZERS.get(name, {})}
    return replace(base, optimizer=replace(base.optimizer, name=name, **optimizer))


SPLITS = {
    "EP2": Split(expert=2),
    "DP2": Split(data=2),
    "TP2": Split(tensor=2),
    "EP2 distributed": Split(expert=2, distributed=True),
    "DP2 distributed": Split(data=2, distributed=True),
    "TP2 with cut experts": Split(tensor=2, expert_tensor=2),
    "TP2 DP2 distributed": Split(tensor=2, data=2, distributed=True),
    "PP2": Split(pipeline=2),
}
WHOLE = ("EP2", "DP2", "PP2")  # what steps whole matrices runs at these alone
IN_CI = {
    "lamb": ("TP2 with cut experts",),
    "lars": ("EP2 distributed",),
    "muon": ("TP2 DP2 distributed",),
    "adafactor": (),
    "sgd": (),
}
CASES = [
    pytest.param(name, split, marks=[] if split in IN_CI[name] else [pytest.mark.slow])
    for name, splits in (
        ("lamb", SPLITS),
        ("lars", SPLITS),
        ("muon", SPLITS),
        ("adafactor", WHOLE),
        ("sgd", ("EP2 distributed",)),
    )
    for split in splits
]


def trained(recipe):
    """Losses and norms of five steps, the pieces of a checkpoint (weights and the optimizer's state), trust ratios."""
    from megatron_patch.trust import trust_ratios
    from pretrain.engine import state

    engine = engine_of(recipe)
    results = [engine.train_step(step, Samples()) for step in range(RECIPE.train.steps)]
    pieces = [
        (p.name, p.shape, p.offset, p.block, p.start, p.stop, p.data.detach().clone()) for p in state.pieces(engine)
    ]
    ratios = [of_kind.sort().values for of_kind in trust_ratios(engine.optimizer)]
    return [(result.loss, result.grad_norm) for result in results], pieces, ratios


def assembled(ranks):
    """The tensors that the pieces of all ranks make; NaN where there is none."""
    tensors = {}
    for _, pieces, _ in ranks:
        for name, shape, offset, block, start, stop, data in pieces:
            whole = tensors.setdefault(name, torch.full(shape, torch.nan))
            for box in Region.of(offset, block, start, stop).boxes:
                part = data.reshape(-1)[box.position : box.position + box.size].view(box.shape)
                whole[box.slices_in((0,) * len(shape))] = part
    return tensors


def assert_split_equals_one(forks, recipe, alone, *parts):
    """Losses, gradient norms, weights and moments of a run over two ranks are those of one process.

    ``parts`` are in names of tensors that the model has.
    """
    expected = values(forks.run(1, trained, replace(alone, train=replace(alone.train, micro_batch=8))))
    ranks = values(forks.run(2, trained, recipe))
    for losses, _, _ in ranks:
        for found, wanted in zip(losses, expected[0][0], strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
    found, wanted = assembled(ranks), assembled(expected)
    assert found.keys() == wanted.keys() and all(any(part in key for key in found) for part in parts)
    for key, value in wanted.items():
        assert_close(found[key], value, 3e-5, key)
    assert expected[0][0][-1][0] < expected[0][0][0][0], "the loss did not fall"


@pytest.fixture(scope="module")
def alone(forks):
    """One process, in one micro batch."""
    ends = {}

    def run(name):
        if name not in ends:
            recipe = recipe_of(name)
            recipe = replace(recipe, train=replace(recipe.train, micro_batch=8))
            ends[name] = values(forks.run(1, trained, recipe))
        return ends[name]

    return run


@pytest.mark.parametrize(("name", "split"), CASES)
def test_processes_equal_one(forks, alone, name, split):
    """Losses, norms, weights, every moment and the trust ratios."""
    expected, split = alone(name), SPLITS[split]
    recipe = split.recipe(recipe_of(name))
    recipe = replace(recipe, train=replace(recipe.train, steps=RECIPE.train.steps))
    ranks = values(forks.run(split.parallel.world_size, trained, recipe))
    for losses, _, ratios in ranks:
        for found, wanted, kind in zip(ratios, expected[0][2], ("dense", "experts"), strict=True):
            assert len(wanted) == (0 if name not in ("lamb", "lars") else 16 if kind == "experts" else 7)
            assert_close(found, wanted, 1e-5, f"trust ratios, {kind}")
        for found, wanted in zip(losses, expected[0][0], strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
    found, wanted = assembled(ranks), assembled(expected)
    assert found.keys() == wanted.keys()
    assert any(key.startswith("optimizer/") for key in found)
    for key, value in wanted.items():
        assert_close(found[key], value, 3e-5, key)  # moments of a router are small sums of large terms
    assert expected[0][0][-1][0] < expected[0][0][0][0], "the loss did not fall"


CHAINS = {
    "EP 2-1-4": [Split(expert=2), ONE, Split(expert=4)],
    "DP distributed 2-1, EP2 distributed": [
        Split(data=2, distributed=True),
        ONE_D,
        Split(expert=2, distributed=True),
    ],
    "TP, EP, one": [Split(tensor=2, data=2, distributed=True), Split(expert=2), ONE_D],
    "on and off, EP and DP": [Split(data=2, distributed=True), Split(expert=2), Split(expert=2, data=2), ONE_D],
}
CHAINED = [
    (name, chain)
    for name in OPTIMIZERS
    if name != "adamw8bit"
    for chain, splits in CHAINS.items()
    if name in SHARDED or not any(split.distributed for split in splits)
]
CHAINED_IN_CI = [("muon", "TP, EP, one")]


@pytest.mark.parametrize(
    ("name", "chain"),
    [c if c in CHAINED_IN_CI else pytest.param(*c, marks=pytest.mark.slow) for c in CHAINED],
)
def test_the_next_loss_is_the_same_at_another_split(forks, tmp_path, name, chain):
    base, expected = recipe_of(name), None
    for number, split in enumerate(CHAINS[chain]):
        results = values(forks.run(split.parallel.world_size, stage, tmp_path, split, base, number * 2))
        losses = results[0][0]
        if expected is not None:
            assert losses[0] == pytest.approx(expected, rel=1e-5), f"{split}"
        expected = losses[-1]


def resumed(folder, recipe):
    """Weights after four steps, and after two of them, a checkpoint, a reload over other values, two more."""
    from pretrain.checkpoint import open_checkpoint, save
    from pretrain.engine import state

    engine = engine_of(recipe)
    for step in range(2):
        engine.train_step(step, Samples())
    run_state = {"optimizer": state.optimizer_state(engine), "schedule": state.schedule_state(engine)}
    save(folder, 2, state.pieces(engine), run_state, state.rank_state())
    ends = []
    for _ in range(2):
        for step in range(2, 5):
            engine.train_step(step, Samples())
        ends.append({name: p.detach().clone() for name, p in engine.gpt.named_parameters()})
        state.load(engine, open_checkpoint(folder))
    moments = [value for part in engine.optimizer.chained_optimizers for value in part.optimizer.state.values()]
    return ends, sum(hasattr(m.get("exp_avg"), "codes") for m in moments)


@pytest.mark.by_default("lamb-fp32", "muon-fp32", "adamw8bit-bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_same_bit_for_bit(forks, tmp_path, name, precision):
    base = replace(RECIPE, model=replace(RECIPE.model, ffn_hidden_size=64))  # enough elements to be quantized
    recipe = Split(precision=precision).recipe(recipe_of(name, base))
    (first, second), quantized = only(forks.run(1, resumed, tmp_path, recipe))
    different = [key for key in first if not torch.equal(first[key], second[key])]
    assert not different
    assert quantized == (4 if name == "adamw8bit" else 0)


@pytest.mark.by_default("DP2 distributed")
@pytest.mark.parametrize("split", ["DP2 distributed", "TP2 DP2 distributed", "EP2", "PP2"])
def test_muon_resumes_bit_for_bit_at_a_split(forks, tmp_path, split):
    """Matrices that shards cut and ranks gather included."""
    recipe = SPLITS[split].recipe(recipe_of("muon"))
    for (first, second), _ in values(forks.run(SPLITS[split].parallel.world_size, resumed, tmp_path, recipe)):
        assert not [key for key in first if not torch.equal(first[key], second[key])]


def ratios_of_a_step():
    """Return the trust ratios of a step: those of dense parameters, and those of experts."""
    engine = engine_of(recipe_of("lamb"))
    engine.train_step(0, Samples())
    return [part.optimizer.trust_ratios() for part in engine.optimizer.chained_optimizers]


def test_trust_ratios_are_there_to_be_tracked(forks):
    dense, experts = only(forks.run(1, ratios_of_a_step))
    assert [len(ratios) for ratios in experts] == [4] * 4, "weights in and out of two layers, four experts each"
    assert {len(ratios) for ratios in dense} == {0, 1}
    assert all(len(set(ratios.tolist())) == 4 for ratios in experts)
    assert all((ratios > 0).all() and (ratios <= 20).all() for ratios in dense + experts)


@without_torchao
def test_8_bit_training_is_close_to_32_bit(forks):
    base = replace(RECIPE, model=replace(RECIPE.model, ffn_hidden_size=64))
    ends = [only(forks.run(1, train, recipe_of("adamw8bit", base)))]
    adamw = replace(base, optimizer=replace(base.optimizer, lr=1e-2, min_lr=1e-3))
    ends.append(only(forks.run(1, train, adamw)))
    assert ends[0]["validation"] == pytest.approx(ends[1]["validation"], rel=1e-2)
    for name, value in ends[1].items():
        if torch.is_tensor(value) and name.endswith("weight_in"):
            assert 0 < relative_error(ends[0][name], value) < 0.02


def lr_of(recipe, step):
    """By the rule, in closed form."""
    ratio = recipe.train.global_batch / recipe.optimizer.base_batch
    factor = ratio if recipe.optimizer.lr_scaling == "linear" else ratio**0.5
    return factor * recipe.optimizer.lr * min(1.0, (step + 1) / recipe.warmup_steps)


@pytest.mark.parametrize("scaling", ["linear", "sqrt"])
def test_learning_rates_scale_with_the_batch(forks, scaling):
    optimizer = OptimizerConfig(
        lr=1e-3, min_lr=0.0, lr_scaling=scaling, base_batch=2, warmup_tokens=3 * 8 * 16 - 1, schedule="constant"
    )
    recipe = replace(RECIPE, optimizer=optimizer)
    assert recipe.warmup_steps == 3, "rounded up"
    seen = only(forks.run(1, train, recipe))
    assert [seen[f"lr {step}"] for step in range(5)] == pytest.approx([lr_of(recipe, step) for step in range(5)])


WRONG = {
    "distributed adafactor": (
        {"name": "adafactor", "distributed": True},
        "optimizer.name=adafactor needs optimizer.distributed=false: adafactor factors the second moments of matrices",
    ),
    "distributed 8 bit": (
        {"name": "adamw8bit", "distributed": True},
        "optimizer.name=adamw8bit needs optimizer.distributed=false: adamw8bit quantizes blocks of 256 elements",
    ),
    "scaling without base": ({"lr_scaling": "sqrt"}, "optimizer.lr_scaling=sqrt needs optimizer.base_batch"),
    "base without scaling": ({"base_batch": 8}, "optimizer.base_batch=8 has no effect with optimizer.lr_scaling=none"),
    "base": ({"base_batch": 0, "lr_scaling": "sqrt"}, "optimizer.base_batch=0 is not positive"),
    "momentum": ({"name": "sgd", "momentum": 1.0}, "optimizer.momentum=1.0 is not less than 1"),
    "momentum of muon": ({"name": "muon", "momentum": -0.5}, "optimizer.momentum=-0.5 must be at least 0"),
    "no iteration": ({"name": "muon", "ns_steps": 0}, "optimizer.ns_steps=0 is not positive"),
    "offloaded muon": (
        {"name": "muon", "cpu_offload": 0.5, "distributed": True},
        "optimizer.cpu_offload=0.5 needs optimizer.name=adamw, not muon",
    ),
    "trust": ({"name": "lars", "trust_coefficient": 0.0}, "optimizer.trust_coefficient=0.0 is not positive"),
    "bound": ({"name": "lamb", "max_trust": -1.0}, "optimizer.max_trust=-1.0 is not positive"),
    "decay of beta2": ({"beta2_decay": 0.8}, "optimizer.beta2_decay=0.8 must be at most 0"),
    "clip": ({"update_clip": 0.5}, "optimizer.update_clip=0.5 must be at least 1"),
    "tensor parallel adafactor": (
        {"name": "adafactor"},
        "parallel.tensor=2 must be 1 with optimizer.name=adafactor",
    ),
    "warmup": (
        {"warmup_tokens": 10**6},
        "optimizer.warmup_tokens=1000000 (245 steps) must be less than train.steps=9",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_one_line(case):
    options, says = WRONG[case]
    recipe = Recipe(
        model=ModelConfig(sequence_length=256),
        optimizer=OptimizerConfig(**{"warmup_steps": 1, **options}),
        train=TrainConfig(steps=9, global_batch=16, micro_batch=8),
        parallel=ParallelConfig(tensor=2 if case.startswith("tensor") else 1),
    )
    with pytest.raises(UserError) as error:
        recipe.check()
    assert str(error.value).startswith(says)


def resumed_with_empty_parameters(folder, names, distributed):
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
    model = replace(RECIPE.model, gate="with_empty_parameters", gate_options={}, jitter=0.0, balance_loss=0.0)
    different = {}
    for name in names:
        recipe = recipe_of(name, replace(RECIPE, model=model))
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, distributed=distributed))
        (first, second), _ = resumed(folder / name, recipe)
        assert any(value.numel() == 0 for value in first.values())
        different[name] = [key for key in first if not torch.equal(first[key], second[key])]
        parallel_state.destroy_model_parallel()
    return different


@pytest.mark.parametrize(
    ("names", "distributed"),
    [
        (("adamw", "adafactor"), False),
        (("adamw",), True),
        pytest.param(("lamb", "lars", "muon", "sgd"), False, marks=pytest.mark.slow),
        pytest.param(("adamw8bit",), False, marks=[pytest.mark.slow, without_torchao]),
        pytest.param(SHARDED, True, marks=pytest.mark.slow),
    ],
)
def test_a_run_with_empty_parameters_resumes(forks, tmp_path, names, distributed):
    found = only(forks.run(1, resumed_with_empty_parameters, tmp_path, names, distributed))
    assert found == {name: [] for name in names}


def with_momentum_from_a_checkpoint(folder, recipe):
    """Return the weights after three steps without momentum and one with it, and after resuming before the last."""
    from megatron.core import parallel_state

    from pretrain.checkpoint import open_checkpoint, save
    from pretrain.engine import state

    engine = engine_of(replace(recipe, optimizer=replace(recipe.optimizer, momentum=0.0)))
    for step in range(3):
        engine.train_step(step, Samples())
    run_state = {
        "recipe": {"optimizer": {"name": "sgd", "momentum": 0.0}},
        "optimizer": state.optimizer_state(engine),
        "schedule": state.schedule_state(engine),
    }
    save(folder, 3, state.pieces(engine), run_state, state.rank_state())
    engine.train_step(3, Samples())  # the first step of momentum is the same
    expected = {name: p.detach().clone() for name, p in engine.gpt.named_parameters()}
    parallel_state.destroy_model_parallel()
    engine = engine_of(recipe)
    state.load(engine, open_checkpoint(folder))
    engine.train_step(3, Samples())
    return expected, {name: p.detach().clone() for name, p in engine.gpt.named_parameters()}


def test_momentum_may_begin_on_resume(forks, tmp_path):
    recipe = Split(precision="bf16").recipe(recipe_of("sgd"))
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, momentum=0.9))
    expected, found = only(forks.run(1, with_momentum_from_a_checkpoint, tmp_path, recipe))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
