"""The gate of BASE layers."""

import torch
from torch import Tensor

from fmoe.gates.assignment import balanced_assignment
from fmoe.gates.router import Choice, Scores, TopKRouter
from fmoe.routing import RoutingGroups


class BaseRouter(TopKRouter):
    """Gate that assigns tokens to experts evenly (BASE layers, arXiv 2103.16716).

    In training, the experts' numbers of tokens in a routing group (`fmoe.routing.RoutingGroups`) differ by at most one.
    Among such assignments, the sum of the logits is maximal. The paper approximates this linear assignment problem by
    an auction; here it is solved exactly. In evaluation, each token takes its K best experts. The weight is
    ``sigmoid(logit)``. There is no auxiliary loss.

    The paper assigns one expert per token. For K > 1 the assignment runs K times. Each round excludes the experts that
    a token already has, and balances the loads of all rounds so far.
    """

    routes_by_logits = True

    default_top_k = 1
    common_losses = ()

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        logits_TE = scores.logits_TE
        expert_TK = self.assign(logits_TE.detach(), groups) if self.training else logits_TE.topk(self.top_k).indices
        return Choice(expert_TK, logits_TE.gather(-1, expert_TK.clamp(min=0)).sigmoid())

    def assign(self, logits_TE: Tensor, groups: RoutingGroups) -> Tensor:
        """Return the experts of each token, int64 [T, K]; -1 for padding."""
        logits_GSE = groups.split(logits_TE)
        valid_GS = groups.valid(logits_TE.device)
        ids_E = torch.arange(self.num_experts, device=logits_TE.device, dtype=torch.int64)
        load_GE = torch.zeros_like(logits_GSE[:, 0], dtype=torch.int64)
        rounds = []
        for _ in range(self.top_k):
            rounds.append(balanced_assignment(logits_GSE, valid_GS, load_GE))
            got_GSE = rounds[-1].unsqueeze(-1) == ids_E
            load_GE = load_GE + got_GSE.sum(1)
            logits_GSE = logits_GSE.masked_fill(got_GSE, -torch.inf)
        return groups.join(torch.stack(rounds, -1))
