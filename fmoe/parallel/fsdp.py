"""torch's FSDP2 for models with expert parallelism."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fmoe.experts.modules import ModuleExperts
from fmoe.parallel.buckets import broadcast, refuse_difference
from fmoe.parallel.gradients import has_mark
from fmoe.parallel.groups import ParallelGroups, moe_layers
from fmoe.runtime import ownership


def fully_shard(module: nn.Module, groups: ParallelGroups, **options: Any) -> nn.Module:
    """Apply `torch.distributed.fsdp.fully_shard` to a model with experts, in place.

    The experts of every `MoE` layer are sharded over the ranks that hold the same experts. All other parameters are
    sharded over all data parallel ranks. With ``shard_size`` of `init` (HSDP), both are sharded over groups of ranks,
    and each group has a copy. After the backward pass all gradients, including expert gradients, are averaged over the
    data parallel ranks.

    As with torch's function, call it first for each block and last for the whole model. Parameters are then gathered
    block by block.

    Args:
        module: model or block whose `MoE` layers use ``groups.moe_group``. Dense parameters are broadcast from the
            first data parallel rank, experts from the first rank that holds them. If the model is on the meta device,
            materialize a block (``to_empty``, ``reset_parameters``) before sharding it: initial weights are drawn for
            whole experts.
        groups: groups of `fmoe.parallel.init`.
        options: arguments of torch's function except ``mesh``: ``reshard_after_forward``, ``mp_policy``,
            ``offload_policy``, ...

    Returns:
        ``module``, whose parameters are now DTensors: experts over ``groups.expert_shard_mesh``, others over
            ``groups.shard_mesh``.

    Raises:
        UserError: the experts of a layer are split over other ranks than ``groups.moe_group``; a parameter is frozen,
            or on the meta device, on only some of the ranks that hold it.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import fully_shard as shard
    from torch.distributed.tensor import DTensor

    layers = moe_layers(module, groups).values()
    ownership.refresh()
    named = {name: p for name, p in module.named_parameters() if not isinstance(p, DTensor)}
    dense = {name: p for name, p in named.items() if not has_mark(p)}
    experts = {name: p for name, p in named.items() if has_mark(p)}
    for parameters, group in ((dense, groups.data_group), (experts, groups.expert_data_group)):
        for attribute in ("requires_grad", "is_meta"):
            refuse_difference(attribute, parameters, group, groups.mesh.device_type)
        broadcast([p for p in parameters.values() if not p.is_meta], group)
    for layer in layers:
        if isinstance(layer.experts, FSDPModule):
            continue
        if type(layer.experts) is nn.ModuleList:  # subclass of FastMoE's FMoE; FSDP gathers in module calls
            layer.experts = ModuleExperts(layer.experts)
        ranks = groups.expert_shard_mesh.size(-1)
        placement = {"shard_placement_fn": expert_placement(ranks)} if ranks > 1 else {}
        shard(layer.experts, mesh=groups.expert_shard_mesh, **placement | options)
        if groups.ep > 1:
            # Gradients of experts sum over the tokens of ep ranks, but FSDP divides by the size of their mesh only.
            # set_gradient_divide_factor is not an alternative: on a mesh of one rank, torch 2.13 applies it twice if it
            # reduces by sums or in float64.
            layer.experts.set_all_reduce_hook(lambda gradient: gradient.div_(groups.ep))
        layer._mark_experts()
    if not isinstance(module, FSDPModule):
        shard(module, mesh=groups.shard_mesh, **options)
    if dist.get_backend(groups.data_group) != "nccl":  # gloo has no mean
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
    return module


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients in this context without reducing them.

    Use it for all micro batches of a step but the last. It supports FSDP2 and every wrapper with a method ``no_sync``.
    For other models it does nothing.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
        return
    # Without the method, the model is not wrapped, or reduced by an explicit call.
    with getattr(model, "no_sync", contextlib.nullcontext)():
        yield


def expert_placement(ranks: int):
    """Return a ``shard_placement_fn`` of torch's `fully_shard` that spreads few experts evenly over ``ranks`` ranks."""
    # Dimension 1 is sharded if only its size is a multiple of `ranks`; otherwise, dimension 0.
    from torch.distributed.tensor import Shard

    def place(parameter: torch.nn.Parameter):
        if parameter.dim() > 1 and parameter.shape[0] % ranks and not parameter.shape[1] % ranks:
            return Shard(1)
        return None

    return place
