"""Gradients of a model with expert parallelism: their mean, norm and clipping.

Dense parameters are replicated on all data parallel ranks. An expert is replicated only on the ranks of its expert data
parallel group, which may be a single rank. On each of these ranks, the expert's gradient already sums over the tokens
of all EP ranks. The mean is therefore the sum over the expert data parallel group, divided by the number of data
parallel ranks.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe.errors import UserError
from fmoe.parallel.buckets import Reduction, buckets_of, with_gradients
from fmoe.parallel.groups import ParallelGroups
from fmoe.runtime import collectives, ownership


def is_expert(parameter: Tensor) -> bool:
    """Return whether the parameter belongs to an expert.

    Only ranks that hold the expert reduce its gradient.
    """
    if not has_mark(parameter):
        ownership.refresh()
    return has_mark(parameter)


def has_mark(parameter: Tensor) -> bool:
    """Return whether the attribute ``allreduce`` marks the parameter as an expert's.

    A parameter that replaced another one lacks the attribute until `fmoe.runtime.ownership.refresh` sets it.
    """
    return not getattr(parameter, "allreduce", True)


def average_gradients(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    expert_data_group: dist.ProcessGroup | None = None,
    *,
    groups: ParallelGroups | None = None,
) -> None:
    """Replace each gradient by its mean over the data parallel ranks.

    Call it once per step after the last backward pass, for models without DDP or FSDP. A missing gradient counts as
    zeros if another rank has a gradient of the same parameter. Otherwise the parameter is skipped.

    Args:
        group: the data parallel group.
        expert_data_group: ranks that hold the same experts; None if every expert is on one rank only.
        groups: groups of `fmoe.parallel.init`, instead of the other two arguments.

    Raises:
        UserError: neither ``group`` nor ``groups`` is given; a parameter is frozen on only some of the ranks that hold
            it.
    """
    if groups is not None:
        group = groups.data_group
        expert_data_group = groups.expert_data_group
    if group is None:
        raise UserError("average_gradients needs the data parallel group: pass group= or groups=")
    ownership.refresh()
    named = dict(model.named_parameters())
    dense = {name: p for name, p in named.items() if not has_mark(p)}
    experts = {name: p for name, p in named.items() if has_mark(p)}
    for parameters, over in ((dense, group), (experts, expert_data_group)):
        if over is not None and over.size() > 1:
            for bucket in buckets_of(with_gradients(parameters, over)):
                Reduction(bucket, over).finish(group.size())
        else:
            for parameter in parameters.values():
                if parameter.requires_grad and parameter.grad is not None:
                    parameter.grad.div_(group.size())


@torch.no_grad()
def grad_norm(
    parameters: Iterable[Tensor],
    moe_group: dist.ProcessGroup | None = None,
    *,
    groups: ParallelGroups | None = None,
) -> Tensor:
    """Return the 2-norm of the gradients of the whole model. Replicas of a parameter count once.

    Call it on every rank, with the parameters in the same order, after gradients are reduced. The list may include
    frozen parameters, and experts may be frozen on some ranks only. For DTensors (`fmoe.parallel.fully_shard`), squares
    are summed over the ranks that hold the shards.

    Args:
        moe_group: the expert parallel group, over which squares of expert gradients are summed.
        groups: groups of `fmoe.parallel.init`, instead of ``moe_group``.

    Returns:
        A scalar, equal on all ranks; float64 if any parameter is float64, else float32.
    """
    moe_group = groups.moe_group if groups is not None else moe_group
    parameters = list(parameters)
    ownership.refresh()
    if parameters:
        device = parameters[0].device
    elif groups is not None:
        device = torch.device(groups.mesh.device_type)
    else:
        device = torch.device("cpu") if moe_group is None else collectives.device_of(moe_group)
    # In float64 no square overflows; MPS does not support float64.
    exact = torch.float32 if device.type == "mps" else torch.float64
    zero = torch.zeros((), dtype=exact, device=device)
    # Keyed by the ranks over which to sum, as meshes may have groups of their own for the same ranks. All ranks must
    # run the same collectives in the same order, so no key depends on what this rank trains. The list of a rank may
    # lack experts that are frozen there only.
    norms: dict[tuple[bool, tuple], tuple[tuple[dist.ProcessGroup, ...], list[Tensor]]] = {(True, ()): ((), [zero])}
    if groups is not None and any(_sharded_over(p) for p in parameters):
        for expert, mesh in ((False, groups.shard_mesh), (True, groups.expert_shard_mesh)):
            over = mesh.get_group(mesh.ndim - 1)
            norms[expert, _ranks((over,))] = ((over,), [zero])
    ranks: dict[tuple[dist.ProcessGroup, ...], tuple] = {}
    for parameter in parameters:
        meshes = _sharded_over(parameter)
        if meshes not in ranks:
            ranks[meshes] = _ranks(meshes)
        part = norms.setdefault((has_mark(parameter), ranks[meshes]), (meshes, [zero]))[1]
        if parameter.requires_grad and parameter.grad is not None:
            gradient = _local(parameter.grad)
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            part.append(torch.linalg.vector_norm(gradient, dtype=dtype).to(device, exact))
    whole = torch.zeros((), dtype=exact, device=device)
    for (expert, _), (meshes, part) in norms.items():
        squares = torch.stack(part).square().sum()
        for group in (*meshes, moe_group if expert else None):
            if group is not None and group.size() > 1:
                collectives.run(dist.all_reduce, squares, group=group)
        whole += squares
    is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    return whole.sqrt().to(torch.float64 if is_double else torch.float32)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    moe_group: dist.ProcessGroup | None = None,
    *,
    groups: ParallelGroups | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that `grad_norm` is at most ``max_norm``, and return the norm before scaling.

    If the norm is not finite, gradients do not change on any rank: check the result, and skip the step.

    Args:
        moe_group, groups: as in `grad_norm`.
        error_if_nonfinite: raise on all ranks if the norm is not finite; synchronizes host and GPU.

    Raises:
        RuntimeError: ``error_if_nonfinite`` is True, and the norm is not finite.
    """
    parameters = list(parameters)
    norm = grad_norm(parameters, moe_group, groups=groups)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the gradient norm is {norm.item()}: gradients are not clipped to max_norm={max_norm}. Skip the step, or "
            "pass error_if_nonfinite=False and check the result"
        )
    scale = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local = _local(parameter.grad)
            local.mul_(scale.to(local.device))
    return norm


def _local(gradient: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, sharing its memory, or a plain tensor as it is."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _sharded_over(parameter: Any) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of the mesh dimensions over which a DTensor is sharded, not replicated."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return ()
    return tuple(mesh.get_group(dim) for dim, p in enumerate(parameter.placements) if not p.is_replicate())


def _ranks(groups: tuple[dist.ProcessGroup, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
