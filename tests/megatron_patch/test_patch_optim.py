"""`build_optimizer`: what stands in for Megatron's Adam and for how long, what is decayed, what is refused."""

import pytest
import torch
from forks import only, refusal, values

from fmoe.optim import Lamb, is_matrix, is_stacked


def built(make=None, *, distributed=False, bf16=False, expert_parallel=1):
    """A GPT with biases, those of stacked experts too, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.module import Float16Module
    from tiny_gpt import MOE, start, tiny_gpt

    import fmoe
    from megatron_patch.optimizer import build_optimizer

    start(expert_parallel)
    dtype = torch.bfloat16 if bf16 else torch.float32
    gpt = fmoe.fmoefy(tiny_gpt(add_bias_linear=True, bf16=bf16, params_dtype=dtype), upcycle=False, **MOE)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    model = DistributedDataParallel(gpt.config, ddp_config, Float16Module(gpt.config, gpt) if bf16 else gpt)
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.1,
        weight_decay=0.1,
        bf16=bf16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    return gpt, build_optimizer(config, [model], make)


def decayed_names():
    from megatron_patch.optimizer import shards

    gpt, optimizer = built()
    names = {id(p): name for name, p in gpt.named_parameters()}
    decays = {
        id(p): group["wd_mult"]
        for part in optimizer.chained_optimizers
        for group in part.param_groups
        for p in group["params"]
    }
    found = {names[id(shard.parameter)]: decays[id(shard.main)] for shard in shards(optimizer)}
    return found, {name: (is_matrix(p), is_stacked(p)) for name, p in gpt.named_parameters()}


def test_biases_of_stacked_experts_are_not_decayed(forks):
    """By Megatron's own rule, one axis, they would be."""
    decays, kinds = only(forks.run(1, decayed_names))
    assert decays.keys() == kinds.keys()
    assert {name for name, decay in decays.items() if decay == 0.0} == {
        n for n, (matrix, _) in kinds.items() if not matrix
    }
    assert any(stacked and not matrix for matrix, stacked in kinds.values())
    assert all(name.endswith(("bias", "bias_in", "bias_out")) or "norm" in name for name in decays if decays[name] == 0)


def stands_in():
    import megatron.core.optimizer as module
    from megatron.core.optimizer import distrib_optimizer

    names = [(module, "Adam"), (module, "USING_PYTORCH_OPTIMIZER"), (distrib_optimizer, "Adam")]
    before = [getattr(*name) for name in names]
    calls = []

    def make(groups):
        calls.append(sorted({group["is_expert_parallel"] for group in groups}))
        return torch.optim.RAdam(groups, lr=0.1)

    _, optimizer = built(make, distributed=True)
    kinds = {type(part.optimizer).__name__ for part in optimizer.chained_optimizers}
    return calls, kinds, [getattr(*name) is value for name, value in zip(names, before, strict=True)]


def test_any_optimizer_stands_in_and_is_gone_afterwards(forks):
    """Once for dense parameters and once for experts; under the distributed optimizer, which asserts an Adam, too."""
    calls, kinds, are_back = only(forks.run(1, stands_in))
    assert calls == [[False], [True]] and kinds == {"RAdam"} and all(are_back)


def stands_in_for_a_name_that_has_moved():
    import megatron.core.optimizer as module

    del module.USING_PYTORCH_OPTIMIZER
    built(torch.optim.RAdam)


def test_a_name_that_has_moved_is_told(forks):
    message = refusal(forks.run(1, stands_in_for_a_name_that_has_moved))
    assert "has no megatron.core.optimizer.USING_PYTORCH_OPTIMIZER, which megatron_patch replaces" in message


def layouts(distributed, bf16):
    _, optimizer = built(lambda groups: Lamb(groups, lr=0.1), distributed=distributed, bf16=bf16)
    found = []
    for part in optimizer.chained_optimizers:
        layout = part.optimizer._layout
        held = {main: main.numel() for group in part.param_groups for main in group["params"]}
        assert layout.parts.keys() == held.keys()
        found.append([(blocks.numel, blocks.count, len(blocks.groups)) for blocks in layout.parameters])
        found.append([sum(n for main, n in held.items() if layout.parts[main][0] == i) for i in range(len(found[-1]))])
    return found


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"])
def test_layouts(forks, distributed, bf16):
    """Two ranks: all parameters are in the layout of both, and what they hold of each adds up."""
    ranks = values(forks.run(2, layouts, distributed, bf16))
    for place in (0, 2):
        assert ranks[0][place] == ranks[1][place], "ranks have other lists"
        counts = [count for _, count, _ in ranks[0][place]]
        assert set(counts) == ({0, 1} if place == 0 else {0, 4})
        for number, (numel, count, groups) in enumerate(ranks[0][place]):
            held = [rank[place + 1][number] for rank in ranks]
            assert sum(held) == numel if distributed else held == [numel, numel]
            assert groups == (1 if distributed and count else 0)
