"""The gate of GRIN and Phi-3.5-MoE.

Shape letters: T tokens, E experts, K experts per token.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fmoe.errors import UserError
from fmoe.gates.router import Choice, Scores, TopKRouter
from fmoe.routing import RoutingGroups

_LEAST = 2.0**-25  # instead of a uniform number of 0, whose Gumbel noise would be infinite


class SparseMixerRouter(TopKRouter):
    """Gate that samples experts in training, and estimates the gradient of the choice.

    This is SparseMixer-v2 (GRIN, arXiv 2409.12136 section 2; SparseMixer, arXiv 2310.00811).

    A token chooses its K experts one after another, each among the experts not yet chosen. An expert competes if its
    logit is close to the largest: ``(largest - logit) / max(|logit|, largest) <= margin``. Its probability is the
    softmax over the logits of the competitors. The probability is also its weight, so the weights of a token do not sum
    to one. Training samples by Gumbel noise; evaluation takes the largest logit.

    In training, if the sampled expert is not the most probable one, its weight is divided by 3 with probability 3/4.
    The gradient of the weight is not divided. This is the paper's third-order (Heun) estimate of the gradient.

    Args:
        margin: maximum relative distance to the largest logit; twice ``router_jitter_noise`` of Phi-3.5-MoE.
    """

    routes_by_logits = True

    def __init__(
        self, d_model: int, num_experts: int, top_k: int | None = None, *, margin: float = 0.02, **options: Any
    ):
        super().__init__(d_model, num_experts, top_k, **options)
        if not (margin >= 0 and math.isfinite(margin)):
            raise UserError(f"margin={margin} must be 0 or more, and finite")
        self.margin = margin

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        logits_TE = scores.logits_TE
        left_TE = logits_TE  # -inf for the experts already chosen
        experts = []
        weights = []
        if self.training:
            width = self.num_experts + 1  # for each choice, a number per expert, and one for the quadrature
            noise_TN = groups.uniform(self.top_k * width, "sparsemixer", logits_TE.device).to(logits_TE.dtype)
            noise_KTX = noise_TN.unflatten(-1, (self.top_k, width)).unbind(1)
        for k in range(self.top_k):
            competing_TE = left_TE.masked_fill(self.is_far(logits_TE, left_TE), -torch.inf)
            prob_TE = competing_TE.softmax(-1)
            if self.training:
                gumbel_TE = -noise_KTX[k][:, :-1].clamp(min=_LEAST).log().neg().log()
                expert_T1 = (competing_TE.detach() + gumbel_TE).argmax(-1, keepdim=True)
                weight_T1 = prob_TE.gather(-1, expert_T1)
                # The factors 1/3 and 1 are the nodes of Heun's third-order quadrature. It approximates the change of
                # the loss between a zero output and the expert's output, which replaces the loss in the score-function
                # estimator.
                is_divided_T1 = (noise_KTX[k][:, -1:] <= 0.75) & (expert_T1 != prob_TE.argmax(-1, keepdim=True))
                weight_T1 = weight_T1 - torch.where(is_divided_T1, weight_T1.detach() * (2 / 3), 0)
            else:
                expert_T1 = left_TE.argmax(-1, keepdim=True)
                weight_T1 = prob_TE.gather(-1, expert_T1)
            left_TE = left_TE.scatter(-1, expert_T1, -torch.inf)
            experts.append(expert_T1)
            weights.append(weight_T1)
        return Choice(torch.cat(experts, -1), torch.cat(weights, -1))

    @torch.no_grad()
    def is_far(self, logits_TE: Tensor, left_TE: Tensor) -> Tensor:
        """Return bool [T, E], True for experts that do not compete for the next choice.

        Args:
            left_TE: the logits, with -inf for the experts already chosen.
        """
        largest_T1 = left_TE.amax(-1, keepdim=True)
        # If the largest logit is 0, its own distance is 0 / 0: not a number, and so not far.
        return (largest_T1 - left_TE) / torch.maximum(logits_TE.abs(), largest_T1) > self.margin
