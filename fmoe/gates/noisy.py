"""The noisy top-k gate."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe.gates.router import Choice, Scores, TopKRouter
from fmoe.losses import importance_loss, load_loss
from fmoe.routing import RoutingGroups

_MIN_STD = 1e-6  # softplus underflows to zero, and equation 9 divides by it


class NoisyRouter(TopKRouter):
    """Noisy top-k gating (Shazeer et al., arXiv 1701.06538).

    A token chooses the K largest of ``x W_g + normal * softplus(x W_noise)``, weighted by a softmax over these K
    (equations 3-5). Evaluation adds no noise. ``noise_weight`` is W_noise. It starts at zero, as in appendix A, so that
    the noise starts with a standard deviation of log 2.

    There are only two losses. ``importance`` is the squared coefficient of variation, over experts, of their sums of
    gate values (equations 6-7). ``load`` is the same for smooth estimates of their token counts (equations 8-11); it is
    zero if K = E.
    """

    common_losses = ()

    def __init__(self, d_model: int, num_experts: int, top_k: int | None = None, **options: Any):
        super().__init__(d_model, num_experts, top_k, **options)
        self.noise_weight = nn.Parameter(torch.zeros(num_experts, d_model))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "noise_weight" in self._parameters:
            nn.init.zeros_(self.noise_weight)

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        clean_TE = scores.logits_TE
        if not self.training:
            logit_TK, expert_TK = clean_TE.topk(self.top_k, dim=-1)
            return Choice(expert_TK, logit_TK.softmax(-1))
        std_TE = F.softplus(F.linear(scores.x_TD, self.noise_weight.to(clean_TE.dtype))).clamp(min=_MIN_STD)
        noise_TE = groups.normal(self.num_experts, "noisy top-k", clean_TE.device).to(clean_TE.dtype)
        noisy_TE = clean_TE + noise_TE * std_TE
        ranked_TK1, order_TK1 = noisy_TE.topk(min(self.top_k + 1, self.num_experts), dim=-1)
        expert_TK = order_TK1[:, : self.top_k]
        weight_TK = ranked_TK1[:, : self.top_k].softmax(-1)
        gates_TE = torch.zeros_like(clean_TE).scatter(1, expert_TK, weight_TK)
        if self.top_k < self.num_experts:
            chosen_TE = chance_of_choice(clean_TE, noisy_TE, std_TE, ranked_TK1)
        else:
            chosen_TE = torch.ones_like(clean_TE)
        valid_GS = groups.valid_or_none(clean_TE.device)
        losses = {
            "importance": importance_loss(groups.split(gates_TE), valid_GS),
            "load": load_loss(groups.split(chosen_TE), valid_GS),
        }
        return Choice(expert_TK, weight_TK, losses)


def chance_of_choice(clean_TE: Tensor, noisy_TE: Tensor, std_TE: Tensor, ranked_TK1: Tensor) -> Tensor:
    """Return P(x, i), [T, E]: the probability that expert i is among the K best if only its noise is drawn again.

    It is ``Phi((clean_i - K-th largest noisy logit of the others) / std_i)`` (arXiv 1701.06538 equations 8-9).

    Args:
        ranked_TK1: the K + 1 largest of ``noisy_TE``, in descending order.
    """
    last_T1 = ranked_TK1[:, -2:-1]
    next_T1 = ranked_TK1[:, -1:]
    threshold_TE = torch.where(noisy_TE >= last_T1, next_T1, last_T1)
    return 0.5 * (1 + torch.erf((clean_TE - threshold_TE) / (std_TE * math.sqrt(2))))
