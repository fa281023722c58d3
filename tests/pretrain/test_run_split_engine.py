"""EP=2 and DP=2 equal one process through the engine: Megatron's schedule, DDP, clipping and AdamW, on a GPT."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import only, values

from pretrain.config import ModelConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig

STEPS, LENGTH, VOCAB = 5, 16, 64
RECIPE = Recipe(
    model=ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        ffn_hidden_size=24,
        sequence_length=LENGTH,
        vocab_size=VOCAB,
        num_experts=4,
        top_k=2,
        gate="switch",
        capacity_factor=1.0,
        jitter=0.3,
        init_std=0.3,
        balance_loss=0.1,
    ),
    optimizer=OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=2, clip_grad=0.5),
    train=TrainConfig(steps=STEPS, global_batch=8, micro_batch=2),
)
# A large eps: where a gradient is rounding alone, the size of the step is not.
STEADY = replace(RECIPE, optimizer=replace(RECIPE.optimizer, eps=1e-3))


class Samples:
    """Stand-in for `GPTSamples`: sample n has tokens that count up by 1, 2 or 3."""

    def __getitem__(self, n):
        return (np.arange(LENGTH + 1) * (1 + n % 3) + 5 * n) % VOCAB


def engine_of(recipe):
    from megatron_patch import cpu
    from pretrain.engine import Engine, init_parallel
    from pretrain.start.process import Processes

    cpu.install()
    recipe.check()
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    recipe.check_world_size(processes.world_size)
    init_parallel(recipe, processes)
    return Engine(recipe, processes)


def train(recipe):
    engine = engine_of(recipe)
    seen = {"validation before": engine.evaluate(Samples(), 16)}
    for step in range(STEPS):
        result = engine.train_step(step, Samples())
        seen |= {f"loss {step}": result.loss, f"gradient norm {step}": result.grad_norm, f"lr {step}": result.lr}
        for number, report in engine.routing().items():
            seen |= {f"load {step} {number}": torch.tensor(report.load), f"drops {step} {number}": report.drop_rate}
            seen |= {f"{name} {step} {number}": value for name, value in report.losses.items()}
    seen["validation"] = engine.evaluate(Samples(), 16)
    return seen | {name: p.detach() for name, p in engine.gpt.named_parameters()}


@pytest.fixture(scope="module")
def alone(forks):
    """In one process, and in one micro batch instead of four: noise and routing groups depend on neither."""
    return only(forks.run(1, train, replace(STEADY, train=replace(STEADY.train, micro_batch=8))))


SPLITS = {
    "expert": {"expert": 2},
    "data": {"data": 2},
    "expert, overlapped and shadowed": {"expert": 2, "chunks": 2, "max_rows": 64, "shadow": 1},
    "expert, gathered": {"expert": 2, "exchange": "all_gather"},
    "expert, padded": {"expert": 2, "exchange": "padded", "chunks": 2},
}


@pytest.mark.by_default("expert, overlapped and shadowed-replicated", "data-distributed")
@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"])
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_equal_one(forks, alone, split, distributed):
    parallel = ParallelConfig(**SPLITS[split])
    recipe = replace(STEADY, parallel=parallel, optimizer=replace(STEADY.optimizer, distributed=distributed))
    ranks = values(forks.run(2, train, recipe))
    for name, expected in alone.items():
        found = [rank[name] for rank in ranks]
        if parallel.expert == 2 and ".experts." in name:
            found = [torch.cat(found)]
        for rank, actual in enumerate(found):
            if torch.is_tensor(expected):
                assert_close(actual, expected, 1e-5, f"{name} on rank {rank}")
            else:
                assert actual == pytest.approx(expected, rel=1e-5), f"{name} on rank {rank}"


def test_the_case_means_something(alone):
    """Tokens are dropped, the gradient is clipped, and the loss falls."""
    assert all(alone[f"drops {step} {layer}"] > 0.01 for step in range(STEPS) for layer in (1, 2))
    assert all(alone[f"gradient norm {step}"] > RECIPE.optimizer.clip_grad for step in range(STEPS))
    assert alone["validation"] < alone["validation before"]
    assert [alone[f"lr {step}"] for step in range(2)] == pytest.approx([0.005, 0.01])
    assert alone[f"lr {STEPS - 1}"] == pytest.approx(0.001)


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
