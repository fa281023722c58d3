"""``parallel.sync_every``: local SGD and DiLoCo against plain loops, their bytes, and exact resumption."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from engines import STEADY, Samples, engine_of, load, save
from forks import only, values

from pretrain.config import ParallelConfig


def recipe_with(parallel, base=STEADY, precision="fp32", **optimizer):
    train = replace(base.train, precision=precision, validation_every=24, steps=48)
    optimizer = replace(base.optimizer, clip_grad=0.0, **optimizer)
    checkpoint = replace(base.checkpoint, every=24)
    parallel = ParallelConfig(**parallel)
    return replace(base, parallel=parallel, train=train, optimizer=optimizer, checkpoint=checkpoint)


def dense(recipe):
    model = recipe.model.with_values({"moe.num_experts": 0, "moe.top_k": 1})
    return replace(recipe, model=model)


def trained(recipe, steps):
    """Losses, weights after each step, and the bytes sent in each step by reductions of the data parallel ranks."""
    from bench.traffic import Traffic

    engine = engine_of(recipe)
    seen = []
    sent = []
    losses = []
    for step in range(steps):
        with Traffic() as traffic:
            losses.append(engine.train_step(step, Samples()).loss)
        sent.append(traffic.sent)
        seen.append({name: p.detach().clone() for name, p in engine.gpt.named_parameters()})
    return losses, seen, sent


class Every:
    """Samples that one of two data parallel ranks reads of a global batch, for a run of that rank alone."""

    def __init__(self, rank, micro, whole):
        self.samples, self.rank, self.micro, self.whole = Samples(), rank, micro, whole

    def __getitem__(self, n):
        step, place = divmod(n, self.whole // 2)
        part, within = divmod(place, self.micro)
        return self.samples[step * self.whole + (2 * part + self.rank) * self.micro + within]


def by_hand(recipe, steps, outer):
    """Weights after each average of two engines that take turns, as the definition has it."""
    from pretrain.engine import stop_parallel

    every = recipe.parallel.sync_every
    train = replace(recipe.train, global_batch=recipe.train.global_batch // 2)
    alone = replace(recipe, parallel=ParallelConfig(), train=train)
    engines = []
    for _ in range(2):
        engines.append(engine_of(alone))
        stop_parallel()
    engine_of(alone)
    named = [dict(engine.gpt.named_parameters()) for engine in engines]
    base = {name: p.detach().clone() for name, p in named[0].items()}
    buffers = {name: torch.zeros_like(p) for name, p in base.items()}
    averages = []
    for step in range(steps):
        for rank, engine in enumerate(engines):
            engine.train_step(step, Every(rank, recipe.train.micro_batch, recipe.train.global_batch))
        if (step + 1) % every:
            continue
        with torch.no_grad():
            for name, common in base.items():
                change = common - (named[0][name] + named[1][name]) / 2
                if outer == "nesterov":
                    buffers[name].mul_(recipe.parallel.sync_momentum).add_(change)
                    change = change + recipe.parallel.sync_momentum * buffers[name]
                    common.sub_(recipe.parallel.sync_lr * change)
                else:
                    common.sub_(change)
                for parameters in named:
                    parameters[name].copy_(common)
        averages.append({name: p.clone() for name, p in base.items()})
    return averages


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_two_ranks_are_two_engines_that_meet_at_times(forks, outer):
    recipe = dense(recipe_with({"data": 2, "sync_every": 3, "sync_outer": outer}))
    recipe = replace(recipe, model=replace(recipe.model, moe=replace(recipe.model.moe, jitter=0.0)))
    expected = only(forks.run(1, by_hand, recipe, 6, outer))
    ranks = values(forks.run(2, trained, recipe, 6))
    for number, step in enumerate((2, 5)):
        for _, seen, _ in ranks:
            for name, value in expected[number].items():
                assert_close(seen[step][name], value, 1e-5, f"{name} after step {step}")
    assert not torch.equal(*(seen[1]["embedding.word_embeddings.weight"] for _, seen, _ in ranks)), "ranks are apart"


@pytest.mark.by_default(1)
@pytest.mark.parametrize("every", [2, 8])
def test_bytes_fall_by_the_period(forks, every):
    rare = recipe_with({"data": 2, "sync_every": every})
    ranks = values(forks.run(2, trained, rare, 8))
    whole = values(forks.run(2, trained, recipe_with({"data": 2}), 8))
    for (losses, _, sent), (_, _, sent_whole) in zip(ranks, whole, strict=True):
        local = sent[0]  # losses and statistics
        averages = sum(count - local for count in sent)
        assert averages == pytest.approx((sum(sent_whole) - 8 * local) / every, rel=1e-3)
        assert losses[-1] < losses[0]
    assert torch.equal(*(seen[-1]["decoder.layers.0.self_attention.linear_qkv.weight"] for _, seen, _ in ranks))


def test_the_last_step_ends_with_an_average(forks):
    recipe = recipe_with({"data": 2, "sync_every": 4})
    recipe = replace(recipe, train=replace(recipe.train, steps=6))
    (_, first, _), (_, second, _) = values(forks.run(2, trained, recipe, 6))
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert torch.equal(first[5][name], second[5][name]) and not torch.equal(first[4][name], second[4][name])


def test_a_warmup_is_the_run_without(forks):
    rare = recipe_with({"data": 2, "sync_every": 4, "sync_warmup": 3})
    losses, seen, _ = values(forks.run(2, trained, rare, 4))[0]
    expected, weights, _ = values(forks.run(2, trained, recipe_with({"data": 2}), 4))[0]
    assert losses == expected
    for name, value in weights[2].items():
        assert torch.equal(seen[2][name], value), name
    assert any(not torch.equal(seen[3][name], value) for name, value in weights[3].items())


def periods(recipe, steps):
    engine = engine_of(recipe)
    ends = []
    for step in range(steps):
        engine.train_step(step, Samples())
        if engine.sync.last == step + 1:
            ends.append((step + 1, engine.sync.period))
    return ends


def test_an_adaptive_period_grows_as_the_rate_falls(forks):
    recipe = recipe_with({"data": 2, "sync_every": 2, "sync_adaptive": True}, lr=1e-2, min_lr=1e-5, warmup_steps=0)
    recipe = replace(recipe, train=replace(recipe.train, steps=25))
    first, second = values(forks.run(2, periods, recipe, 24))
    assert first == second
    assert first[0] == (2, 2)
    assert all(done == before + period for (before, period), (done, _) in pairwise(first))
    assert first[-1][1] > 4


def resumed(folder, recipe, steps):
    """Train, save, train five further steps; load, and train these again. Return losses and weights of both."""
    engine = engine_of(recipe)
    for step in range(steps):
        engine.train_step(step, Samples())
    save(engine, folder, steps, recipe=recipe.values())
    dist.barrier()
    ends = []
    for _ in range(2):
        losses = [engine.train_step(step, Samples()).loss for step in range(steps, steps + 5)]
        ends.append((losses, {name: p.detach().clone() for name, p in engine.gpt.named_parameters()}))
        load(engine, folder)
    return ends


def fresh(folder, recipe, steps):
    engine = engine_of(recipe)
    load(engine, folder)
    return [engine.train_step(step, Samples()).loss for step in range(steps, steps + 5)]


CASES = [
    ({"data": 2, "sync_outer": "nesterov"}, "fp32", {}),
    ({"data": 2}, "bf16", {}),
    ({"expert": 2, "data": 2, "sync_outer": "nesterov"}, "bf16", {"name": "lamb"}),
    ({"tensor": 2, "data": 2, "sync_outer": "nesterov"}, "fp32", {"name": "muon", "lr": 1e-2}),
    ({"pipeline": 2, "data": 2, "sync_adaptive": True}, "fp32", {}),
]


@pytest.mark.by_default(0, 2)
@pytest.mark.parametrize(("parallel", "precision", "optimizer"), CASES, ids=range(len(CASES)))
def test_a_run_between_averages_resumes_bit_for_bit(forks, tmp_path, parallel, precision, optimizer):
    """In the same process and in a new one; and, at another number of ranks, close to it."""
    recipe = recipe_with(parallel | {"sync_every": 4}, precision=precision, **optimizer)
    size = recipe.parallel.world_size
    ranks = values(forks.run(size, resumed, tmp_path, recipe, 6))
    for (losses, weights), (again, weights_again) in ranks:
        assert losses == again
        assert all(torch.equal(weights[name], value) for name, value in weights_again.items())
    assert values(forks.run(size, fresh, tmp_path, recipe, 6))[0] == ranks[0][0][0]
    if precision == "fp32" and size == 2:
        (other,) = values(forks.run(1, fresh, tmp_path, replace(recipe, parallel=ParallelConfig()), 6))
        assert other[0] == pytest.approx(ranks[0][0][0][0], rel=0.05)


@pytest.mark.slow
def test_a_run_begins_and_ends_rare_synchronization(forks, tmp_path):
    """Checkpoints pass between the two."""
    whole = recipe_with({"data": 2})
    rare = recipe_with({"data": 2, "sync_every": 4, "sync_outer": "nesterov"})
    begun = values(forks.run(2, resumed, tmp_path / "a", whole, 4))
    (first, *_) = values(forks.run(2, fresh, tmp_path / "a", rare, 4))
    assert first[0] == begun[0][0][0][0]
    begun = values(forks.run(2, resumed, tmp_path / "b", rare, 4))
    (first, *_) = values(forks.run(2, fresh, tmp_path / "b", whole, 4))
    assert first[0] == begun[0][0][0][0]
