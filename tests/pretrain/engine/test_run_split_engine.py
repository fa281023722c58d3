"""EP=2 and DP=2 equal one process through the engine: Megatron's schedule, DDP, clipping and AdamW, on a GPT."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from engines import RECIPE, STEADY, Samples, assert_figures, engine_of, figures, in_one_micro_batch
from forks import only, values

from pretrain.config import ParallelConfig


@pytest.fixture(scope="module")
def alone(forks):
    """In one process, and in one micro batch instead of four: noise and routing groups depend on neither."""
    return only(forks.run(1, figures, in_one_micro_batch(STEADY)))


SPLITS = {
    "expert": {"expert": 2},
    "data": {"data": 2},
    "expert, overlapped and shadowed": {"expert": 2, "chunks": 2, "max_rows": 64, "shadow": 1},
    "expert, gathered": {"expert": 2, "exchange": "all_gather"},
    "expert, padded": {"expert": 2, "exchange": "padded", "chunks": 2},
}


@pytest.mark.by_default("expert, overlapped and shadowed-none", "data-optimizer")
@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_equal_one(forks, alone, split, shard):
    parallel = ParallelConfig(**SPLITS[split], shard=shard)
    recipe = replace(STEADY, parallel=parallel)
    assert_figures(values(forks.run(2, figures, recipe)), alone, parallel.expert)


def fail_on_rank_1():
    engine = engine_of(replace(RECIPE, parallel=ParallelConfig(expert=2)))
    engine.train_step(0, Samples())
    gate = engine.moe_layers[1].gate

    def broken(*_):
        raise ArithmeticError("the router of rank 1 is out of numbers")

    if dist.get_rank() == 1:
        gate.forward = broken
    try:
        engine.train_step(1, Samples())
        raised = None
    except Exception as error:
        raised = (type(error).__name__, str(error))
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    gate.__dict__.pop("forward", None)
    return raised, total.item(), engine.evaluate(Samples(), 8)


def test_an_error_in_one_ranks_gate_is_raised_on_both(forks):
    (waiting, total_0, loss_0), (failing, total_1, loss_1) = values(forks.run(2, fail_on_rank_1))
    assert failing == ("ArithmeticError", "the router of rank 1 is out of numbers")
    assert waiting[0] == "PeerError"
    assert "rank 1 " in waiting[1] and "the router of rank 1 is out of numbers" in waiting[1]
    assert total_0 == total_1 == 3.0, "the process group is of no use any more"
    assert loss_0 == loss_1
