"""``parallel.shard``: all stages of ZeRO train the same, hold their shares, and read each other's checkpoints."""

import importlib.util
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from engines import SHARDS, STEADY, Samples, engine_of, load, local, save, with_optimizer
from forks import values

from pretrain.config import ParallelConfig

FULL = SHARDS[2:]
without_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


def with_shard(recipe, shard):
    size = recipe.parallel.shard_size if shard in FULL else None
    return replace(recipe, parallel=replace(recipe.parallel, shard=shard, shard_size=size))


def trained(recipe, steps):
    """Return losses and gradient norms of each stage, and the shape and held elements of each parameter."""
    from pretrain.engine import stop_parallel

    figures = {}
    held = {}
    for shard in SHARDS:
        engine = engine_of(with_shard(recipe, shard))
        samples = Samples()
        results = [engine.train_step(step, samples) for step in range(steps)]
        figures[shard] = [figure for result in results for figure in (result.loss, result.grad_norm)]
        figures[shard].append(engine.evaluate(samples, 8))
        if shard in FULL:
            named = engine.gpt.named_parameters()
            held[shard] = {name: (tuple(p.shape), local(p).numel()) for name, p in named}
        stop_parallel()
    return figures, held


def assert_same_figures(ranks, tolerance):
    expected = ranks[0][0]["none"]
    assert expected[-3] < expected[0], "the loss did not fall"
    for figures, _ in ranks:
        for shard in SHARDS:
            assert figures[shard] == pytest.approx(expected, rel=tolerance), shard


@pytest.mark.parametrize(
    ("parallel", "precision"),
    [
        ({"expert": 2}, "fp32"),
        pytest.param({"expert": 2}, "bf16", marks=pytest.mark.slow),
        pytest.param({"expert": 2, "data": 2}, "fp32", marks=pytest.mark.slow),
        pytest.param({"data": 4, "recompute": "full"}, "fp32", marks=pytest.mark.slow),
        pytest.param({"expert": 2, "data": 2, "recompute": "selective"}, "fp32", marks=pytest.mark.slow),
        pytest.param({"expert": 2, "data": 2, "shard_size": 2}, "fp32", marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "data": 2, "shard_size": 1}, "fp32", marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "expert": 4}, "fp32", marks=pytest.mark.slow),
        pytest.param({"context": 2, "expert": 2, "data": 2}, "fp32", marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "data": 2}, "fp32", marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "virtual_pipeline": 2, "expert": 2}, "fp32", marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "data": 2, "recompute": "full"}, "fp16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_stages_train_the_same_and_hold_their_shares(forks, parallel, precision):
    """Gradients of several micro batches are accumulated and clipped."""
    recipe = replace(STEADY, parallel=ParallelConfig(**parallel), train=replace(STEADY.train, precision=precision))
    if precision == "fp16":
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, initial_loss_scale=1024.0))
    if "virtual_pipeline" in parallel:
        recipe = replace(recipe, model=replace(recipe.model, num_layers=4))
    size = recipe.parallel.world_size
    steps = 20 if precision == "fp32" else 5  # from there on, differences of rounding in bf16 grow
    ranks = values(forks.run(size, trained, recipe, steps))
    assert_same_figures(ranks, TOLERANCE[precision])
    copies = recipe.parallel.copies * recipe.parallel.pipeline
    expert_data = size // recipe.parallel.expert // copies
    dense_data = size // recipe.parallel.tensor // copies
    for shard in FULL:
        for name, (shape, _) in ranks[0][1][shard].items():
            over = expert_data if ".experts." in name else dense_data
            elements = torch.Size(shape).numel()
            most = -(-shape[0] // over) * (elements // shape[0])  # whole rows
            held = [of_rank[shard][name][1] for _, of_rank in ranks if name in of_rank[shard]]
            assert max(held) <= most and sum(held) * over == elements * len(held), name


def with_cut_blocks(recipe):
    """A recipe in which shards of experts begin within blocks of 256 elements."""
    return replace(recipe, model=recipe.model.with_values({"ffn_hidden_size": 56, "moe.num_experts": 3}))


@pytest.mark.by_default("adamw8bit-{'data': 2}", "adafactor-{'data': 2}")
@pytest.mark.parametrize("parallel", [{"data": 2}, {"expert": 2, "data": 2}], ids=str)
@pytest.mark.parametrize("name", ["adafactor", pytest.param("adamw8bit", marks=without_torchao)])
def test_optimizers_that_look_beyond_their_shards_train_the_same(forks, name, parallel):
    """Factors and root mean squares of whole matrices, and scales of blocks that shards cut."""
    recipe = replace(with_optimizer(name, STEADY), parallel=ParallelConfig(**parallel))
    # At Adafactor's rate of `OPTIMIZERS`, a token meets a near tie of its experts, which rounding decides.
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=1e-2, min_lr=1e-3))
    recipe = recipe if "expert" in parallel else with_cut_blocks(recipe)
    assert_same_figures(values(forks.run(recipe.parallel.world_size, trained, recipe, 20)), 1e-5)


def passed_on(folder, recipe, stages):
    """Train two steps at the first stage and save; load at each further stage, and save again.

    Return, for each stage, losses and gradient norms of two further steps, which are the same after a resume.
    """
    from pretrain.engine import stop_parallel

    followed = []
    before = None
    for shard in stages:
        engine = engine_of(with_shard(recipe, shard))
        samples = Samples()
        if before is None:
            for step in range(2):
                engine.train_step(step, samples)
        else:
            load(engine, folder / before / "step-00000002")
        save(engine, folder / shard, 2, recipe=recipe.values())
        dist.barrier()
        following = [engine.train_step(step, samples) for step in (2, 3)]
        load(engine, folder / shard / "step-00000002")
        again = [engine.train_step(step, samples) for step in (2, 3)]
        assert again == following, shard
        followed.append([figure for result in again for figure in (result.loss, result.grad_norm)])
        before = shard
        stop_parallel()
    return followed


def resumed(folder, recipe):
    """Return the loss after resuming, the checkpoint's step being 2."""
    engine = engine_of(recipe)
    load(engine, folder)
    return engine.train_step(2, Samples()).loss


def tensors_of(folder):
    from pretrain.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


@pytest.mark.by_default("muon-{'data': 2}-fp32", "adamw8bit-{'data': 2}-fp32")
@pytest.mark.parametrize(
    ("name", "parallel", "precision"),
    [
        ("muon", {"data": 2}, "fp32"),
        ("adamw8bit", {"data": 2}, "fp32"),
        *((name, {"data": 2}, "fp32") for name in ("adafactor", "adamw", "lamb", "lars", "sgd")),
        *((name, {"expert": 2}, "bf16") for name in ("adafactor", "adamw", "adamw8bit", "lamb", "muon")),
        *((name, {"data": 4, "shard_size": 2}, "fp32") for name in ("adafactor", "adamw", "adamw8bit", "lamb", "muon")),
        ("muon", {"pipeline": 2, "data": 2}, "fp32"),
    ],
    ids=str,
)
def test_checkpoints_of_every_stage_load_at_every_stage(forks, tmp_path, name, parallel, precision):
    """Bit for bit, and with one process too. Three experts do not divide among two ranks, so each of them is cut."""
    if name == "adamw8bit":
        pytest.importorskip("torchao")
    recipe = STEADY if name == "adamw" else with_optimizer(name, STEADY)
    train = replace(recipe.train, precision=precision)
    recipe = replace(recipe, train=train, parallel=ParallelConfig(**parallel))
    recipe = recipe if "expert" in parallel else with_cut_blocks(recipe)
    stages = ("parameters", "gradients", "optimizer", "none")
    (followed, *others) = values(forks.run(recipe.parallel.world_size, passed_on, tmp_path, recipe, stages))
    assert all(other == followed for other in others)
    for figures in followed:
        assert figures == pytest.approx(followed[0], rel=TOLERANCE[precision])
    saved = tensors_of(tmp_path / "parameters" / "step-00000002")
    assert any(tensor.isfinite().all() and tensor.abs().sum() > 0 for tensor in saved.values())
    for stage in stages[1:]:
        loaded = tensors_of(tmp_path / stage / "step-00000002")
        assert loaded.keys() == saved.keys()
        assert [key for key in saved if not torch.equal(saved[key], loaded[key])] == [], stage
    (loss,) = values(
        forks.run(1, resumed, tmp_path / "parameters" / "step-00000002", replace(recipe, parallel=ParallelConfig()))
    )
    assert loss == pytest.approx(followed[0][0], rel=TOLERANCE[precision])
