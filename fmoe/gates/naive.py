"""The plain top-k gate."""

from torch import Tensor

from fmoe.gates.base import Choice, Scores, TopKRouter, check_groups, limit_to_groups
from fmoe.ops.cuda.routing import Rule
from fmoe.routing import RoutingGroups


class NaiveRouter(TopKRouter):
    """The K largest logits, weighted by a softmax over those K alone (FastMoE, arXiv 2103.13262; Shazeer et al.,
    arXiv 1701.06538 equations 3 and 5, without noise). Weights sum to one; no capacity unless it is given.

    Args:
        normalize: False weights by the softmax over all experts instead.
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
        expert_groups: int | None = None,
        kept_groups: int = 1,
        **options,
    ):
        super().__init__(d_model, num_experts, top_k, **options)
        if expert_groups is not None:
            check_groups(num_experts, self.top_k, expert_groups, kept_groups)
        self.normalize, self.expert_groups, self.kept_groups = normalize, expert_groups, kept_groups

    def rule(self) -> tuple[Rule, None] | None:
        if not self.decides_as(NaiveRouter):
            return None
        limit = {} if self.expert_groups is None else {"groups": self.expert_groups, "kept_groups": self.kept_groups}
        return Rule(by_logits=True, normalize=self.normalize, **limit), None

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        ranked_TE: Tensor = scores.logits_TE
        if self.expert_groups is not None:
            ranked_TE = limit_to_groups(ranked_TE, self.expert_groups, self.kept_groups)
        logit_TK, expert_TK = ranked_TE.topk(self.top_k, dim=-1)
        if self.normalize:
            return Choice(expert_TK, logit_TK.softmax(-1))
        return Choice(expert_TK, scores.probs_TE.gather(-1, expert_TK))
