"""Counting and dropping, within routing groups. Always by (group, expert, order), so that the same assignments are
dropped in every run: a counter advanced by atomics would drop others each time.
"""

import math

import torch
from torch import Tensor

from fmoe.kernels import backends
from fmoe.kernels.cuda import rows as cuda_rows
from fmoe.routing import RoutingGroups


def count_by_group(expert_TK: Tensor, groups: RoutingGroups, num_experts: int) -> Tensor:
    """How many assignments of each group go to each expert: int64 [G, E]. Entries of -1 are not counted."""
    expert_GN = groups.split(expert_TK, pad=-1).flatten(1) + 1
    counts = expert_GN.new_zeros(expert_GN.shape[0], num_experts + 1)
    return counts.scatter_add_(1, expert_GN, torch.ones_like(expert_GN))[:, 1:]


def capacity(factor: float, assignments: int, num_experts: int) -> int:
    """Assignments that an expert takes of a group with so many in all: ``ceil(factor * assignments / E)``, at least 1
    (GShard section 2.2, Switch equation 3)."""
    # The product in decimal notation may lie a rounding error above an integer: 1.1 * 10 / 1 is 11.000000000000002.
    return max(1, math.ceil(factor * assignments / num_experts - 1e-9))


def drop_over_capacity(expert_TK: Tensor, groups: RoutingGroups, num_experts: int, factor: float) -> Tensor:
    """``expert_TK`` with -1 where the expert is full.

    An expert serves the first choices of all tokens of the group in token order, then the second choices, and so on
    (GShard, algorithm 1).
    """
    if not expert_TK.numel():
        return expert_TK
    if backends.cuda_takes_choices(expert_TK, num_experts):
        shape = groups.layout
        return cuda_rows.drop_over_capacity(expert_TK, groups.mask_T, num_experts, groups.size, *shape, factor)
    expert_GSK = groups.split(expert_TK, pad=-1)
    num_groups, size, top_k = expert_GSK.shape
    # A queue for every (group, expert); what was never assigned waits in a queue of its own, past the last expert.
    queue_GKS = torch.where(expert_GSK < 0, num_experts, expert_GSK).transpose(1, 2)
    offset_G = torch.arange(num_groups, device=expert_TK.device, dtype=torch.int64) * (num_experts + 1)
    queue_N = (queue_GKS + offset_G.view(-1, 1, 1)).reshape(-1)
    sorted_N, order_N = queue_N.sort(stable=True)
    place_N = torch.arange(queue_N.numel(), device=expert_TK.device, dtype=torch.int64) - torch.searchsorted(
        sorted_N, sorted_N
    )
    place_N = torch.empty_like(order_N).scatter_(0, order_N, place_N)
    limit_G = limits(groups, top_k, num_experts, factor, expert_TK.device)
    fits_GKS = place_N.view(num_groups, top_k, size) < limit_G.view(-1, 1, 1)
    return groups.join(torch.where(fits_GKS.transpose(1, 2), expert_GSK, -1))


def limits(groups: RoutingGroups, top_k: int, num_experts: int, factor: float, device: torch.device) -> Tensor:
    """`capacity` of each group, int64 [G]; on the device where a mask says how many tokens a group has."""
    if groups.mask_T is None:
        return torch.tensor(
            [capacity(factor, n * top_k, num_experts) for n in groups.sizes()], device=device, dtype=torch.int64
        )
    assignments_G = groups.valid(device).sum(1) * top_k
    return (factor * assignments_G.double() / num_experts - 1e-9).ceil().clamp(min=1).long()
