"""A Megatron GPT after `fmoefy`, trained by Megatron's own schedule, DDP and optimizer, alone and on two ranks."""

import pytest
import torch
from compare import assert_close
from forks import only, values

STEPS = 20
GLOBAL_BATCH = 4
MICRO_BATCH = 2


def trained(expert_parallel, distributed):
    """Losses and gradient norms of every step, the final parameters with the experts of all ranks, and the report."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from tiny_gpt import LENGTH, MOE, batch, gather_experts, start, tiny_gpt

    import fmoe

    start(expert_parallel)
    gpt = fmoe.fmoefy(tiny_gpt(), upcycle=False, **MOE)
    model = DistributedDataParallel(
        gpt.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed),
        gpt,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-2, clip_grad=0.5, use_distributed_optimizer=distributed),
        [model],
    )
    gpt.config.grad_scale_func = optimizer.scale_loss
    gpt.config.finalize_model_grads_func = finalize_model_grads
    group = parallel_state.get_data_parallel_group()

    def micro_batches(step):
        for first in range(group.rank() * MICRO_BATCH, GLOBAL_BATCH, group.size() * MICRO_BATCH):
            fmoe.random.set_position(seed=3, step=step, first_token=first * LENGTH)
            yield batch(step * GLOBAL_BATCH + first, MICRO_BATCH)

    def forward_step(iterator, model):
        tokens, positions, labels = next(iterator)
        output = model(tokens, positions, None, labels=labels)
        return output, lambda output: (output.mean(), {"loss": output.mean().detach().clone()})

    history = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=micro_batches(step),
            model=model,
            num_microbatches=GLOBAL_BATCH // (MICRO_BATCH * group.size()),
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        loss = torch.stack([result["loss"] for result in results]).mean()
        dist.all_reduce(loss, group=group)
        successful, grad_norm, _ = optimizer.step()
        assert successful
        history.append((loss.item() / group.size(), float(grad_norm)))
    parameters = {
        name: (gather_experts(p) if ".experts." in name else p).detach().clone() for name, p in gpt.named_parameters()
    }
    tokens = sum(report.tokens for report in fmoe.metrics(gpt).values())
    return history, parameters, tokens


@pytest.fixture(scope="module")
def alone(forks):
    return only(forks.run(1, trained, 1, False))


@pytest.mark.by_default("dp2-distributed")
@pytest.mark.parametrize(
    ("expert_parallel", "distributed"),
    [
        pytest.param(2, False, id="ep2"),
        pytest.param(1, True, id="dp2-distributed"),
    ],
)
def test_20_steps_are_the_same_on_one_rank_and_on_two(forks, alone, expert_parallel, distributed):
    history, parameters, tokens = alone
    ranks = values(forks.run(2, trained, expert_parallel, distributed))
    assert ranks[0][0] == ranks[1][0], "the ranks report different steps"
    for step, (mine, expected) in enumerate(zip(ranks[0][0], history, strict=True)):
        assert mine == pytest.approx(expected, rel=1e-4), f"loss and gradient norm of step {step}"
    for name, expected in parameters.items():
        for rank, (_, values_of_rank, _) in enumerate(ranks):
            assert_close(values_of_rank[name], expected, 1e-4, f"{name} on rank {rank}")
    assert ranks[0][2] + ranks[1][2] == tokens == STEPS * GLOBAL_BATCH * 16 * 2
