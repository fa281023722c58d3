"""FastMoE's noisy top-k gate."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe.compat.gates.base_gate import BaseGate, check_top_k
from fmoe.compat.gates.utils import softmax
from fmoe.gates.noisy import chance_of_choice
from fmoe.losses import importance_loss, load_loss


class NoisyGate(BaseGate):
    """Noisy top-k gating (Shazeer et al., arXiv 1701.06538, equations 3-5) for any K; its loss is the sum of the
    importance and the load loss (equations 6-11). In evaluation there is no noise, and the load is the tokens' count.
    """

    def __init__(self, d_model: int, num_expert: int, world_size: int, top_k: int = 2):
        super().__init__(num_expert, world_size)
        check_top_k(top_k, num_expert, world_size)
        self.top_k, self.noise_epsilon = top_k, 1e-2
        self.w_gate = nn.Parameter(torch.empty(d_model, self.tot_expert))
        self.w_noise = nn.Parameter(torch.empty(d_model, self.tot_expert))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U(-1/sqrt(D), 1/sqrt(D)), as a Linear."""
        bound = 1 / math.sqrt(self.w_gate.shape[0])
        for weight in (self.w_gate, self.w_noise):
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] -> index [T, K], best first, score [T, K] in the dtype of ``inp``."""
        dtype = torch.promote_types(inp.dtype, torch.float32)
        clean_TE = noisy_TE = (inp @ self.w_gate).to(dtype)
        if self.training:
            std_TE = F.softplus((inp @ self.w_noise).to(dtype)) + self.noise_epsilon
            noisy_TE = clean_TE + torch.randn_like(clean_TE) * std_TE
        top_logits, top_index = noisy_TE.topk(min(self.top_k + 1, self.tot_expert), dim=-1)
        index_TK = top_index[:, : self.top_k]
        score_TK = softmax(top_logits[:, : self.top_k])
        chosen_TE = torch.zeros_like(clean_TE).scatter(1, index_TK, 1.0)
        if self.training and self.top_k < self.tot_expert:
            chosen_TE = chance_of_choice(clean_TE, noisy_TE, std_TE, top_logits)
        gates_TE = torch.zeros_like(clean_TE).scatter(1, index_TK, score_TK)
        self.set_loss(importance_loss(gates_TE.unsqueeze(0)) + load_loss(chosen_TE.unsqueeze(0)))
        return index_TK, score_TK.to(inp.dtype)
