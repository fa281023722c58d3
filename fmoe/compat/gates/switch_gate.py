"""FastMoE's Switch gate."""

import math

import torch
from torch import Tensor

from fmoe.compat.gates.naive_gate import NaiveGate
from fmoe.compat.gates.utils import balance_loss, limit_by_capacity, softmax


class SwitchGate(NaiveGate):
    """The most probable expert, weighted by its probability (Switch Transformer, arXiv 2101.03961), with noise in
    [1 - eps, 1 + eps] added to the logits in training (the paper multiplies the input, as the router "switch" of
    `fmoe.gates` does).

    An expert takes ``ceil(factor * T * K / num_expert)`` choices of all workers together.

    Args:
        topk: any K; layers that are given none take 1.
        switch_eps: half width of the noise.
        capacity: factor in training and in evaluation.
    """

    default_top_k = 1
    runs_collectives = True

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 1,
        switch_eps: float = 0.1,
        capacity: tuple[float, float] = (1.2, 2.4),
        gate_bias: bool = True,
    ):
        super().__init__(d_model, num_expert, world_size, top_k=topk, gate_bias=gate_bias)
        self.switch_eps, self.capacity = switch_eps, capacity

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] -> index [T, K], -1 where the expert is full, and score [T, K]."""
        logits_TE = self.gate(inp)
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        if self.training:
            noise_TE = torch.rand_like(logits_TE) * 2 * self.switch_eps + 1.0 - self.switch_eps
            logits_TE = logits_TE + noise_TE
        score_TK, index_TK = softmax(logits_TE).topk(self.top_k, dim=-1)
        self.set_loss(balance_loss(logits_TE, index_TK))
        factor = self.capacity[0 if self.training else 1]
        capacity = math.ceil(factor * inp.shape[0] * self.top_k / self.num_expert)
        kept_TK = limit_by_capacity(index_TK, self.num_expert, self.world_size, capacity)[2]
        return kept_TK, score_TK.to(inp.dtype)
