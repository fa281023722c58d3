"""Context parallelism through the engine: slices of the sequences on several ranks equal whole ones on one process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from engines import RECIPE, Samples, assert_figures, engine_of, figures, load, save
from forks import only, values
from model_kinds import losses, with_dropout

from pretrain.config import ParallelConfig

SPLITS = {
    "alone": {"context": 2},
    "expert": {"context": 2, "expert": 2},
    "expert over more ranks": {"context": 2, "expert": 4},
    "data": {"context": 2, "data": 2},
}


@pytest.fixture(scope="module")
def alone(forks):
    return only(forks.run(1, figures, RECIPE))


@pytest.mark.by_default("expert")
@pytest.mark.parametrize("split", SPLITS)
def test_losses_routing_and_weights_are_those_of_one_process(forks, alone, split):
    parallel = ParallelConfig(**SPLITS[split], shard="optimizer")
    recipe = replace(RECIPE, parallel=parallel)
    assert_figures(values(forks.run(parallel.world_size, figures, recipe)), alone, parallel.expert)


NOISY = {  # kind, model, split
    "gpt": ("gpt", {}, {"context": 2, "micro_batch": 2}),
    "gpt, recomputed on four ranks": ("gpt", {}, {"context": 4, "recompute": "full"}),
    "gpt and tensor": ("gpt", {}, {"context": 2, "tensor": 2}),
    "a gate that needs whole tokens": ("gpt", {"moe.gate": "noisy", "moe.jitter": 0.0}, {"context": 2}),
    "documents": ("documents", {}, {"context": 2, "micro_batch": 2}),
    "documents and tensor": ("documents", {}, {"context": 2, "tensor": 2}),
    "learned positions": (
        "documents",
        {"position.encoding": "learned_absolute"},
        {"context": 2, "recompute": "selective"},
    ),
}


@pytest.mark.by_default("gpt, recomputed on four ranks")
@pytest.mark.parametrize("case", NOISY)
def test_dropout_masks_of_documents_and_positions_are_those_of_one_process(forks, case):
    kind, model, options = NOISY[case]
    recipe = with_dropout(kind, model=model, **options)
    expected = only(forks.run(1, losses, with_dropout(kind, model=model)))
    for found in values(forks.run(recipe.parallel.world_size, losses, recipe)):
        for got, step in zip(found, expected, strict=True):
            assert got == pytest.approx(step, rel=1e-5), "loss and gradient norm"


def go_on(recipe, folder, first, steps, save_at=None):
    """Losses and weights after steps ``first ... steps - 1``, from the checkpoint of ``first`` unless that is 0."""
    engine = engine_of(recipe)
    if first:
        load(engine, folder)
    trained = []
    for step in range(first, steps):
        if step == save_at:
            save(engine, folder, step)
            dist.barrier()
        trained.append(engine.train_step(step, Samples()).loss)
    return trained, {name: parameter.detach() for name, parameter in engine.gpt.named_parameters()}


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(forks, tmp_path):
    recipe = with_dropout("gpt", 2, context=2, expert=2, shard="optimizer")
    whole = values(forks.run(2, go_on, recipe, tmp_path / "saved", 0, 4, 2))
    resumed = values(forks.run(2, go_on, recipe, tmp_path / "saved", 2, 4))
    for (whole_losses, weights), (later, again) in zip(whole, resumed, strict=True):
        assert later == whole_losses[2:]
        assert all(torch.equal(weights[name], again[name]) for name in weights)


def count_ratios(recipe):
    from megatron_patch.trust import trust_ratios

    engine = engine_of(recipe)
    engine.train_step(0, Samples())
    return [ratios.sort().values for ratios in trust_ratios(engine.optimizer)]


@pytest.mark.slow
def test_trust_ratios_are_counted_once(forks):
    recipe = replace(RECIPE, optimizer=replace(RECIPE.optimizer, name="lamb", warmup_steps=0))
    expected = only(forks.run(1, count_ratios, recipe))
    for found in values(forks.run(2, count_ratios, replace(recipe, parallel=ParallelConfig(context=2)))):
        for got, ratios in zip(found, expected, strict=True):
            assert_close(got, ratios, 1e-4, "ratios")
