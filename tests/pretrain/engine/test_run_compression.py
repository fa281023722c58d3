"""``parallel.grad_reduce`` and ``parallel.grad_compress``: what is trained, sent, skipped and saved."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engines import STEADY, Samples, engine_of, load, save
from forks import only, values

from pretrain.config import ParallelConfig


def recipe_with(parallel, base=STEADY, **optimizer):
    return replace(base, parallel=ParallelConfig(**parallel), optimizer=replace(base.optimizer, **optimizer))


def losses(recipe, steps):
    """Losses and gradient norms, and the bytes that this rank sent to reduce gradients after the first four steps."""
    from bench.traffic import Traffic

    engine = engine_of(recipe)
    finish = engine.config.finalize_model_grads_func
    sent = []

    def counted(*arguments, **options):
        with Traffic() as traffic:
            finish(*arguments, **options)
        sent.append(traffic.sent)

    for chunk in engine.chunks:
        chunk.config.finalize_model_grads_func = counted
    results = [engine.train_step(step, Samples()) for step in range(steps)]
    return [(result.loss, result.grad_norm) for result in results], sum(sent[4:])


@pytest.mark.by_default("none-{'data': 2}", "optimizer-{'expert': 2}")
@pytest.mark.parametrize("parallel", [{"data": 2}, {"expert": 2}, {"expert": 2, "data": 2}], ids=str)
@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
def test_gradients_reduced_in_16_bits_are_close_and_half_the_bytes(forks, shard, parallel):
    size = ParallelConfig(**parallel).world_size
    expected, bytes_32 = values(forks.run(size, losses, recipe_with(parallel | {"shard": shard}), 5))[0]
    for dtype, tolerance in (("bf16", 2e-2), ("fp16", 2e-3)):
        found, sent = values(
            forks.run(size, losses, recipe_with(parallel | {"shard": shard, "grad_reduce": dtype}), 5)
        )[0]
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=tolerance)
        assert found[0][1] == pytest.approx(expected[0][1], rel=tolerance) and found != expected
        if shard != "parameters":  # there, FSDP2 reduces in the backward pass
            assert sent < 0.6 * bytes_32


@pytest.mark.by_default(0)
@pytest.mark.parametrize("parallel", [{"data": 4}, {"expert": 2, "data": 2}, {"tensor": 2, "data": 2}], ids=str)
@pytest.mark.parametrize("name", ["hierarchical", "ring", "grid"])
def test_all_reduce_algorithms_train_the_same(forks, name, parallel):
    chosen = parallel | {"all_reduce": name} | ({"node_size": 2} if name == "hierarchical" else {})
    expected = values(forks.run(4, losses, recipe_with(parallel), 5))[0][0]
    for found, _ in values(forks.run(4, losses, recipe_with(chosen), 5)):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def losses_of_own(recipe, steps):
    """`losses` with a registered compressor, which averages gradients whole and counts its buckets."""
    from fmoe.parallel.compression import Compressor, average
    from pretrain.engine.compression import register_compressor

    class Whole(Compressor):
        reduced = 0

        def reduce(self, bucket):
            Whole.reduced += 1
            average(bucket.buffer(), self.group)

    register_compressor("whole", Whole)
    return losses(recipe, steps)[0], Whole.reduced


def test_a_registered_compressor_reduces_gradients(forks):
    plain = {"data": 2}
    expected = values(forks.run(2, losses, recipe_with(plain), 3))[0][0]
    for found, reduced in values(forks.run(2, losses_of_own, recipe_with(plain | {"grad_compress": "whole"}), 3)):
        assert np.array(found) == pytest.approx(np.array(expected), rel=1e-5) and reduced >= 3


METHODS = {
    "powersgd": ({"rank": 2, "warmup": 4}, {}),
    "dgc": ({"density": 0.05, "warmup": 4, "momentum": 0.5}, {"name": "sgd", "lr": 0.2, "momentum": 0.0}),
    "onebit": ({"warmup": 4}, {"clip_grad": 0.0}),
    "onebit lamb": ({"warmup": 4}, {"name": "lamb", "lr": 1e-2, "clip_grad": 0.0}),
}


def with_method(name, parallel):
    options, optimizer = METHODS[name]
    compressed = {"grad_compress": name.split()[0], "compress_options": options}
    return recipe_with(parallel | compressed, **optimizer)


@pytest.mark.by_default("powersgd-{'data': 2}", "dgc-{'data': 2}", "onebit-{'expert': 2, 'data': 2}")
@pytest.mark.parametrize("parallel", [{"data": 2}, {"expert": 2, "data": 2}, {"context": 2, "data": 2}], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_compressed_run_learns_and_all_ranks_agree(forks, name, parallel):
    recipe = with_method(name, parallel)
    ranks = values(forks.run(recipe.parallel.world_size, losses, recipe, 30))
    assert all(found == ranks[0][0] for found, _ in ranks)
    figures = [loss for loss, _ in ranks[0][0]]
    whole = replace(recipe, parallel=ParallelConfig(**parallel))
    ((expected, bytes_32), *_) = values(forks.run(whole.parallel.world_size, losses, whole, 30))
    assert figures[:4] == pytest.approx([loss for loss, _ in expected][:4], rel=1e-4) or name == "dgc"
    begin = expected[0][0]
    end = sum(loss for loss, _ in expected[-5:]) / 5
    assert sum(figures[-5:]) / 5 < begin - 0.5 * (begin - end)
    assert max(sent for _, sent in ranks) < bytes_32 / 2


@pytest.mark.parametrize("name", METHODS)
def test_one_process_is_the_run_without_compression(forks, name):
    """Up to the optimizer, whose second moments are kept."""
    if name.startswith("onebit"):
        pytest.skip("the optimizer is another one")
    recipe = with_method(name, {})
    found, _ = only(forks.run(1, losses, recipe, 3))
    assert found == only(forks.run(1, losses, replace(recipe, parallel=ParallelConfig()), 3))[0]


def resumed(folder, recipe, steps):
    """Train, save after ``steps``, train three further steps; load, and train these again."""
    engine = engine_of(recipe)
    for step in range(steps):
        engine.train_step(step, Samples())
    save(engine, folder, steps, recipe=recipe.values())
    dist.barrier()
    ends = []
    for _ in range(2):
        results = [engine.train_step(step, Samples()) for step in range(steps, steps + 3)]
        weights = {name: p.detach().clone() for name, p in engine.gpt.named_parameters()}
        ends.append(([(result.loss, result.grad_norm) for result in results], weights))
        load(engine, folder)
    return ends


@pytest.mark.by_default("powersgd-{'data': 2}", "onebit lamb-{'data': 2}")
@pytest.mark.parametrize("parallel", [{"data": 2}, {"expert": 2, "data": 2}, {"context": 2, "data": 2}], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_a_compressed_run_resumes_bit_for_bit(forks, tmp_path, name, parallel):
    recipe = with_method(name, parallel)
    for first, second in values(forks.run(recipe.parallel.world_size, resumed, tmp_path, recipe, 6)):
        assert first[0] == second[0]
        assert all(torch.equal(second[1][key], value) for key, value in first[1].items())


def fresh(folder, recipe, step):
    """Load in a new engine; return two losses, and the sums of each kind of memory over this rank."""
    from pretrain.checkpoint import open_checkpoint
    from pretrain.engine import state

    engine = engine_of(recipe)
    if folder is not None:
        state.load(engine, open_checkpoint(folder))
    sums = {}
    for compressor in engine.compressors:
        for memory in compressor.memories():
            sums[memory.name] = sums.get(memory.name, 0.0) + float(memory.values.double().sum())
    return [engine.train_step(step + n, Samples()).loss for n in range(2)], sums


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_what_was_not_sent_goes_on_at_other_splits(forks, tmp_path, name):
    """At another number of ranks, each has the mean of the errors; at the same number, in a new process, its own."""
    recipe = with_method(name, {"data": 2})
    ends = values(forks.run(2, resumed, tmp_path, recipe, 6))
    again = values(forks.run(2, fresh, tmp_path, recipe, 6))
    assert again[0][0] == [loss for loss, _ in ends[0][0][0][:2]]
    for parallel in ({"data": 4}, {"expert": 2, "data": 2}):
        other = replace(recipe, parallel=replace(recipe.parallel, **parallel))
        ranks = values(forks.run(4, fresh, tmp_path, other, 6))
        assert ranks[0][0] == pytest.approx(again[0][0], rel=0.02)
        kinds = {"unsent", "error"} & ranks[0][1].keys()
        assert kinds
        for kind in kinds:
            whole = sum(sums[kind] for _, sums in again) / 2
            assert whole != 0
            if "expert" not in parallel:  # a rank has some of them
                assert all(sums[kind] == pytest.approx(whole, rel=1e-4, abs=1e-6) for _, sums in ranks)


def skipped(recipe, reason):
    """Skip step 5 of eight, in which rank 1 has other gradients or none that is finite; return losses and memories."""

    def refused(step, norm):
        if reason == "nan" and not math.isfinite(norm):
            return nonfinite_report(engine, step, Samples())  # which computes the step again
        if reason == "nan":
            return None
        return "refused" if step == 5 else None

    from pretrain.engine.nonfinite import nonfinite_report

    engine = engine_of(recipe)
    results = []
    for step in range(8):
        before = [memory.values.clone() for compressor in engine.compressors for memory in compressor.memories()]
        undo = []
        if step == 5 and reason == "nan" and dist.get_rank() == 1:
            parameter = next(iter(engine.gpt.parameters()))
            undo.append(parameter.register_hook(lambda gradient: gradient * float("nan")))
        results.append(engine.train_step(step, Samples(), lambda loss, norm, step=step: refused(step, norm)))
        for hook in undo:
            hook.remove()
        after = [memory.values for compressor in engine.compressors for memory in compressor.memories()]
        if step == 5:
            is_same = all(map(torch.equal, before, after)) and {c.step for c in engine.compressors} == {5}
    return [result.loss for result in results], is_same, [result.skipped is not None for result in results]


@pytest.mark.by_default("dgc-check", "onebit-check", "powersgd-check")
@pytest.mark.parametrize("reason", ["check", "nan"])
@pytest.mark.parametrize("name", METHODS)
def test_a_skipped_step_leaves_no_trace_in_memories(forks, name, reason):
    for losses_, is_same, are_skipped in values(forks.run(2, skipped, with_method(name, {"data": 2}), reason)):
        assert is_same and are_skipped == [step == 5 for step in range(8)]
        assert all(map(math.isfinite, losses_))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"all_reduce": "ring"}, with_method("powersgd", {"data": 2}).parallel),
        ({"sync_every": 2}, with_method("onebit", {"data": 2}).parallel),
        (
            vars(with_method("powersgd", {"data": 2}).parallel),
            replace(with_method("powersgd", {"data": 2}).parallel, compress_options={"rank": 1, "warmup": 4}),
        ),
        (vars(with_method("onebit", {"data": 2}).parallel), with_method("powersgd", {"data": 2}).parallel),
    ],
    ids=range(4),
)
def test_a_run_goes_on_with_another_method(forks, tmp_path, before, after):
    base = recipe_with({"data": 2} | before, clip_grad=0.0)
    base = replace(base, train=replace(base.train, validation_every=2), checkpoint=replace(base.checkpoint, every=2))
    expected = values(forks.run(2, resumed, tmp_path, base, 6))[0][0][0][0][0]
    other = replace(base, parallel=after)
    for found, _ in values(forks.run(2, fresh, tmp_path, other, 6)):
        assert found[0] == expected and all(map(math.isfinite, found))


@pytest.mark.slow
def test_a_stage_without_experts_has_counted_the_same_steps(forks, tmp_path):
    model = STEADY.model.with_values({"moe.layers": (2,), "tie_embeddings": False})
    recipe = replace(with_method("onebit", {"pipeline": 2, "data": 2}), model=model)
    ends = values(forks.run(4, resumed, tmp_path, recipe, 6))
    other = replace(recipe, parallel=replace(recipe.parallel, pipeline=1, data=4))
    ranks = values(forks.run(4, fresh, tmp_path, other, 6))
    assert ranks[0][0] == pytest.approx([loss for loss, _ in ends[0][0][0][:2]], rel=0.05)
