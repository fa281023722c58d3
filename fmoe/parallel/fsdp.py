"""torch's FSDP2 for models whose experts are spread over ranks."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe.experts.modules import ModuleExperts
from fmoe.parallel.buckets import broadcast
from fmoe.parallel.gradients import has_mark
from fmoe.parallel.groups import ParallelGroups, moe_layers
from fmoe.runtime import ownership


def fully_shard(module: nn.Module, groups: ParallelGroups, **options: Any) -> nn.Module:
    """`torch.distributed.fsdp.fully_shard` in place: the experts of every `MoE` layer sharded over the ranks that hold
    the same ones, everything else over all data parallel ranks.

    After the backward pass every gradient is that of the mean over all ranks' losses, experts' too. As with torch's
    own, call it for blocks first and for the whole model last, to gather block after block.

    Args:
        module: its `MoE` layers are spread over ``groups.moe_group``. Dense parameters begin as those of the first
            data parallel rank, experts as those of the first rank that holds them. Of a model on the meta device,
            materialise a block (``to_empty``, ``reset_parameters``) before it is sharded: initial weights are keyed by
            whole experts.
        groups: of `fmoe.parallel.init`.
        options: torch's, but for ``mesh``: ``reshard_after_forward``, ``mp_policy``, ``offload_policy``, ...

    Returns:
        ``module``, whose parameters are now DTensors over two meshes.

    Raises:
        UserError: a layer is spread over other ranks.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import fully_shard as shard

    layers = moe_layers(module, groups).values()
    whole = [p for p in module.parameters() if not _is_sharded(p) and not p.is_meta]
    ownership.refresh()
    broadcast([p for p in whole if not has_mark(p)], groups.data_group)
    broadcast([p for p in whole if has_mark(p)], groups.expert_data_group)
    for layer in layers:
        if isinstance(layer.experts, FSDPModule):
            continue
        if type(layer.experts) is nn.ModuleList:  # a subclass of FastMoE's FMoE; FSDP gathers where a module is called
            layer.experts = ModuleExperts(layer.experts)
        placement = {"shard_placement_fn": _placement(groups.dp)} if groups.dp > 1 else {}
        shard(layer.experts, mesh=groups.expert_data_mesh, **placement | options)
        if groups.ep > 1:
            # Their gradients hold the tokens of ep ranks, and FSDP divides by the ranks of their mesh alone. Not by
            # set_gradient_divide_factor: torch 2.13 applies it twice to a mesh of one rank (sums, or float64).
            layer.experts.set_all_reduce_hook(lambda gradient: gradient.div_(groups.ep))
        layer._mark_experts()
    if not isinstance(module, FSDPModule):
        shard(module, mesh=groups.data_mesh, **options)
    if dist.get_backend(groups.data_group) != "nccl":  # gloo has no mean
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
    return module


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Within, forward and backward passes add up gradients and exchange none, whatever the model is wrapped in: for
    all micro batches of a step but the last."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif (without_sync := getattr(model, "no_sync", None)) is not None:
        with without_sync():
            yield
    else:  # wrapped in what reduces when it is told to
        yield


def _is_sharded(parameter: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def _placement(ranks: int):
    """FSDP shards the first dimension, of a stack the experts: where they do not divide, the second one may."""
    from torch.distributed.tensor import Shard

    def place(parameter: torch.nn.Parameter):
        if parameter.dim() > 1 and parameter.shape[0] % ranks and not parameter.shape[1] % ranks:
            return Shard(1)
        return None

    return place
