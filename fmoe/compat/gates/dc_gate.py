"""FastMoE's distributed capacity gate."""

import math

from torch import Tensor

from fmoe.compat.gates.gshard_gate import GShardGate
from fmoe.compat.gates.utils import limit_by_capacity


class DCGate(GShardGate):
    """`GShardGate` whose capacity is counted over all workers: an expert takes ``ceil(factor * T)`` choices, those of
    the first workers first, whatever worker they come from."""

    runs_collectives = True

    def limit(self, index_TK: Tensor, factor: float) -> Tensor:
        """Drops what is over capacity."""
        capacity = math.ceil(factor * index_TK.shape[0])
        return limit_by_capacity(index_TK, self.num_expert, self.world_size, capacity)[2]
