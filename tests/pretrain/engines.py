"""Engines of tiny models on made-up tokens, their splits over processes, and what they train. Not a test."""

import zlib
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import values

from pretrain.checkpoint.geometry import Region
from pretrain.config import (
    AttentionConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)

STEPS = 5
LENGTH = 16
VOCAB = 64
STAGE = 2  # steps between two checkpoints of `stage`
RECIPE = Recipe(
    model=ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=24,
        sequence_length=LENGTH,
        vocab_size=VOCAB,
        init_std=0.3,
        attention=AttentionConfig(num_heads=2),
        moe=MoEConfig(num_experts=4, top_k=2, gate="switch", capacity_factor=1.0, jitter=0.3, balance_loss=0.1),
    ),
    optimizer=OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=2, clip_grad=0.5),
    train=TrainConfig(steps=STEPS, global_batch=8, micro_batch=2),
)
# A large eps: where a gradient is rounding alone, the size of the step is not.
STEADY = replace(RECIPE, optimizer=replace(RECIPE.optimizer, eps=1e-3))

OPTIMIZERS = {
    "lamb": {"lr": 2e-2, "max_trust": 20.0},
    "lars": {"lr": 0.5, "trust_coefficient": 0.05, "weight_decay": 0.01},
    "muon": {"lr": 1e-2},
    "adafactor": {"lr": 5e-2, "min_lr": 1e-2, "weight_decay": 0.01},
    "sgd": {"lr": 0.5, "weight_decay": 0.01},
    "adamw8bit": {"lr": 1e-2},
}
SHARDED = ("lamb", "lars", "muon", "adafactor", "sgd")  # over data parallel ranks, in flat parts


def with_optimizer(name, base=RECIPE):
    options = {"min_lr": 1e-3, **OPTIMIZERS.get(name, {})}
    return replace(base, optimizer=replace(base.optimizer, name=name, **options))


AXES = {
    "EP": "expert",
    "DP": "data",
    "TP": "tensor",
    "CP": "context",
    "PP": "pipeline",
    "VPP": "virtual",
    "ETP": "expert_tensor",
}
SHARDS = ("none", "optimizer", "gradients", "parameters")  # by stage of ZeRO


@dataclass(frozen=True)
class Split:
    """One split of a run over processes."""

    expert: int = 1
    data: int = 1
    shard: str = "none"
    precision: str = "fp32"
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual: int | None = None
    expert_tensor: int = 1
    overlap: bool = False

    @classmethod
    def of(cls, text):
        """``Split.of("EP2 DP2 ZeRO1 bf16")``; "one" is one process."""
        values = {}
        for word in text.split():
            name = word.rstrip("0123456789")
            if name in AXES and name != word:
                values[AXES[name]] = int(word[len(name) :])
            elif name == "ZeRO":
                values["shard"] = SHARDS[int(word[len(name) :])]
            elif word in ("bf16", "fp16"):
                values["precision"] = word
            elif word != "one":
                values[word] = True
        return cls(**values)

    @property
    def parallel(self):
        return ParallelConfig(
            expert=self.expert,
            data=self.data,
            tensor=self.tensor,
            context=self.context,
            pipeline=self.pipeline,
            virtual_pipeline=self.virtual,
            expert_tensor=self.expert_tensor,
            shard=self.shard,
            overlap_gradients=self.overlap,
            overlap_parameters=self.overlap,
        )

    def recipe(self, base):
        return replace(
            base,
            parallel=self.parallel,
            train=replace(base.train, steps=20, precision=self.precision),
        )


ONE = Split()


class Samples:
    """Stand-in for `GPTSamples`: sample n has tokens that count up by 1, 2 or 3.

    Attributes:
        taken: samples that were read.
    """

    def __init__(self):
        self.taken = []

    def __getitem__(self, n):
        self.taken.append(n)
        return (np.arange(LENGTH + 1) * (1 + n % 3) + 5 * n) % VOCAB


def engine_of(recipe):
    from megatron_patch import cpu
    from pretrain.engine import Engine, init_parallel
    from pretrain.start.process import Processes

    cpu.install()
    recipe.check()
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    recipe.check_world_size(processes.world_size)
    init_parallel(recipe)
    return Engine(recipe, processes)


def figures(recipe, with_weights=True, make_samples=None):
    """Losses, norms, rates, routing and weights of a run."""
    engine = engine_of(recipe)
    samples = Samples() if make_samples is None else make_samples(recipe)
    seen = {"validation before": engine.evaluate(samples, 16)}
    for step in range(recipe.train.steps):
        result = engine.train_step(step, samples)
        seen |= {f"loss {step}": result.loss, f"gradient norm {step}": result.grad_norm, f"lr {step}": result.lr}
        seen |= {f"mtp loss {step} {depth}": loss for depth, loss in enumerate(result.mtp_losses, start=1)}
        for number, report in engine.routing().items():
            seen |= {f"load {step} {number}": torch.tensor(report.load), f"drops {step} {number}": report.drop_rate}
            seen |= {f"{name} {step} {number}": value for name, value in report.losses.items()}
    seen["validation"] = engine.evaluate(samples, 16)
    return seen | ({name: whole(p) for name, p in engine.gpt.named_parameters()} if with_weights else {})


def assert_figures(ranks, expected, expert=1, tolerance=1e-5):
    """The `figures` of all ranks are the expected ones; weights of experts lie on ``expert`` ranks. Norms of gradients
    sum rounding errors of all parameters, so they have at least a tolerance of 1e-5."""
    assert all(rank.keys() == expected.keys() for rank in ranks)
    for name, value in expected.items():
        found = [rank[name] for rank in ranks]
        if expert > 1 and ".experts." in name:
            found = [torch.cat(found[:expert])]
        for rank, actual in enumerate(found):
            if torch.is_tensor(value):
                assert_close(actual, value, tolerance, f"{name} on rank {rank}")
            else:
                relative = max(tolerance, 1e-5) if "norm" in name else tolerance
                assert actual == pytest.approx(value, rel=relative, abs=1e-9), f"{name} on rank {rank}"


def save(engine, folder, step, **state_of_run):
    """Write a checkpoint of the engine."""
    from pretrain import checkpoint
    from pretrain.engine import state

    run_state = {"optimizer": state.optimizer_state(engine), "schedule": state.schedule_state(engine), **state_of_run}
    checkpoint.save(folder, step, state.pieces(engine), run_state, state.rank_state(engine))


def load(engine, folder):
    """Load a checkpoint into the engine: the newest of a folder, or one by its own folder."""
    from pretrain.checkpoint import open_checkpoint
    from pretrain.engine import state

    state.load(engine, open_checkpoint(folder))


def digests(engine):
    """Checksum of each piece of the engine's checkpoint, by name."""
    from pretrain.engine import state

    parts = ((piece.name, piece.data.detach().contiguous().view(-1)) for piece in state.pieces(engine))
    return {name: zlib.crc32(data.view(torch.uint8).numpy()) for name, data in parts}


def stage(folder, split, base, step):
    """Goes on from ``step``, saves after `STAGE`, makes one step more. (losses of those steps, samples taken)"""
    recipe = split.recipe(base)
    samples = Samples()
    engine = engine_of(recipe)
    if step:
        load(engine, folder / f"step-{step:08d}")
    losses = [engine.train_step(step + i, samples).loss for i in range(STAGE)]
    taken = list(samples.taken)
    save(engine, folder, step + STAGE, recipe=recipe.values())
    losses.append(engine.train_step(step + STAGE, samples).loss)
    dist.barrier()
    return losses, taken


def chained(forks, folder, chain, base, tolerance):
    """The samples taken by all ranks of a run that goes on at another split after each `stage`.

    The next loss is the same at the next split. ``chain`` is a text of splits, separated by commas; ``tolerance`` is
    relative, by precision.
    """
    expected = None
    taken = []
    for number, split in enumerate(map(Split.of, chain.split(","))):
        ranks = values(forks.run(split.parallel.world_size, stage, folder, split, base, number * STAGE))
        losses = ranks[0][0]
        if expected is not None:
            assert losses[0] == pytest.approx(expected, rel=tolerance[split.precision]), f"{split}"
        expected = losses[-1]
        # Ranks that hold parts of the model take the same ones; a virtual stage has no reader of its own.
        copies = split.parallel.world_size // split.parallel.dense_data
        samples = sorted(n for _, numbers in ranks for n in numbers)
        assert samples[::copies] == samples[copies - 1 :: copies]
        taken += samples[::copies]
    return taken


def trained(recipe):
    """Losses and norms of five steps, the pieces of a checkpoint (weights and the optimizer's state), trust ratios."""
    from megatron_patch.trust import trust_ratios
    from pretrain.engine import state

    engine = engine_of(recipe)
    results = [engine.train_step(step, Samples()) for step in range(STEPS)]
    pieces = [
        (p.name, p.shape, p.offset, p.block, p.start, p.stop, p.data.detach().clone()) for p in state.pieces(engine)
    ]
    ratios = [of_kind.sort().values for of_kind in trust_ratios(engine.optimizer)]
    return [(result.loss, result.grad_norm) for result in results], pieces, ratios


def assembled(ranks):
    """The tensors that the pieces of all ranks of `trained` make; NaN where there is none."""
    tensors = {}
    for _, pieces, _ in ranks:
        for name, shape, offset, block, start, stop, data in pieces:
            whole = tensors.setdefault(name, torch.full(shape, torch.nan))
            for box in Region.of(offset, block, start, stop).boxes:
                part = data.reshape(-1)[box.position : box.position + box.size].view(box.shape)
                whole[box.slices_in((0,) * len(shape))] = part
    return tensors


def assert_trained_the_same(ranks, expected):
    """Losses, gradient norms, weights and moments of `trained` are those of one process, where the loss fell."""
    ((figures_of_one, _, _),) = expected
    for losses, _, _ in ranks:
        for found, wanted in zip(losses, figures_of_one, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
    found = assembled(ranks)
    wanted = assembled(expected)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert_close(found[key], value, 3e-5, key)  # moments of a router are small sums of large terms
    assert figures_of_one[-1][0] < figures_of_one[0][0], "the loss did not fall"
    return found


def in_one_micro_batch(recipe):
    return replace(recipe, train=replace(recipe.train, micro_batch=recipe.train.global_batch))


def assert_split_equals_one(forks, recipe, alone, *parts):
    """A run over two ranks trains what one process trains; ``parts`` are in names of tensors that the model has."""
    expected = values(forks.run(1, trained, in_one_micro_batch(alone)))
    tensors = assert_trained_the_same(values(forks.run(2, trained, recipe)), expected)
    assert all(any(part in key for key in tensors) for part in parts)


def trainer_of(engine=None, step=0):
    """Stand-in for a trainer, with what a guard needs."""
    processes = SimpleNamespace(is_main=True, rank=0, world_size=1)
    return SimpleNamespace(engine=engine, step=step, processes=processes, inputs=SimpleNamespace(train=Samples()))


def whole(tensor):
    """A tensor without its division over data parallel ranks. Collective."""
    return tensor.detach().full_tensor() if hasattr(tensor, "placements") else tensor.detach()


def local(tensor):
    """What this rank holds of a tensor."""
    return tensor.detach().to_local() if hasattr(tensor, "placements") else tensor.detach()


def values_of(engine):
    """Everything that a skipped step must leave as it is."""
    found = {name: local(value).clone() for name, value in engine.gpt.state_dict().items() if torch.is_tensor(value)}
    for number, part in enumerate(engine.optimizer.chained_optimizers):
        for group in part.optimizer.param_groups:
            for place, main in enumerate(group["params"]):
                found |= {f"{number} {place} {key}": value.clone() for key, value in part.optimizer.state[main].items()}
                found[f"{number} {place} main"] = main.detach().clone()
    return found
