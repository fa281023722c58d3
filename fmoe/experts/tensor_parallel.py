"""Feed-forward experts whose hidden units are spread over ranks (expert tensor parallelism).

The first weight is split by rows, and the second by columns (Megatron-LM, arXiv 1909.08053 section 3). In gated experts
each half of the first weight is split. Every rank gathers the rows of all ranks of the group, and computes the part of
the outputs that comes from its hidden units. Each rank then gets the sum of these parts for its own rows.

Shape letters: R rows, L experts of this rank, W ranks of the group, D model width, H hidden width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from fmoe.experts.ffn import FFNExperts
from fmoe.runtime import collectives
from fmoe.shards import TokenShards


class ShardedFFNExperts(FFNExperts):
    """`FFNExperts` split over ``group``: each of its W ranks holds ``d_hidden / W`` hidden units of every expert.

    Every rank holds the whole ``bias_out``.

    Args:
        group: process group; its ranks call these experts together.
        num_experts, d_model, d_hidden, options: as for `FFNExperts`; ``d_hidden`` is the width of a whole expert.

    Raises:
        UserError: as for `FFNExperts`; or the group's size does not divide ``d_hidden``.
    """

    def __init__(self, num_experts: int, d_model: int, d_hidden: int, *, group: dist.ProcessGroup, **options: Any):
        self.hidden_parts = group.size()
        self.hidden_part = group.rank()
        if d_hidden % self.hidden_parts:
            raise UserError(
                f"d_hidden={d_hidden} is not divisible by the {self.hidden_parts} ranks of expert_tensor_group"
            )
        self.group = group  # before the constructor draws the weights, through `own_part`
        super().__init__(num_experts, d_model, d_hidden // self.hidden_parts, **options)

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        axis = _hidden_axis(name)
        return (
            shape
            if axis is None
            else torch.Size(n * self.hidden_parts if i == axis else n for i, n in enumerate(shape))
        )

    def own_part(self, name: str, value: Tensor) -> Tensor:
        axis = _hidden_axis(name)
        if axis is None:
            return value
        halves = value.chunk(2, axis) if self.gated and name.endswith("_in") else (value,)
        return torch.cat([half.chunk(self.hidden_parts, axis)[self.hidden_part] for half in halves], axis)

    def own_hidden(self, x_RH: Tensor) -> Tensor:
        return x_RH.chunk(self.hidden_parts, -1)[self.hidden_part]

    def forward(self, rows_RD: Tensor, counts_L: Tensor | Sequence[int], keys_R: Tensor | None = None) -> Tensor:
        """Compute the same as `FFNExperts.forward`. All ranks of the group must make this call."""
        counts_L = torch.as_tensor(counts_L, dtype=torch.int64, device=rows_RD.device)
        gathered = [torch.empty_like(counts_L) for _ in range(self.hidden_parts)]
        collectives.run(dist.all_gather, gathered, counts_L, group=self.group)
        counts_WL = torch.stack(gathered)
        shards = TokenShards(self.group, tuple(counts_WL.sum(1).tolist()))
        # Rows are sorted by expert within each rank, but the experts need them sorted over all ranks.
        expert_R = torch.arange(self.num_experts, device=rows_RD.device, dtype=torch.int64).repeat(self.hidden_parts)
        order_R = expert_R.repeat_interleave(counts_WL.flatten()).argsort(stable=True)
        rows_RD = shards.gather(rows_RD)[order_R]
        if keys_R is not None:
            keys_R = shards.all_gather(keys_R)[order_R]
        bias_out: Tensor | None = self.bias_out
        if bias_out is not None:  # the sum over ranks adds it once, and every rank gets its whole gradient
            bias_out = bias_out / self.hidden_parts + (bias_out - bias_out.detach()) * (1 - 1 / self.hidden_parts)
        parameters = (self.weight_in, self.bias_in, self.weight_out, bias_out)
        out_RD = self._run(parameters, rows_RD, counts_WL.sum(0).cpu(), keys_R)
        return shards.reduce_scatter(out_RD[order_R.argsort()])

    @property
    def kind(self) -> str:
        return f"{super().kind} in {self.hidden_parts} parts"


def _hidden_axis(name: str) -> int | None:
    return {"weight_in": 0, "bias_in": 0, "weight_out": 1, "bias_out": None}[name]
