"""Parts of tensors on the ranks of a group, split along the first dimension, and the collectives that join them.

All collectives are differentiable, unless their docstring says otherwise.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from fmoe.runtime import collectives

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13


@dataclass(frozen=True, eq=False)
class TokenShards:
    """Partition of tokens over the ranks of ``group``, along the first dimension.

    Attributes:
        lengths: size of the first dimension on each rank; rank 0 has the first part.
    """

    group: dist.ProcessGroup
    lengths: tuple[int, ...]

    @classmethod
    def of_slices(cls, length: int, group: dist.ProcessGroup) -> "TokenShards":
        """Return the shards that `take_slice` makes of a first dimension of size ``length``."""
        bounds = [slice_bounds(length, rank, group.size()) for rank in range(group.size())]
        return cls(group, tuple(end - begin for begin, end in bounds))

    @classmethod
    def of_equal_parts(cls, length: int, group: dist.ProcessGroup) -> "TokenShards":
        """Return shards with a first dimension of size ``length`` on each rank, as in sequence parallelism."""
        return cls(group, (length,) * group.size())

    @property
    def size(self) -> int:
        return len(self.lengths)

    @property
    def length(self) -> int:
        """Size of the first dimension over all ranks."""
        return sum(self.lengths)

    @property
    def bounds(self) -> tuple[int, int]:
        """This rank's range (begin, end) of the first dimension."""
        rank = self.group.rank()
        begin = sum(self.lengths[:rank])
        return begin, begin + self.lengths[rank]

    def gather(self, x: Tensor, full: Tensor | None = None, *, alike: bool = False) -> Tensor:
        """Concatenate the parts ``x`` of all ranks along the first dimension.

        Args:
            full: the result, if this rank already has it. The forward pass then communicates nothing.
            alike: False: the backward pass sums the gradients of all ranks. True: it takes this rank's own gradient,
                without communication. True is correct if each use of the result is the same on all ranks or reads only
                the rank's own part.
        """
        return _Gather.apply(x, full, self, alike)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum of ``x`` over ranks."""
        return _ReduceScatter.apply(x, self)

    def local(self, x: Tensor, rows: int = 1) -> Tensor:
        """Return this rank's part of ``x``, whose first dimension is ``rows`` times as long as `length`.

        The backward pass of this view does not gather the parts of other ranks.
        """
        begin, end = self.bounds
        return x.narrow(0, begin * rows, (end - begin) * rows)

    def all_gather(self, x: Tensor) -> Tensor:
        """Like `gather`, but not differentiable."""
        longest = max(self.lengths)
        if x.shape[0] < longest:
            x = torch.cat([x, x.new_zeros(longest - x.shape[0], *x.shape[1:])])
        parts = collectives.gather(x.contiguous(), self.group)
        return torch.cat([part[:length] for part, length in zip(parts, self.lengths, strict=True)])

    def sum_scatter(self, x: Tensor) -> Tensor:
        """Like `reduce_scatter`, but not differentiable."""
        longest = max(self.lengths)
        if min(self.lengths) < longest:
            parts = x.split(self.lengths)
            x = x.new_zeros(self.size, longest, *x.shape[1:])
            for target, part in zip(x, parts, strict=True):
                target[: part.shape[0]] = part
            x = x.flatten(0, 1)
        out = x.new_empty(longest, *x.shape[1:])
        collectives.run(_reduce_scatter, out, x.contiguous(), group=self.group)
        return out[: self.lengths[self.group.rank()]]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, full: Tensor | None, shards: TokenShards, alike: bool) -> Tensor:
        ctx.shards = shards
        ctx.alike = alike
        return shards.all_gather(x) if full is None else full.detach().view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (_Local if ctx.alike else _ReduceScatter).apply(grad, ctx.shards), None, None, None


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: TokenShards) -> Tensor:
        ctx.shards = shards
        return shards.local(x).clone()  # not a view, which callers could not change in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(grad, None, ctx.shards, True), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: TokenShards) -> Tensor:
        ctx.shards = shards
        return shards.sum_scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(grad, None, ctx.shards, False), None


def slice_bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return the bounds of a rank's slice of ``length`` rows; the first ``length % size`` slices are one row longer."""
    part, remainder = divmod(length, size)
    begin = rank * part + min(rank, remainder)
    return begin, begin + part + (rank < remainder)


def take_slice(nest: Any, group: dist.ProcessGroup) -> Any:
    """Return this rank's slice, along the first dimension, of each tensor of a pytree that all ranks hold."""
    return pytree.tree_map_only(Tensor, lambda x: _Local.apply(x, TokenShards.of_slices(x.shape[0], group)), nest)


def gather_slices(x: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the slices of all ranks to a tensor of ``length`` rows; the inverse of `take_slice`."""
    return TokenShards.of_slices(length, group).gather(x, alike=True)
