"""The gate that sends everything to one expert."""

import torch
from torch import Tensor

from fmoe.gates.router import FixedRouter
from fmoe.routing import RoutingGroups


class ZeroRouter(FixedRouter):
    """Every choice of every token is expert 0, with weight 1 / K (FastMoE's ZeroGate): the worst possible balance, and
    the output of a dense layer. For tests and benchmarks."""

    routes_by_logits = True

    def choose(self, groups: RoutingGroups, device: torch.device) -> Tensor:
        return torch.zeros(groups.num_tokens, self.top_k, dtype=torch.int64, device=device)
