"""The plain top-k gate, and group-limited routing.

Shape letters: T tokens, E experts, K experts per token, G groups of experts.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fmoe.errors import UserError
from fmoe.gates.router import Choice, Scores, TopKRouter, normalize_scores
from fmoe.routing import RoutingGroups


class NaiveRouter(TopKRouter):
    """Top-k gate that chooses the K largest logits, and weights them by a softmax over these K.

    This is the gate of FastMoE (arXiv 2103.13262), and that of Shazeer et al. without noise (arXiv 1701.06538 equations
    3 and 5). By default, weights sum to one and capacity is unlimited.

    Args:
        normalize: False takes the softmax over all experts instead (DeepSeekMoE, arXiv 2401.06066 equation 4).
        score: "softmax"; or "sigmoid", which weights by the sigmoids of the logits. The sigmoids are divided by their
            sum over the K experts, unless ``normalize=False``.
        routed_scale: factor of the weights (16 in DeepSeek-V2).
        expert_groups: number of groups of experts. A token chooses only within its best ``kept_groups`` groups
            (`limit_to_groups`). None for no groups.
        kept_groups: number of groups within which a token chooses.
    """

    routes_by_logits = True

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        normalize: bool = True,
        score: str = "softmax",
        routed_scale: float = 1.0,
        expert_groups: int | None = None,
        kept_groups: int = 1,
        **options: Any,
    ):
        super().__init__(d_model, num_experts, top_k, **options)
        check_score(score, routed_scale)
        check_groups(num_experts, self.top_k, expert_groups, kept_groups)
        self.score = score
        self.routed_scale = routed_scale
        self.normalize = normalize
        self.expert_groups = expert_groups
        self.kept_groups = kept_groups

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        ranked_TE = scores.logits_TE
        if self.expert_groups is not None:
            ranked_TE = limit_to_groups(ranked_TE, self.expert_groups, self.kept_groups)
        logit_TK, expert_TK = ranked_TE.topk(self.top_k, dim=-1)
        if self.score == "sigmoid":
            weight_TK = logit_TK.sigmoid()
            weight_TK = normalize_scores(weight_TK) if self.normalize else weight_TK
        elif self.normalize:
            weight_TK = logit_TK.softmax(-1)
        else:
            weight_TK = scores.probs_TE.gather(-1, expert_TK)
        return Choice(expert_TK, weight_TK * self.routed_scale)


def limit_to_groups(scores_TE: Tensor, num_groups: int, num_kept: int, *, best_of: int = 1) -> Tensor:
    """Return the scores, with -inf for experts outside each token's ``num_kept`` best groups.

    The experts form ``num_groups`` groups of equal size. A group's score is the sum of the scores of its ``best_of``
    best experts: one in DeepSeek-V2 (arXiv 2405.04434 section 2.2.2), two in DeepSeek-V3 (arXiv 2412.19437 section
    2.1.2).
    """
    grouped_TGE = scores_TE.unflatten(-1, (num_groups, -1))
    group_TG = grouped_TGE.topk(min(best_of, grouped_TGE.shape[-1]), dim=-1).values.sum(-1)
    kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
    kept_TG = kept_TG.scatter(-1, group_TG.topk(num_kept, dim=-1).indices, True)
    return grouped_TGE.masked_fill(~kept_TG.unsqueeze(-1), -torch.inf).flatten(-2)


def check_groups(num_experts: int, top_k: int, num_groups: int | None, num_kept: int) -> None:
    """Check the settings of group-limited routing.

    Raises:
        UserError: ``num_groups`` does not divide ``num_experts``; ``num_kept`` is not in 1..num_groups;
            ``num_kept`` is not 1 although ``num_groups`` is None; ``num_kept`` groups have fewer than ``top_k``
            experts.
    """
    if num_groups is None:
        if num_kept != 1:
            raise UserError(f"kept_groups={num_kept} needs expert_groups")
        return
    if num_groups < 1 or num_experts % num_groups:
        raise UserError(f"expert_groups={num_groups} does not divide num_experts={num_experts}")
    if not 1 <= num_kept <= num_groups:
        raise UserError(f"kept_groups={num_kept} is not between 1 and expert_groups={num_groups}")
    kept_experts = num_kept * (num_experts // num_groups)
    if kept_experts < top_k:
        raise UserError(f"kept_groups={num_kept} keeps {kept_experts} experts per token, fewer than top_k={top_k}")


def check_score(score: str, routed_scale: float) -> None:
    """Check the score function and the scale of the weights.

    Raises:
        UserError: ``score`` is unknown, or ``routed_scale`` is not positive and finite.
    """
    if score not in ("softmax", "sigmoid"):
        raise UserError(f"score={score!r} is neither softmax nor sigmoid")
    if not (routed_scale > 0 and math.isfinite(routed_scale)):
        raise UserError(f"routed_scale={routed_scale} is not positive and finite")
