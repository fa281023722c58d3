"""Wrappers that take every parameter for a replica would train wrong experts without a word: an error comes instead."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fmoe.errors import UserError


def refuse_replicating_wrapper(layer: nn.Module) -> None:
    """Called in the forward pass of a layer whose experts are spread over ``layer.moe_group``.

    torch reads which parameters to ignore from the outermost module, which a layer cannot reach, and tells no module
    that it was wrapped: what can be seen from within is the wrapper that runs.

    Raises:
        UserError: torch's DistributedDataParallel or `fully_shard` takes the experts of several ranks for one.
    """
    if torch.compiler.is_compiling():
        return
    expert = next(layer.experts.parameters(), None)
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and any(expert is p for p in wrapper._module_parameters):
        others = set(dist.get_process_group_ranks(layer.moe_group)) - {dist.get_rank()}
        if others & set(dist.get_process_group_ranks(wrapper.process_group)):
            raise UserError(
                f"torch's DistributedDataParallel made the experts of {layer.name} on all ranks those of its first "
                "rank: build the model anew and wrap it in fmoe.parallel.DistributedDataParallel(model, groups)"
            )
    # FSDP puts its own tensors in the place of parameters, which lose the mark of experts.
    if getattr(layer.experts, "_is_fsdp_managed_module", False) and getattr(expert, "allreduce", True):
        from torch.distributed.fsdp import FSDPModule

        if not any(isinstance(module, FSDPModule) for module in layer.experts.modules()):
            raise UserError(
                f"torch's fully_shard took the experts of {layer.name} on all ranks for shards of the same ones: build "
                "the model anew and shard it with fmoe.parallel.fully_shard(model, groups)"
            )
