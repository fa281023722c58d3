"""Conversion of a layer's input to the tokens of this rank, and of their outputs to the layer's output.

Ranks of a tensor or sequence parallel group work on parts of the same sequences. A gate must see whole routing groups
(`fmoe.routing.RoutingGroups`), so these ranks gather its input. If the gate needs only logits, they gather its logits
instead. All ranks of the group then make the same decisions, and each rank continues with its own tokens.

Shape letters: T tokens of this rank, A tokens that the gate routes (those of all ranks of the group), D model width, K
experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from fmoe import random
from fmoe.errors import UserError
from fmoe.routing import Routing, RoutingGroups
from fmoe.runtime import collectives

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13


@dataclass(eq=False)
class Layout:
    """Layout of inputs in memory and over ranks.

    Args:
        d_model: D.
        group_size: tokens per routing group (`fmoe.routing.RoutingGroups`); None for one group per sequence.
        sequence_first: 3-D inputs are [S, B, D] instead of [B, S, D].
        slice_group: ranks that hold the same tokens and each process one slice of them; None without such ranks.
        sequence_group: ranks that hold equal parts of the same sequences along the first dimension; None without such
            ranks.
    """

    d_model: int
    group_size: int | None = None
    sequence_first: bool = False
    slice_group: dist.ProcessGroup | None = None
    sequence_group: dist.ProcessGroup | None = None

    def split(
        self, x: Tensor, mask: Tensor | None, token_ids: Tensor | None, seed: int, by_logits: bool = False
    ) -> "LocalTokens":
        """Return this rank's tokens of ``x``, and the tokens that its gate routes.

        Args:
            x, mask, token_ids: input of the layer (`fmoe.MoE.forward`); [T, D] is one sequence.
            seed: the layer's seed, from which its noise is drawn.
            by_logits: whether the gate gathers its logits over ranks, so that its input is only this rank's tokens.

        Raises:
            UserError: ``x`` is not [..., T, D] or not floating point; ``mask`` or ``token_ids`` does not have one value
                per token; ``mask`` is not bool.
        """
        self._check(x, mask, token_ids)
        local, seen, shards = x, x, None
        if self.slice_group is not None:
            local = take_slice(x, self.slice_group)
            shards = TokenShards.of_slices(x.shape[0], self.slice_group)
            seen = local if by_logits else shards.gather(local, full=x)
        elif self.sequence_group is not None:
            shards = TokenShards.of_equal_parts(x.shape[0], self.sequence_group)
            seen = x if by_logits else shards.gather(x)
            mask, token_ids = (None if y is None else shards.all_gather(y) for y in (mask, token_ids))
        loss_share = 1.0 if shards is None or by_logits else 1 / shards.size
        seen_AD, groups = self._tokens(seen, mask, token_ids, seed, shards if by_logits else None)
        x_TD = seen_AD if local is seen else local.reshape(-1, self.d_model)  # one view: gradients add up in place
        return LocalTokens([x_TD], seen_AD, groups, x.shape[:-1], loss_share, shards, self.slice_group)

    def tokens(
        self, x: Tensor, mask: Tensor | None = None, token_ids: Tensor | None = None, seed: int = 0
    ) -> tuple[Tensor, RoutingGroups]:
        """Return the tokens of an input as [T, D], a view if possible, and their routing groups.

        Args:
            x, mask, token_ids, seed: see `split`.

        Raises:
            UserError: see `split`.
        """
        self._check(x, mask, token_ids)
        return self._tokens(x, mask, token_ids, seed, None)

    def _check(self, x: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> None:
        if x.dim() < 2 or x.shape[-1] != self.d_model or not x.is_floating_point():
            found, valid = f"shape {tuple(x.shape)} and dtype {x.dtype}", f"[..., tokens, d_model={self.d_model}]"
            raise UserError(f"the input has {found}; it must be {valid} and floating point")
        for name, value in (("mask", mask), ("token_ids", token_ids)):
            if value is not None and value.shape != x.shape[:-1]:
                raise UserError(f"{name} has shape {tuple(value.shape)}; the tokens have shape {tuple(x.shape[:-1])}")
        if mask is not None and mask.dtype != torch.bool:
            raise UserError(f"mask has dtype {mask.dtype}; it must be torch.bool, False for padding")

    def _tokens(
        self, x: Tensor, mask: Tensor | None, token_ids: Tensor | None, seed: int, shards: "TokenShards | None"
    ) -> tuple[Tensor, RoutingGroups]:
        """Return the tokens of ``x`` as [T, D], and the routing groups, without checks."""
        # With `shards`, `x` is this rank's part; `mask`, `token_ids` and the groups cover the tokens of all ranks.
        leading = x.shape[:-1] if shards is None else torch.Size((shards.length, *x.shape[1:-1]))
        sequence_first = self.sequence_first and x.dim() == 3
        length = leading[0] if sequence_first else leading[-1]
        groups = RoutingGroups(
            leading.numel() // max(length, 1),
            length,
            size=length if self.group_size is None else self.group_size,
            sequence_first=sequence_first,
            mask_T=None if mask is None else mask.reshape(-1),
            token_ids_T=None if token_ids is None else token_ids.reshape(-1),
            noise_key=lambda: random.noise_key(seed),
            shards=shards,
        )
        groups.first_group = random.first_token() // groups.size
        return x.reshape(-1, self.d_model), groups


@dataclass(eq=False)
class LocalTokens:
    """This rank's T tokens of one input, and the A tokens that its gate routes.

    Without tensor and sequence parallelism, these are the same tokens. With a tensor or sequence parallel group, the A
    tokens are those of all ranks of the group.

    Attributes:
        inputs: tensors [T, ...] whose rows are sent to the experts; the first one is `x_TD`.
        gate_input_TD: input of the gate: [A, D], or [T, D] if the gate gathers its logits over ranks.
        groups: the routing groups of the A tokens.
        leading: the input's shape without D.
        loss_share: factor of the auxiliary losses on this rank; below 1 if their gradients are summed over ranks.
        shards: how the A tokens are spread over ranks; None if this rank holds all of them.
        slice_group: group over which `join` gathers the outputs; None to gather nothing.
    """

    inputs: list[Tensor]
    gate_input_TD: Tensor
    groups: RoutingGroups
    leading: torch.Size
    loss_share: float = 1.0
    shards: "TokenShards | None" = None
    slice_group: dist.ProcessGroup | None = None

    @property
    def x_TD(self) -> Tensor:
        """This rank's tokens."""
        return self.inputs[0]

    def local(self, x_AX: Tensor) -> Tensor:
        """Return the rows of this rank's tokens, [T, ...], from a tensor with a row for each of the A tokens."""
        return x_AX if self.shards is None else self.shards.local(x_AX, self.leading[1:].numel())

    def local_routing(self, routing: Routing) -> Routing:
        """Return the decisions about this rank's tokens. Losses and statistics still cover all A tokens."""
        if self.shards is None:
            return routing if routing.passed is None else self._passed(routing)
        expert_TK = self.local(routing.expert_TK)
        max_load = None if routing.max_load is None else min(routing.max_load, expert_TK.numel())
        return replace(routing, expert_TK=expert_TK, weight_TK=self.local(routing.weight_TK), max_load=max_load)

    def _passed(self, routing: Routing) -> Routing:
        """Return ``routing``. If the gate's input was `x_TD`, replace it by the same tokens in `Routing.passed`."""
        assert routing.passed is not None
        given, passed = routing.passed
        if given is self.x_TD:
            self.inputs = [passed, *self.inputs[1:]]
        return routing

    def rows(self, with_keys: bool) -> list[Tensor]:
        """Return the tensors whose rows are sent to the experts.

        Args:
            with_keys: append the noise keys of expert dropout, int64 [T, 1]. A token's key does not depend on how the
                job is split over ranks.
        """
        if not with_keys:
            return self.inputs
        keys_T = self.local(self.groups.token_keys("expert dropout", self.x_TD.device))
        return [*self.inputs, keys_T.unsqueeze(1)]

    def without_padding(self, y_TD: Tensor) -> Tensor:
        """Return ``y_TD`` with zeros for padding."""
        if self.groups.mask_T is None:
            return y_TD
        return y_TD.masked_fill(~self.local(self.groups.mask_T).unsqueeze(1), 0)

    def join(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Gather outputs [T, width] over ``slice_group``, and reshape them to the leading dimensions of the input."""
        if self.slice_group is not None:
            outputs = [self._gather_slices(y, self.slice_group) for y in outputs]
        return [y.reshape(*self.leading, *y.shape[-1:]) for y in outputs]

    def _gather_slices(self, y_TD: Tensor, group: dist.ProcessGroup) -> Tensor:
        length, rest = self.leading[0], self.leading[1:]
        begin, end = slice_bounds(length, group.rank(), group.size())
        return gather_slices(y_TD.view(end - begin, *rest, *y_TD.shape[1:]), length, group)


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
        begin = sum(self.lengths[: self.group.rank()])
        return begin, begin + self.lengths[self.group.rank()]

    def gather(self, x: Tensor, full: Tensor | None = None, *, alike: bool = False) -> Tensor:
        """Concatenate the parts ``x`` of all ranks along the first dimension; differentiable.

        Args:
            full: the result, if this rank already has it. The forward pass then communicates nothing.
            alike: False: the backward pass sums the gradients of all ranks. True: it takes this rank's own gradient,
                without communication. True is correct if each use of the result is the same on all ranks or reads only
                the rank's own part.
        """
        return _Gather.apply(x, full, self, alike)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum of ``x`` over ranks; differentiable."""
        return _ReduceScatter.apply(x, self)

    def local(self, x: Tensor, rows: int = 1) -> Tensor:
        """Return this rank's part of ``x``, whose first dimension is ``rows`` times as long as `length`."""
        begin, end = self.bounds
        return x.narrow(0, begin * rows, (end - begin) * rows)

    def all_gather(self, x: Tensor) -> Tensor:
        """Like `gather`, but not differentiable."""
        longest = max(self.lengths)
        if x.shape[0] < longest:
            x = torch.cat([x, x.new_zeros(longest - x.shape[0], *x.shape[1:])])
        parts = [torch.empty_like(x) for _ in range(self.size)]
        collectives.run(dist.all_gather, parts, x.contiguous(), group=self.group)
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
        ctx.shards, ctx.alike = shards, alike
        return shards.all_gather(x) if full is None else full.detach().view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (_Local if ctx.alike else _ReduceScatter).apply(grad, ctx.shards), None, None, None


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: TokenShards) -> Tensor:
        ctx.shards = shards
        return shards.local(x)

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


def zero_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` with zeros where ``mask`` is False: padding may hold NaN, and NaN times a weight of zero is NaN.

    If the mask has an invalid shape or dtype, return ``x`` unchanged; `Layout.split` raises the error.
    """
    is_valid = mask.dtype == torch.bool and mask.shape == x.shape[:-1]
    return x.masked_fill(~mask.unsqueeze(-1), 0) if is_valid else x


def slice_bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return the bounds of a rank's slice of ``length`` rows; the first ``length % size`` slices are one row longer."""
    part, rest = divmod(length, size)
    begin = rank * part + min(rank, rest)
    return begin, begin + part + (rank < rest)


class _TakeSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.length = group, x.shape[0]
        begin, end = slice_bounds(x.shape[0], group.rank(), group.size())
        return x[begin:end].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _GatherSlices.apply(grad, ctx.length, ctx.group), None


class _GatherSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return TokenShards.of_slices(length, group).all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _TakeSlice.apply(grad, ctx.group), None, None


def take_slice(nest: Any, group: dist.ProcessGroup) -> Any:
    """Return this rank's slice, along the first dimension, of each tensor of a pytree that all ranks hold."""
    return pytree.tree_map(lambda x: _TakeSlice.apply(x, group) if isinstance(x, Tensor) else x, nest)


def gather_slices(x: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the slices of all ranks to a tensor of ``length`` rows; the inverse of `take_slice`."""
    return _GatherSlices.apply(x, length, group)
