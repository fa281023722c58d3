"""Capacity, balance and weights, for gates in FastMoE's contract."""

import torch
from torch import Tensor

from fmoe.functions import count_by_gate, exchange_counts
from fmoe.losses import load_balancing_loss


@torch.no_grad()
def limit_by_capacity(
    topk_idx: Tensor, num_expert: int, world_size: int, capacity: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lets every expert take ``capacity`` choices of all workers together, those of the first workers first.

    Args:
        topk_idx: int64 [T] or [T, K]; -1 is no choice.
        capacity: of each expert, or of each of this worker's experts [L].

    Returns:
        new_lec: [W * L], choices of this worker that each expert takes.
        new_gec: [W * L], choices of each worker that this worker's experts take.
        topk_idx: with -1 where the expert does not take it (`keep_first`).
    """
    _, _, offered = count_by_gate(topk_idx, num_expert, world_size, require_pos=False)
    new_gec = grant(offered.view(world_size, num_expert), capacity).view(-1)
    new_lec = exchange_counts(new_gec, world_size)
    return new_lec, new_gec, keep_first(topk_idx, new_lec)


def grant(offered_WX: Tensor, capacity_X: int | Tensor) -> Tensor:
    """How many of the offers each X takes of each worker, in order of workers, until its capacity is used up."""
    before_WX = offered_WX.cumsum(0) - offered_WX
    return (
        (torch.as_tensor(capacity_X, device=offered_WX.device, dtype=torch.int64) - before_WX)
        .clamp(min=0)
        .minimum(offered_WX)
    )


@torch.no_grad()
def keep_first(index: Tensor, limit_E: Tensor) -> Tensor:
    """[T] or [T, K] -> the same with -1 past the first ``limit_E[e]`` choices of each expert e: first choices of all
    tokens, in their order, before second ones. The same ones in every run."""
    queue_N = (index if index.dim() == 1 else index.t()).reshape(-1)
    queue_N = torch.where(queue_N < 0, len(limit_E), queue_N)
    sorted_N, order_N = queue_N.sort(stable=True)
    place_N = torch.arange(len(queue_N), device=index.device, dtype=torch.int64) - torch.searchsorted(
        sorted_N, sorted_N
    )
    place_N = torch.empty_like(order_N).scatter_(0, order_N, place_N)
    fits_N = place_N < torch.cat([limit_E, limit_E.new_zeros(1)])[queue_N]
    fits = fits_N if index.dim() == 1 else fits_N.view(index.shape[1], index.shape[0]).t()
    return torch.where(fits, index, -1).contiguous()


def balance_loss(logits_TE: Tensor, chosen: Tensor) -> Tensor:
    """Load balancing loss of the ``chosen`` experts (any shape), 1 when balanced: over all E, before capacity."""
    count_E = (chosen.reshape(-1, 1) == torch.arange(logits_TE.shape[1], device=chosen.device, dtype=torch.int64)).sum(
        0
    )
    return load_balancing_loss(softmax(logits_TE).unsqueeze(0), count_E.unsqueeze(0))


def softmax(logits: Tensor) -> Tensor:
    """Over the last dimension, at least in float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
