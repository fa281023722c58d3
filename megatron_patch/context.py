"""Context parallelism: each rank of a group holds one contiguous slice of every sequence, in the order of the ranks.

Only attention and gates need more than the slice. Before attention, the ranks exchange slices of the sequences for
slices of the heads (DeepSpeed-Ulysses, arXiv 2309.14509). Each rank then attends over whole sequences, with the same
kernel, masks and dropout as a single process. After attention, the ranks exchange back.

Shape letters: P ranks, S tokens of a slice, B sequences, A heads on a rank before the exchange, W head width.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from fmoe import UserError
from fmoe.runtime import collectives
from fmoe.shards import slice_bounds


def context_group(config: TransformerConfig, collection: Any = None) -> dist.ProcessGroup | None:
    """Return the context parallel group; None if it has one rank.

    The group is ``collection.cp``, or Megatron's parallel_state's if the collection has none.

    Raises:
        UserError: ``config.context_parallel_size`` differs from the size of the group.
    """
    group = getattr(collection, "cp", None)
    group = parallel_state.get_context_parallel_group(check_initialized=False) if group is None else group
    size = 1 if group is None else group.size()
    if config.context_parallel_size != size:
        raise UserError(
            f"context_parallel_size={config.context_parallel_size} of the config differs from the size {size} of the "
            "context parallel group: initialize Megatron's groups with the config's size"
        )
    return None if size == 1 else group


def slice_rotary_positions(model: Any) -> None:
    """Make a model's rotary embedding return the global positions of this rank's slice of the sequences.

    Megatron-core's own positions are those of two chunks, one from each end of the sequence (zigzag). A model without a
    rotary embedding is unchanged.
    """
    embedding = getattr(model, "rotary_pos_emb", None)
    group = context_group(model.config)
    if embedding is None or group is None:
        return
    embedding.cp_group = None  # the embedding then returns all positions

    def take_slice(module: nn.Module, inputs: Any, positions: Tensor) -> Tensor:
        begin, end = slice_bounds(positions.shape[0], group.rank(), group.size())
        return positions[begin:end]

    embedding.register_forward_hook(take_slice)


def spread_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's slice of the tokens for its slice of the heads; differentiable.

    The group has P ranks. A slice has S tokens.

    Args:
        query: [S, B, A, W] for A heads of width W; P divides A.
        key, value: [S, B, A', W], where A' divides A. If P does not divide A', several ranks receive the same head.

    Returns:
        Query [P * S, B, A / P, W]; key and value of the heads that these queries use.
    """
    size = group.size()
    copies = size // math.gcd(size, key.shape[2])
    if copies > 1:  # lcm(P, A') heads, which divide A
        key, value = (x.repeat_interleave(copies, dim=2) for x in (key, value))
    parts = [x.unflatten(2, (size, -1)) for x in (query, key, value)]
    mine = sequence_to_heads(torch.cat(parts, dim=3).flatten(2, 3), group)
    query, key, value = mine.split([x.shape[3] for x in parts], dim=2)
    return query, key, value


def sequence_to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange this rank's slice of the tokens, [S, B, A, W], for its slice of the heads, [P * S, B, A / P, W].

    P is the number of ranks.
    """
    return _Exchange.apply(x, group, True)


def heads_to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Map [P * S, B, A / P, W] to [S, B, A, W]: the inverse of `sequence_to_heads`."""
    return _Exchange.apply(x, group, False)


class _Exchange(torch.autograd.Function):
    """One all-to-all, whose backward pass is the all-to-all in the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group = group
        ctx.to_heads = to_heads
        size = group.size()
        sent = x.unflatten(2, (size, -1)).movedim(2, 0) if to_heads else x.unflatten(0, (size, -1))
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        collectives.run(dist.all_to_all_single, received, sent, group=group)
        return received.flatten(0, 1) if to_heads else received.movedim(0, 2).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(grad, ctx.group, not ctx.to_heads), None, None
