"""FastMoE's data parallelism: each parameter is tagged with the group over which its gradient is averaged."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from fmoe.errors import UserError
from fmoe.fastmoe.functions import get_rank_0_in_comm, get_torch_default_comm
from fmoe.fastmoe.spelling import tag_missing
from fmoe.moe import MoE
from fmoe.parallel.buckets import copy_back, with_gradients
from fmoe.runtime import collectives, ownership


class DistributedGroupedDataParallel(nn.Module):
    """Wrapper with the method `allreduce_params`, which averages gradients after the backward pass.

    A parameter's attribute ``dp_comm`` names the group over which its gradient is averaged. The name is "dp", "gate",
    "moe", "world", or any NAME whose group is passed as ``NAME_group=``. Parameters with another name, such as "none",
    and their gradients stay as they are. A parameter without ``dp_comm`` counts as "none" if it belongs to experts that
    a layer divides among ranks, and otherwise as "dp".

    Args:
        module: module to train.
        auto_allreduce: must be False: reduction during the backward pass is not supported.
        need_sync: whether to broadcast each parameter from the first rank of its group.
        groups: process groups as ``NAME_group=``. ``dp_group``, ``gate_group``, ``moe_group`` and ``world_group``
            default to all processes.

    Attributes:
        comms: groups by name.

    Raises:
        UserError: a keyword does not end with ``_group``; ``auto_allreduce`` is True; torch.distributed is not
            initialized.
    """

    def __init__(self, module: nn.Module, auto_allreduce: bool = False, need_sync: bool = True, **groups):
        super().__init__()
        if auto_allreduce:
            raise UserError("auto_allreduce=True is not supported: call allreduce_params() after the backward pass")
        for name in groups:
            if not name.endswith("_group"):
                raise UserError(f"{name}= is not supported: names of groups end in _group, such as dp_group=")
        self.module = module
        self.comms = {name.removesuffix("_group"): group for name, group in groups.items() if group is not None}
        for name in ("dp", "gate", "moe", "world"):
            self.comms.setdefault(name, get_torch_default_comm())
        if need_sync:
            self._sync_params()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def allreduce_gradients(
        self, no_scale: bool = False, reduce_after: bool = False, fp32_allreduce: bool = False
    ) -> None:
        """Average every gradient over the group of its parameter.

        A missing gradient counts as zeros if another rank of the group has one.

        Args:
            no_scale: sum the gradients instead of averaging them.
            reduce_after: divide after the sum instead of before it, which keeps more bits of small 16-bit gradients but
                overflows earlier.
            fp32_allreduce: sum in float32.

        Raises:
            UserError: a parameter is frozen on some ranks of its group only.
        """
        for group, parameters in self._by_group():
            gradients = [p.grad for p in with_gradients(parameters, group) if p.grad is not None]
            if not gradients:
                continue
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            flat = flat.float() if fp32_allreduce else flat
            if not no_scale and not reduce_after:
                flat /= group.size()
            collectives.run(dist.all_reduce, flat, group=group)
            if not no_scale and reduce_after:
                flat /= group.size()
            copy_back(flat, gradients)

    def allreduce_params(self, *args, **kwargs) -> None:
        """Call `allreduce_gradients`; this is its older name."""
        self.allreduce_gradients(*args, **kwargs)

    @torch.no_grad()
    def _sync_params(self) -> None:
        for group, parameters in self._by_group():
            flat = torch.cat([p.reshape(-1) for p in parameters.values()])
            collectives.run(dist.broadcast, flat, get_rank_0_in_comm(group), group=group)
            copy_back(flat, list(parameters.values()))

    def _by_group(self) -> Iterator[tuple[dist.ProcessGroup, dict[str, nn.Parameter]]]:
        """Yield (group, parameters by name) for each group and dtype, in the same order on all ranks."""
        ownership.refresh()
        for module in self.module.modules():
            if (name := getattr(module, "_dp_comm", None)) is not None:
                tag_missing(module.parameters(recurse=False), name)
        alone = {
            parameter
            for layer in self.module.modules()
            if isinstance(layer, MoE) and layer.exchange.ep_size > 1
            for parameter in layer.experts.parameters()
        }
        parts: dict[tuple[str, torch.dtype], dict[str, nn.Parameter]] = {}
        for name, parameter in self.module.named_parameters():
            tag = str(getattr(parameter, "dp_comm", "none" if parameter in alone else "dp"))
            parts.setdefault((tag, parameter.dtype), {})[name] = parameter
        for (tag, _), parameters in parts.items():
            if tag in self.comms:
                yield self.comms[tag], parameters
