"""The plain top-k gate."""

from torch import Tensor

from fmoe.gates.base import TopKGate
from fmoe.routing import RoutingGroups


class NaiveGate(TopKGate):
    """The K largest logits, weighted by a softmax over those K alone (FastMoE, arXiv 2103.13262 section 3.1; Shazeer
    et al., arXiv 1701.06538 equations 3 and 5, without noise). Weights sum to one; no capacity unless it is given.
    """

    def choose(self, logits_TE: Tensor, probs_TE: Tensor, groups: RoutingGroups) -> tuple[Tensor, Tensor]:
        logit_TK, expert_TK = logits_TE.topk(self.top_k, dim=-1)
        return expert_TK, logit_TK.softmax(-1)
