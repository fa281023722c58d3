"""Conversion of a layer's input to the tokens of this rank, and of their outputs to the layer's output.

Ranks of a tensor or sequence parallel group work on parts of the same sequences. A gate must see whole routing groups
(`fmoe.routing.RoutingGroups`), so these ranks gather its input. If the gate needs only logits, they gather its logits
instead. All ranks of the group then make the same decisions, and each rank continues with its own tokens.

Shape letters: T tokens of this rank, A tokens that the gate routes (those of all ranks of the group), D model width, K
experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe import random
from fmoe.errors import UserError
from fmoe.routing import Routing, RoutingGroups
from fmoe.shards import TokenShards, take_slice


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
        local = gate_input = x
        shards = None
        if self.slice_group is not None:
            local = take_slice(x, self.slice_group)
            shards = TokenShards.of_slices(x.shape[0], self.slice_group)
            gate_input = local if by_logits else shards.gather(local, full=x)
        elif self.sequence_group is not None:
            shards = TokenShards.of_equal_parts(x.shape[0], self.sequence_group)
            gate_input = x if by_logits else shards.gather(x)
            mask = None if mask is None else shards.all_gather(mask)
            token_ids = None if token_ids is None else shards.all_gather(token_ids)
        loss_share = 1.0 if shards is None or by_logits else 1 / shards.size
        gate_input_TD, groups = self._tokens(gate_input, mask, token_ids, seed, shards if by_logits else None)
        x_TD = gate_input_TD  # one view: gradients add up in place
        if local is not gate_input:
            x_TD = local.reshape(-1, self.d_model)
        return LocalTokens([x_TD], gate_input_TD, groups, x.shape[:-1], loss_share, shards, self.slice_group)

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
            raise UserError(
                f"the input has shape {tuple(x.shape)} and dtype {x.dtype}; it must be "
                f"[..., tokens, d_model={self.d_model}] and floating point"
            )
        for name, value in (("mask", mask), ("token_ids", token_ids)):
            if value is not None and value.shape != x.shape[:-1]:
                raise UserError(f"{name} has shape {tuple(value.shape)}; the tokens have shape {tuple(x.shape[:-1])}")
        if mask is not None and mask.dtype != torch.bool:
            raise UserError(f"mask has dtype {mask.dtype}; it must be torch.bool, False for padding")

    def _tokens(
        self, x: Tensor, mask: Tensor | None, token_ids: Tensor | None, seed: int, shards: TokenShards | None
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
    shards: TokenShards | None = None
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
            return routing
        expert_TK = self.local(routing.expert_TK)
        max_load = None if routing.max_load is None else min(routing.max_load, expert_TK.numel())
        return replace(routing, expert_TK=expert_TK, weight_TK=self.local(routing.weight_TK), max_load=max_load)

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
            slices = TokenShards.of_slices(self.leading[0], self.slice_group)
            begin, end = slices.bounds
            leading = (end - begin, *self.leading[1:])
            outputs = [slices.gather(y.view(*leading, *y.shape[1:]), alike=True) for y in outputs]
        return [y.reshape(*self.leading, *y.shape[-1:]) for y in outputs]


def zero_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` with zeros where ``mask`` is False: padding may hold NaN, and NaN times a weight of zero is NaN.

    If the mask has an invalid shape or dtype, return ``x`` unchanged; `Layout.split` raises the error.
    """
    is_valid = mask.dtype == torch.bool and mask.shape == x.shape[:-1]
    return x.masked_fill(~mask.unsqueeze(-1), 0) if is_valid else x
