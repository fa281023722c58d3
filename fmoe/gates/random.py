"""The gate that draws lots."""

import math

import torch
from torch import Tensor

from fmoe.gates.router import FixedRouter
from fmoe.routing import RoutingGroups


class RandomRouter(FixedRouter):
    """K different experts drawn at random for each token, weighted 1 / K, in training and in evaluation (THOR, arXiv
    2110.04260, which draws for a batch; Roller et al., arXiv 2106.04426, compare with it).

    The draw is noise like any other: keyed by (seed, layer, step, routing group), new at each step.
    """

    routes_by_logits = True

    def choose(self, groups: RoutingGroups, device: torch.device) -> Tensor:
        return best_by_hash(groups.uniform(self.num_experts, "random gate", device), self.top_k)

    def entropy(self) -> float:
        return math.log(self.num_experts)


def best_by_hash(noise_TE: Tensor, top_k: int) -> Tensor:
    """The K experts of largest noise; of equals, which 24 bits do have, the first, on every device."""
    return noise_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
