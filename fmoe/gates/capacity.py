"""Capacity: a limit on the assignments that an expert accepts in each routing group.

An expert accepts the assignments of a group in the order of (choice, token), so that every run drops the same ones. An
atomic counter would drop different ones in each run.

Shape letters: T tokens, E experts, K choices, G routing groups, S positions of a group, N assignments.
"""

import math

import torch
from torch import Tensor

from fmoe.routing import RoutingGroups


def count_by_group(expert_TK: Tensor, groups: RoutingGroups, num_experts: int) -> Tensor:
    """Return the number of assignments of each routing group to each expert, int64 [G, E]; -1 is not counted."""
    expert_GN = groups.split(expert_TK, pad=-1).flatten(1) + 1
    counts = expert_GN.new_zeros(expert_GN.shape[0], num_experts + 1)
    return counts.scatter_add_(1, expert_GN, torch.ones_like(expert_GN))[:, 1:]


def capacity(factor: float, assignments: int, num_experts: int) -> int:
    """Return how many of a group's assignments an expert accepts: ``ceil(factor * assignments / E)``, at least 1.

    The formula is from GShard (arXiv 2006.16668 section 2.2) and Switch (arXiv 2101.03961 equation 3).
    """
    # A rounding error can put the result slightly above an integer: 1.1 * 10 / 1 is 11.000000000000002.
    return max(1, math.ceil(factor * assignments / num_experts - 1e-9))


def limits(groups: RoutingGroups, top_k: int, num_experts: int, factor: float, device: torch.device) -> Tensor:
    """Return the `capacity` of an expert in each routing group, int64 [G]."""
    if groups.mask_T is None:  # filled on the device: a copy would synchronize
        limit = capacity(factor, groups.size * top_k, num_experts)
        limit_G = torch.full((groups.count,), limit, device=device, dtype=torch.int64)
        if groups.padding:
            limit_G[-1] = capacity(factor, (groups.size - groups.padding) * top_k, num_experts)
        return limit_G
    assignments_G = groups.valid(device).sum(1) * top_k
    return (factor * assignments_G.double() / num_experts - 1e-9).ceil().clamp(min=1).long()


def drop_over_capacity(expert_TK: Tensor, groups: RoutingGroups, num_experts: int, factor: float) -> Tensor:
    """Return ``expert_TK`` with -1 where the expert is full.

    An expert serves the first choices of all tokens of the group in token order, then the second choices, and so on
    (GShard, algorithm 1).
    """
    if not expert_TK.numel():
        return expert_TK
    expert_GSK = groups.split(expert_TK, pad=-1)
    num_groups, size, top_k = expert_GSK.shape
    # One queue for each (group, expert). Choices of -1 get a separate queue after the last expert.
    queue_GKS = torch.where(expert_GSK < 0, num_experts, expert_GSK).transpose(1, 2)
    offset_G = torch.arange(num_groups, device=expert_TK.device, dtype=torch.int64) * (num_experts + 1)
    queue_N = (queue_GKS + offset_G.view(-1, 1, 1)).reshape(-1)
    sorted_N, order_N = queue_N.sort(stable=True)
    index_N = torch.arange(queue_N.numel(), device=expert_TK.device, dtype=torch.int64)
    position_N = torch.empty_like(order_N).scatter_(0, order_N, index_N - torch.searchsorted(sorted_N, sorted_N))
    limit_G = limits(groups, top_k, num_experts, factor, expert_TK.device)
    fits_GKS = position_N.view(num_groups, top_k, size) < limit_G.view(-1, 1, 1)
    return groups.join(torch.where(fits_GKS.transpose(1, 2), expert_GSK, -1))
