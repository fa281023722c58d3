"""Sharded state of layers for Megatron-core's distributed checkpoints."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from fmoe.exchange import Exchange
from fmoe.experts import ModuleExperts


class Sliced:
    """Mixin of modules whose parameters are slices, along axis 0, of those of all tensor parallel ranks."""

    tp_group: dist.ProcessGroup | None = None

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return this rank's slices as sharded tensors."""
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            dict.fromkeys(state, 0),
            sharded_offsets,
            tp_group=self.tp_group or parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def sharded_experts(
    experts: nn.Module, exchange: Exchange, group: dist.ProcessGroup | None, prefix: str, offsets: tuple
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Return the tensors of a layer's experts as Megatron's sharded tensors.

    Stacked experts get their offset among all experts. Experts that are separate modules are named by their global id.

    Args:
        group: expert tensor parallel group; None for one rank.
        offsets: (axis, offset, size) of each axis that precedes the tensor's own axes, such as the layer.
    """
    axis = len(offsets)
    offset = (axis, exchange.ep_rank, exchange.ep_size)
    copy = parallel_state.get_expert_data_parallel_rank()
    sharded = {}
    for name, value in experts.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        key = f"{prefix}{name}"
        if isinstance(experts, ModuleExperts):  # each has tensors of its own, named by the global id of the expert
            local, _, rest = name.partition(".")
            whole = f"{prefix}{exchange.ep_rank * exchange.num_local_experts + int(local)}.{rest}"
            sharded[key] = ShardedTensor.from_rank_offsets(
                whole, value, *offsets, replica_id=(0, 0, copy), prepend_axis_num=axis
            )
            continue
        hidden = {"weight_in": 1, "bias_in": 1, "weight_out": 2}.get(name)
        if group is None or hidden is None:
            part = 0 if group is None else group.rank()
            sharded[key] = ShardedTensor.from_rank_offsets(
                key, value, *offsets, offset, replica_id=(0, part, copy), prepend_axis_num=axis
            )
        elif experts.gated and name.endswith("_in"):
            sharded[key] = _gated(key, value, offsets, exchange, group, (0, 0, copy))
        else:
            cut = (axis + hidden, group.rank(), group.size())
            sharded[key] = ShardedTensor.from_rank_offsets(
                key, value, *offsets, offset, cut, replica_id=(0, 0, copy), prepend_axis_num=axis
            )
    return sharded


def _gated(
    key: str, value: Tensor, offsets: tuple, exchange: Exchange, group: dist.ProcessGroup, replica: tuple
) -> ShardedTensorFactory:
    """Shard the two halves of a gated first layer separately, because each rank holds a slice of both."""
    axis = len(offsets)
    first = exchange.ep_rank * exchange.num_local_experts

    def build(key, value, replica_id, flattened_range):
        return [
            ShardedTensor.from_rank_offsets(
                key,
                part.unsqueeze(0),
                *offsets,
                (axis, first + local, exchange.num_experts),
                (axis + 1, half * group.size() + group.rank(), 2 * group.size()),
                replica_id=replica_id,
                prepend_axis_num=axis,
            )
            for local, expert in enumerate(value.unbind(0))
            for half, part in enumerate(expert.chunk(2, 0))
        ]

    def merge(parts):
        return torch.stack(
            [torch.cat([p.squeeze(0) for p in pair]) for pair in zip(parts[::2], parts[1::2], strict=True)]
        )

    return ShardedTensorFactory(key, value, build, merge, replica)
