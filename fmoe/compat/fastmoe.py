"""What FastMoE's arguments of `FMoE` mean here (its README and doc/parallelism of version 1.1)."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe.errors import UserError
from fmoe.experts.modules import ModuleExperts
from fmoe.functions import ensure_comm

if TYPE_CHECKING:
    from fmoe.layer import FMoE


@dataclass(frozen=True)
class Spelled:
    """The same settings in the modern spelling; ``gate`` is built already, with FastMoE's arguments."""

    num_experts: int
    d_model: int
    top_k: int | None
    gate: Any
    expert: Sequence[Any] | None
    moe_group: dist.ProcessGroup | None
    slice_group: dist.ProcessGroup | None


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
    gate_bias: bool,
) -> Spelled:
    """FastMoE's defaults: 32 experts a worker, width 1024, one worker, `NaiveGate`, top 2 (1 for `SwitchGate`).

    ``world_size`` workers hold different experts; without ``moe_group`` they are the whole world. ``mp_group`` is the
    old name of ``slice_group``. ``expert`` is a class called with ``d_model``, or a list of those, one for each expert
    of the worker; None leaves ``self.experts`` to a subclass, which sets what is called as ``experts(rows, counts)``.

    Raises:
        UserError: the group has not ``world_size`` workers, ``gate`` is a name.
    """
    from fmoe.compat.gates import NaiveGate

    d_model = 1024 if d_model is None else d_model
    world_size = 1 if world_size is None else world_size
    if isinstance(expert, list):
        num_expert = len(expert)
    num_expert = 32 if num_expert is None else num_expert
    if mp_group is not None:
        warnings.warn("mp_group is the old name of slice_group", DeprecationWarning, stacklevel=3)
        slice_group = mp_group
    if world_size > 1:
        if not dist.is_initialized():
            raise UserError(f"world_size={world_size} needs torch.distributed: call init_process_group first")
        moe_group = dist.group.WORLD if moe_group is None else moe_group
        if moe_group.size() != world_size:
            raise UserError(f"world_size={world_size} differs from the {moe_group.size()} workers of moe_group")
    else:
        moe_group = None
    if slice_group is not None and slice_group.size() == 1:
        slice_group = None
    gate = NaiveGate if gate is None else gate
    if isinstance(gate, str):
        raise UserError(f"gate={gate!r} is a name: write num_experts= (experts in all) for the modern spelling")
    if top_k is None and not isinstance(gate, nn.Module):
        top_k = getattr(gate, "default_top_k", 2)
    if isinstance(gate, type) and issubclass(gate, NaiveGate):
        built = gate(d_model, num_expert, world_size, top_k, gate_bias=gate_bias)
    elif isinstance(gate, nn.Module):
        built = gate
    else:
        built = gate(d_model, num_expert, world_size, top_k)
    experts = None
    if expert is not None:
        # Of the E experts in all, the worker's own are built; the others stand in the list to be counted.
        experts = (list(expert) if isinstance(expert, list) else [expert] * num_expert) * world_size
    top_k = getattr(built, "top_k", top_k)
    return Spelled(num_expert * world_size, d_model, top_k, built, experts, moe_group, slice_group)


def mark_module_parallel_comm(module: nn.Module, comm: str) -> None:
    """Tags parameters with ``dp_comm``, the group that `DistributedGroupedDataParallel` averages them over."""
    for parameter in module.parameters():
        parameter.dp_comm = comm
    for part in module.modules():
        part._dp_comm = comm  # for parameters that take the place of these


def tag_missing(parameters: Iterable[nn.Parameter], comm: str) -> None:
    """Tag parameters that have no tag: copies and new ones."""
    for parameter in parameters:
        parameter.dp_comm = getattr(parameter, "dp_comm", comm)


class FastMoEMembers:
    """What FastMoE's `FMoE` has beside ours; mixed into it."""

    experts: nn.Module
    gate: nn.Module
    slice_group: dist.ProcessGroup | None
    _expert_dp_comm: str | None = None

    @property
    def slice_size(self) -> int:
        """Ranks that hold the same tokens."""
        return 1 if self.slice_group is None else self.slice_group.size()

    @property
    def slice_rank(self) -> int:
        """This one's among them."""
        return 0 if self.slice_group is None else self.slice_group.rank()

    def expert_fn(self, inp: Any, fwd_expert_count: Tensor) -> Any:
        """The experts' outputs for their rows; a subclass may do otherwise."""
        if type(self.experts) is nn.ModuleList:  # set by a subclass, which FastMoE left uncalled
            return ModuleExperts.forward(self.experts, inp, fwd_expert_count)
        return self.experts(inp, fwd_expert_count)

    def mark_parallel_comm(self, expert_dp_comm: str = "none") -> None:
        """Tags of parameters for `DistributedGroupedDataParallel`: experts by the name given, the gate "gate"."""
        mark_module_parallel_comm(self.experts, expert_dp_comm)
        mark_module_parallel_comm(self.gate, "gate")
        self._expert_dp_comm = expert_dp_comm

    def _tag_again(self) -> None:
        """Tags parameters that lost theirs: a copy's, or new ones."""
        if self._expert_dp_comm is not None:
            for module, comm in ((self.experts, self._expert_dp_comm), (self.gate, "gate")):
                tag_missing(module.parameters(), comm)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "experts":  # subclasses set it after ``super().__init__()``
            self._mark_experts()


def name_group(layer: "FMoE", x: Tensor) -> None:
    """Tells the functions that the layer's gate may call which workers share its experts."""
    if layer.world_size > 1:
        ensure_comm(x, layer.moe_group)


def fill_masked(y_TD: Tensor, mask: Tensor, mask_dict: Mapping[int, Tensor], weight_TK: Tensor) -> Tensor:
    """Tokens whose mask is k != 0 are not routed; their output is ``mask_dict[k]``, weighted like an expert's."""
    mask_T = mask.reshape(-1).to(y_TD.device)
    for key, value in mask_dict.items():
        value = torch.as_tensor(value, dtype=torch.promote_types(y_TD.dtype, torch.float32), device=y_TD.device)
        filled_TD = weight_TK.sum(-1, keepdim=True).to(y_TD.dtype) * value
        y_TD = torch.where((mask_T == key).unsqueeze(-1), filled_TD.to(y_TD.dtype), y_TD)
    return y_TD
