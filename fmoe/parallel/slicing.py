"""Ranks that hold the same tokens (tensor parallelism) each take a part of them, and gather the results."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree


def slice_bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Rank's part of ``length`` rows: the first parts are one longer where it does not divide."""
    part, rest = divmod(length, size)
    begin = rank * part + min(rank, rest)
    return begin, begin + part + (rank < rest)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.length = group, x.shape[0]
        begin, end = slice_bounds(x.shape[0], group.rank(), group.size())
        return x[begin:end].clone()

    @staticmethod
    def backward(ctx, grad):
        return _Gather.apply(grad, ctx.length, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, length, group):
        ctx.group = group
        return _all_gather(x, length, group)

    @staticmethod
    def backward(ctx, grad):
        return _Take.apply(grad, ctx.group), None, None


def _all_gather(x: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """Parts of any of the lengths of `slice_bounds` -> all ``length`` rows."""
    size = group.size()
    bounds = [slice_bounds(length, rank, size) for rank in range(size)]
    longest = bounds[0][1] - bounds[0][0]
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: end - begin] for part, (begin, end) in zip(parts, bounds, strict=True)])


def take_slice(nest: Any, group: dist.ProcessGroup) -> Any:
    """This rank's part, along the first dimension, of every tensor of a nest that all ranks of the group hold alike."""
    return pytree.tree_map(lambda x: _Take.apply(x, group) if isinstance(x, Tensor) else x, nest)


def place_of_slice(leading: torch.Size, group: dist.ProcessGroup) -> tuple[int, float]:
    """Of tensors that begin with the shape ``leading``: tokens before this rank's slice, its share in all of them."""
    begin, end = slice_bounds(leading[0], group.rank(), group.size())
    return begin * leading[1:].numel(), (end - begin) / leading[0] if leading[0] else 1.0


def gather_slices(x: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, ``length`` rows: the inverse of `take_slice`."""
    return _Gather.apply(x, length, group)
