"""FastMoE's gate of one expert, for measurements."""

import torch
from torch import Tensor

from fmoe.compat.gates.base_gate import BaseGate


class ZeroGate(BaseGate):
    """Every choice of every token is expert 0, with the weights 1 / K."""

    def __init__(self, _d_model: int, num_expert: int, world_size: int, top_k: int = 2):
        super().__init__(num_expert, world_size)
        self.top_k = top_k

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] -> index [T, K], score [T, K]."""
        shape = (inp.shape[0], self.top_k)
        index_TK = torch.zeros(shape, dtype=torch.int64, device=inp.device)
        return index_TK, torch.full(shape, 1 / self.top_k, dtype=inp.dtype, device=inp.device)
