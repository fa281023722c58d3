"""The plain top-k gate."""

from dataclasses import replace

from torch import Tensor

from fmoe.gates.base import Choice, Scores, TopKRouter, check_groups, check_score, limit_to_groups, shares
from fmoe.kernels.cuda.routing import Rule
from fmoe.routing import RoutingGroups


class NaiveRouter(TopKRouter):
    """The K largest logits, weighted by a softmax over those K alone (FastMoE, arXiv 2103.13262; Shazeer et al.,
    arXiv 1701.06538 equations 3 and 5, without noise). Weights sum to one; no capacity unless it is given.

    Args:
        normalize: False weights by the softmax over all experts instead (DeepSeekMoE, arXiv 2401.06066 equation 4).
        score: "sigmoid" weights by the sigmoids of the logits, over the sum of the K or, not normalised, as they are.
        routed_scale: factor of the weights (16 in DeepSeek-V2).
        expert_groups, kept_groups: choose only within each token's best ``kept_groups`` of so many groups of experts
            (`limit_to_groups`); None for no such limit.
    """

    decides_by_logits = True

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
        **options,
    ):
        super().__init__(d_model, num_experts, top_k, **options)
        check_score(score, routed_scale)
        if expert_groups is not None:
            check_groups(num_experts, self.top_k, expert_groups, kept_groups)
        self.score, self.routed_scale = score, routed_scale
        self.normalize, self.expert_groups, self.kept_groups = normalize, expert_groups, kept_groups

    def rule(self) -> tuple[Rule, None] | None:
        if not self.decides_as(NaiveRouter):
            return None
        limit = {} if self.expert_groups is None else {"groups": self.expert_groups, "kept_groups": self.kept_groups}
        kind = {"is_sigmoid": self.score == "sigmoid", "normalize": self.normalize, "scale": self.routed_scale}
        return Rule(by_logits=True, **kind, **limit), None

    def scores(self, x_TD: Tensor, groups: RoutingGroups) -> Scores:
        scores = super().scores(x_TD, groups)
        if self.score == "softmax":
            return scores
        return replace(scores, probs_TE=self.probs(scores.logits_TE.sigmoid()))

    def probs(self, score_TE: Tensor) -> Tensor:
        return score_TE if self.score == "softmax" else shares(score_TE)

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        ranked_TE: Tensor = scores.logits_TE
        if self.expert_groups is not None:
            ranked_TE = limit_to_groups(ranked_TE, self.expert_groups, self.kept_groups)
        logit_TK, expert_TK = ranked_TE.topk(self.top_k, dim=-1)
        if self.score == "sigmoid":
            weight_TK = logit_TK.sigmoid()
            weight_TK = shares(weight_TK) if self.normalize else weight_TK
        else:
            weight_TK = logit_TK.softmax(-1) if self.normalize else scores.probs_TE.gather(-1, expert_TK)
        return Choice(expert_TK, weight_TK * self.routed_scale)
