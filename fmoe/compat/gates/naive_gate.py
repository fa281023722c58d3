"""FastMoE's plain top-k gate."""

import torch
from torch import Tensor, nn

from fmoe.compat.gates.base_gate import BaseGate, check_top_k
from fmoe.compat.gates.utils import softmax


class NaiveGate(BaseGate):
    """The K largest of a linear map, weighted by a softmax over the K. Its loss is zero."""

    def __init__(self, d_model: int, num_expert: int, world_size: int, top_k: int = 2, gate_bias: bool = True):
        super().__init__(num_expert, world_size)
        check_top_k(top_k, num_expert, world_size)
        self.gate = nn.Linear(d_model, self.tot_expert, bias=gate_bias)
        self.top_k = top_k

    def reset_parameters(self) -> None:
        """Draws the linear map anew."""
        self.gate.reset_parameters()

    def forward(self, inp: Tensor, return_all_scores: bool = False):
        """[T, D] -> index [T, K], best first, and score [T, K] in the dtype of ``inp`` (and all logits [T, E])."""
        logits_TE = self.gate(inp)
        logit_TK, index_TK = logits_TE.topk(self.top_k, dim=-1)
        score_TK = softmax(logit_TK).view(-1, self.top_k).to(inp.dtype)
        # So that every gate but ZeroGate and SwipeGate has a loss to be added.
        self.set_loss(torch.zeros(1, device=inp.device, dtype=torch.float32))
        return (index_TK, score_TK, logits_TE) if return_all_scores else (index_TK, score_TK)
