"""Translation of FastMoE's arguments (README and doc/parallelism of FastMoE 1.1) to options of `fmoe.build.Spec`."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from fmoe.errors import UserError
from fmoe.fastmoe.gates import NaiveGate


def translate(
    num_expert: int | None,
    d_model: int | None,
    world_size: int | None,
    mp_group: dist.ProcessGroup | None,
    slice_group: dist.ProcessGroup | None,
    moe_group: dist.ProcessGroup | None,
    top_k: int | None,
    gate: Any,
    expert: Any,
    gate_bias: bool | None,
) -> dict[str, Any]:
    """Translate FastMoE's arguments to options of `fmoe.build.Spec`, and build the gate with FastMoE's arguments.

    Defaults are FastMoE's: 32 experts per rank, width 1024, one rank, `NaiveGate` with a bias, top 2 (1 for
    `SwitchGate`).

    Args:
        world_size: number of expert-parallel ranks, which hold different experts.
        mp_group: old name of ``slice_group``.
        moe_group: expert-parallel group; None for all processes. Ignored if ``world_size`` is 1.
        expert: class or function called with ``d_model`` (`fmoe.register_expert` describes other signatures), or a list
            of them, one per expert of this rank. None if a subclass sets ``self.experts``, which is called as
            ``experts(rows, counts)``.

    Raises:
        UserError: ``moe_group`` does not have ``world_size`` ranks; ``world_size`` is above 1 and
            torch.distributed is not initialized; ``gate`` or ``expert`` is a name.
    """
    d_model = 1024 if d_model is None else d_model
    world_size = 1 if world_size is None else world_size
    if isinstance(expert, list):
        num_expert = len(expert)
    num_expert = 32 if num_expert is None else num_expert
    if mp_group is not None:
        warnings.warn("mp_group is the old name of slice_group: pass slice_group", DeprecationWarning, stacklevel=3)
        slice_group = mp_group
    if world_size > 1:
        if not dist.is_initialized():
            raise UserError(f"world_size={world_size} needs torch.distributed: call init_process_group first")
        moe_group = dist.distributed_c10d._get_default_group() if moe_group is None else moe_group
        if moe_group.size() != world_size:
            where = "moe_group (default: all processes)"
            raise UserError(f"world_size={world_size} differs from the {moe_group.size()} ranks of {where}")
    else:
        moe_group = None
    if slice_group is not None and slice_group.size() == 1:
        slice_group = None
    gate = NaiveGate if gate is None else gate
    for key, value in (("gate", gate), ("expert", expert)):
        if isinstance(value, str):
            raise UserError(
                f"{key}={value!r} is not supported in FastMoE's signature: pass a class, or num_experts= (over all "
                "ranks) instead of num_expert="
            )
    if top_k is None and not isinstance(gate, nn.Module):
        top_k = getattr(gate, "default_top_k", 2)
    has_bias = isinstance(gate, type) and issubclass(gate, NaiveGate)
    bias = {"gate_bias": gate_bias is not False} if has_bias else {}
    built: Any = gate if isinstance(gate, nn.Module) else gate(d_model, num_expert, world_size, top_k, **bias)
    if expert is not None:
        # The layer builds only this rank's experts; the list has an entry for every expert of all ranks.
        expert = (expert if isinstance(expert, list) else [expert] * num_expert) * world_size
    return {
        "num_experts": num_expert * world_size,
        "d_model": d_model,
        "top_k": getattr(built, "top_k", top_k),
        "gate": built,
        "expert": expert,
        "moe_group": moe_group,
        "slice_group": slice_group,
        "aux_loss": "manual",
    }


def mark_module_parallel_comm(module: nn.Module, comm: str) -> None:
    """Set the parameters' attribute ``dp_comm`` to ``comm``, the name of the group that averages their gradients."""
    part: Any
    for part in module.parameters():
        part.dp_comm = comm
    for part in module.modules():
        part._dp_comm = comm  # for parameters that will replace these


def tag_missing(parameters: Iterable[Any], comm: str) -> None:
    """Set the attribute ``dp_comm`` to ``comm`` on all parameters that lack it."""
    for parameter in parameters:
        parameter.dp_comm = getattr(parameter, "dp_comm", comm)
