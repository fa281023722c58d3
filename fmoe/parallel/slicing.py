"""Ranks that work on parts of the same sequences (tensor and sequence parallelism).

Each takes or has its part of the tokens. A gate has to see the sets of tokens it decides over whole, so its input, or
its logits where it looks at nothing else, are gathered. Every rank of the group comes to the same decisions, and goes
on with its part of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from fmoe import collectives
from fmoe.routing import Routing

if TYPE_CHECKING:
    from fmoe.layer import FMoE


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
    return Parts.cut(length, group).gather(x)


def take_slice(nest: Any, group: dist.ProcessGroup) -> Any:
    """This rank's part, along the first dimension, of every tensor of a nest that all ranks of the group hold alike."""
    return pytree.tree_map(lambda x: _Take.apply(x, group) if isinstance(x, Tensor) else x, nest)


class _Whole(torch.autograd.Function):
    """The parts of all ranks. ``alike``: all make the same of it, and each has the whole gradient of its own part; else
    the gradients of all are summed."""

    @staticmethod
    def forward(ctx, x, full, parts, alike):
        ctx.parts, ctx.alike = parts, alike
        return parts.gather(x) if full is None else full.detach().view_as(full)

    @staticmethod
    def backward(ctx, grad):
        return (_Own if ctx.alike else _SumOwn).apply(grad, ctx.parts), None, None, None


class _Own(torch.autograd.Function):
    """This rank's part of what all hold alike: the inverse of `_Whole` where that is ``alike``."""

    @staticmethod
    def forward(ctx, x, parts):
        ctx.parts = parts
        return parts.own(x)

    @staticmethod
    def backward(ctx, grad):
        return _Whole.apply(grad, None, ctx.parts, True), None


class _SumOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, parts):
        ctx.parts = parts
        return parts.reduce_scatter(x)

    @staticmethod
    def backward(ctx, grad):
        return _Whole.apply(grad, None, ctx.parts, False), None


@dataclass(frozen=True, eq=False)
class Parts:
    """Tokens along the first dimension, spread over the ranks of ``group`` in order: ``lengths`` of each."""

    group: dist.ProcessGroup
    lengths: tuple[int, ...]

    @classmethod
    def cut(cls, length: int, group: dist.ProcessGroup) -> "Parts":
        """Of what all ranks hold: the parts of `take_slice`."""
        bounds = [slice_bounds(length, rank, group.size()) for rank in range(group.size())]
        return cls(group, tuple(end - begin for begin, end in bounds))

    @classmethod
    def held(cls, length: int, group: dist.ProcessGroup) -> "Parts":
        """Of ranks that hold as much each, as sequence parallelism has it."""
        return cls(group, (length,) * group.size())

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.lengths)

    @property
    def length(self) -> int:
        """Of all parts together."""
        return sum(self.lengths)

    @property
    def bounds(self) -> tuple[int, int]:
        """Where this rank's part begins and ends."""
        begin = sum(self.lengths[: self.group.rank()])
        return begin, begin + self.lengths[self.group.rank()]

    def gather(self, x: Tensor) -> Tensor:
        """All parts, from this rank's; no gradients."""
        longest = max(self.lengths)
        if x.shape[0] < longest:
            x = torch.cat([x, x.new_zeros(longest - x.shape[0], *x.shape[1:])])
        parts = [torch.empty_like(x) for _ in range(self.size)]
        collectives.run(dist.all_gather, parts, x.contiguous(), group=self.group)
        return torch.cat([part[:length] for part, length in zip(parts, self.lengths, strict=True)])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum over ranks, of which this rank gets its part; no gradients."""
        longest = max(self.lengths)
        if min(self.lengths) < longest:
            parts = x.split(self.lengths)
            x = x.new_zeros(self.size, longest, *x.shape[1:])
            for place, part in zip(x, parts, strict=True):
                place[: part.shape[0]] = part
            x = x.flatten(0, 1)
        out = x.new_empty(longest, *x.shape[1:])
        collectives.run(dist.reduce_scatter_tensor, out, x.contiguous(), group=self.group)
        return out[: self.lengths[self.group.rank()]]

    def whole(self, x: Tensor, full: Tensor | None = None, *, alike: bool = False) -> Tensor:
        """All parts, from this rank's ``x``; the gradients of all ranks are summed.

        Args:
            full: the value, where this rank has it anyway: nothing is sent forward.
            alike: for a result that is the same on all ranks and a part that only ``x`` goes into: each rank has the
                whole gradient of its ``x``, and nothing is sent backward.
        """
        return _Whole.apply(x, full, self, alike)

    def sum_own(self, x: Tensor) -> Tensor:
        """This rank's part of the sum over ranks; the inverse of `whole` in what is sent."""
        return _SumOwn.apply(x, self)

    def own(self, x: Tensor, rows: int = 1) -> Tensor:
        """This rank's part of all, where each entry of the first dimension is ``rows`` of ``x``."""
        begin, end = self.bounds
        return x.narrow(0, begin * rows, (end - begin) * rows)


def place_of_slice(leading: torch.Size, group: dist.ProcessGroup) -> tuple[int, float]:
    """Of tensors that begin with the shape ``leading``: tokens before this rank's slice, its share in all of them."""
    begin, end = slice_bounds(leading[0], group.rank(), group.size())
    return begin * leading[1:].numel(), (end - begin) / leading[0] if leading[0] else 1.0


def gather_slices(x: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, ``length`` rows: the inverse of `take_slice`."""
    return _Gather.apply(x, length, group)


@dataclass(frozen=True, eq=False)
class Part:
    """What of a layer's input this rank computes, and what its gate sees.

    Attributes:
        leaves: this rank's tokens.
        seen: the tokens that the gate decides over, or with ``gathers_scores`` those of them that are this rank's.
        mask, token_ids: of all tokens that the gate decides over.
        filled: of ``leaves`` (FastMoE's ``mask``).
        before: tokens of the micro batch that lie before ``seen``, on other ranks.
        share: of this rank in the gradients of the auxiliary losses: less than one where those of all ranks are summed.
        parts: how what the gate decides over is spread; None where it is this rank's own.
        gathers_scores: ``seen`` is this rank's part; what the gate makes of it is gathered.
    """

    leaves: Sequence[Tensor]
    seen: Tensor
    mask: Tensor | None
    token_ids: Tensor | None
    filled: Tensor | None = None
    before: int = 0
    share: float = 1.0
    parts: Parts | None = None
    gathers_scores: bool = False

    def own(self, x_TX: Tensor) -> Tensor:
        """Of something that all tokens have that the gate decides over, what this rank's have."""
        return x_TX if self.parts is None else self.parts.own(x_TX, self.seen.shape[1:-1].numel())

    def own_routing(self, routing: Routing) -> Routing:
        """What was decided about this rank's tokens. Losses and statistics stay those of all that the gate saw."""
        if self.parts is None:
            return routing
        expert_TK = self.own(routing.expert_TK)
        most = None if routing.most is None else min(routing.most, expert_TK.numel())
        return replace(routing, expert_TK=expert_TK, weight_TK=self.own(routing.weight_TK), most=most)


def take_part(
    layer: "FMoE", leaves: list[Tensor], mask: Tensor | None, token_ids: Tensor | None, filled: Tensor | None
) -> Part:
    """This rank's part of a layer's input, as its ``slice_group`` or ``sequence_group`` says.

    FastMoE's gates see the part alone, as they do in FastMoE.
    """
    by_logits = "decides_by_logits" in vars(type(layer.gate)) and layer.gate.decides_by_logits
    if layer.slice_group is not None:
        full, leading = leaves[0], leaves[0].shape[:-1]
        leaves, filled = take_slice((leaves, filled), layer.slice_group)
        if layer.is_fastmoe:
            mask, token_ids = take_slice((mask, token_ids), layer.slice_group)
            return Part(leaves, leaves[0], mask, token_ids, filled, *place_of_slice(leading, layer.slice_group))
        parts = Parts.cut(leading[0], layer.slice_group)
        seen = leaves[0] if by_logits else parts.whole(leaves[0], full)
    elif layer.sequence_group is not None:
        parts = Parts.held(leaves[0].shape[0], layer.sequence_group)
        seen = leaves[0] if by_logits else parts.whole(leaves[0])
        mask, token_ids = (None if x is None else parts.gather(x) for x in (mask, token_ids))
    else:
        return Part(leaves, leaves[0], mask, token_ids, filled)
    share = 1.0 if by_logits else 1 / parts.size
    return Part(leaves, seen, mask, token_ids, filled, 0, share, parts, by_logits)
