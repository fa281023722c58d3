"""FastMoE's GShard gate."""

import math

import torch
from torch import Tensor

from fmoe.compat.gates.naive_gate import NaiveGate
from fmoe.compat.gates.utils import balance_loss, keep_first


class GShardGate(NaiveGate):
    """Top-2 with a random second expert and capacity (GShard, arXiv 2006.16668, algorithm 1).

    In training, choices after the first are kept with probability ``min(1, 2 * score)``. Of each worker every expert
    then takes ``ceil(factor * T) * K // E`` choices, at least one, first choices before second ones. The balance loss
    counts first choices.

    Args:
        topk: any K.
        capacity: factor in training and in evaluation.
        random_routing: False keeps every choice in training as well.
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 2,
        capacity: tuple[float, float] = (1.2, 2.4),
        random_routing: bool = True,
        gate_bias: bool = True,
    ):
        super().__init__(d_model, num_expert, world_size, top_k=topk, gate_bias=gate_bias)
        self.capacity, self.random_routing = capacity, random_routing

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] -> index [T, K], -1 for choices that are not made, and score [T, K]."""
        index_TK, score_TK, logits_TE = super().forward(x, return_all_scores=True)
        self.set_loss(balance_loss(logits_TE, index_TK[:, 0]))
        if self.random_routing and self.training:
            later_TK = torch.arange(self.top_k, device=x.device, dtype=torch.int64) > 0
            noise_T1 = torch.rand(x.shape[0], 1, device=x.device, dtype=torch.float32)
            index_TK = index_TK.masked_fill(later_TK & (2 * score_TK < noise_T1), -1)
        return self.limit(index_TK, self.capacity[0 if self.training else 1]), score_TK

    def limit(self, index_TK: Tensor, factor: float) -> Tensor:
        """Drops what is over capacity."""
        capacity = math.ceil(factor * index_TK.shape[0]) * self.top_k // self.tot_expert
        return keep_first(index_TK, index_TK.new_full((self.tot_expert,), max(capacity, 1)))
