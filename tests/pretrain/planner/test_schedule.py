"""Replayed schedules: against theory, and against the passes of the engine's own stages."""

from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist
from engines import RECIPE, Split
from forks import only

from pretrain.planner.schedule import Times, most_in_flight, order, seconds

EQUAL = Times(forward=1.0, backward=2.0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [4, 8, 40])
def test_equal_stages_take_the_time_of_theory(schedule, stages, micro_batches):
    times = [[EQUAL]] * stages
    assert seconds(schedule, times, micro_batches, 0.0) == pytest.approx((micro_batches + stages - 1) * 3)


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_interleaved_chunks_divide_the_bubble(chunks, micro_batches):
    times = [[Times(1 / chunks, 2 / chunks)] * chunks] * 4
    # arXiv 2104.04473 section 2.2: a bubble of (p - 1) (f + b) / v
    assert seconds("1f1b", times, micro_batches, 0.0) == pytest.approx(micro_batches * 3 + 3 * 3 / chunks)


def test_weights_fill_the_bubble():
    times = [[Times(1.0, 1.0, 1.0)]] * 4
    # arXiv 2401.10241 table 1: ZB-H1 has a bubble of (p - 1) (F + B - 2 W), here with F = B = W, and B without W
    assert seconds("zero_bubble", times, 8, 0.0) == pytest.approx(8 * 3 + 3 * (1 + 1 - 1))


def test_a_slow_stage_and_messages_set_the_pace():
    times = [[EQUAL], [Times(2.0, 4.0)], [EQUAL]]
    # Before its first pass, the slow stage waits for a forward pass of 1; before its first backward pass, for 1 more
    # until the last stage has ended; after its last one, the first stage takes 2.
    assert seconds("1f1b", times, 20, 0.0) == pytest.approx(20 * 6 + 1 + 1 + 2)
    assert seconds("1f1b", times, 20, 0.5) > seconds("1f1b", times, 20, 0.0) + 4 * 0.5 - 1e-9


@pytest.mark.parametrize(
    ("schedule", "expected"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [9] * 4), ("zero_bubble", [4] * 4)]
)
def test_micro_batches_in_flight(schedule, expected):
    assert [most_in_flight(schedule, stage, 4, 1, 9) for stage in range(4)] == expected


def _passes(recipe, rank):
    """The passes of the engine's schedule on a rank: whether forward, and the chunk."""
    from megatron.core.pipeline_parallel import schedules

    from pretrain.engine.engine import Engine
    from pretrain.planner.loads import of_slowest, uniform
    from pretrain.planner.trace import trace_step

    dist.destroy_process_group()
    passes = []
    forward = Engine._forward_step
    backward = schedules.backward_step

    def noted_forward(engine, batches, model):
        passes.append(("forward", engine.model.index(model)))
        return forward(engine, batches, model)

    def noted_backward(*arguments, **options):
        passes.append(("backward", None))
        return backward(*arguments, **options)

    with (
        mock.patch.object(Engine, "_forward_step", noted_forward),
        mock.patch.object(schedules, "backward_step", noted_backward),
    ):
        trace_step(recipe, rank, of_slowest(uniform(4)))
    return passes


@pytest.mark.parametrize("text", ["PP2", "PP2 VPP2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_order_is_that_of_the_engine(forks, text, rank):
    recipe = Split.of(text).recipe(RECIPE)
    recipe = replace(
        recipe,
        model=replace(recipe.model, num_layers=4),
        train=replace(recipe.train, micro_batch=2, global_batch=12),
    )
    replayed = [
        (kind, chunk if kind == "forward" else None)
        for kind, chunk, _ in order("1f1b", rank, 2, recipe.parallel.model_chunks, 6)
    ]
    assert only(forks.run(1, _passes, recipe, rank)) == replayed
