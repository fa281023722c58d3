"""The gate of BASE layers, and the base class of gates that assign tokens evenly."""

import torch
from torch import Tensor

from fmoe.gates.assignment import balanced_assignment
from fmoe.gates.router import Choice, Scores, TopKRouter
from fmoe.routing import RoutingGroups


class AssigningRouter(TopKRouter):
    """Base class of gates that balance the loads of experts in training, in a round per choice.

    In evaluation, each token takes its K best experts.
    """

    def weights(self, logits_TK: Tensor) -> Tensor:
        """Return the combine weights of a token, given the logits of its experts."""
        raise NotImplementedError

    def assign_round(self, k: int, logits_GSE: Tensor, valid_GS: Tensor, load_GE: Tensor) -> Tensor:
        """Return the expert that each token takes as its choice number ``k``, int64 [G, S]; -1 for padding.

        Args:
            k: from 1 on.
            logits_GSE: logits, -inf for the experts that a token has.
            load_GE: assignments in earlier rounds.
        """
        return balanced_assignment(logits_GSE, valid_GS, load_GE)

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        logits_TE = scores.logits_TE
        expert_TK = self.assign(logits_TE.detach(), groups) if self.training else logits_TE.topk(self.top_k).indices
        return Choice(expert_TK, self.weights(logits_TE.gather(-1, expert_TK.clamp(min=0))))

    def assign(self, logits_TE: Tensor, groups: RoutingGroups) -> Tensor:
        """Return the experts of each token, int64 [T, K]; -1 for padding."""
        logits_GSE = groups.split(logits_TE)
        valid_GS = groups.valid(logits_TE.device)
        ids_E = torch.arange(self.num_experts, device=logits_TE.device, dtype=torch.int64)
        load_GE = torch.zeros_like(logits_GSE[:, 0], dtype=torch.int64)
        rounds = []
        for k in range(1, self.top_k + 1):
            rounds.append(self.assign_round(k, logits_GSE, valid_GS, load_GE))
            got_GSE = rounds[-1].unsqueeze(-1) == ids_E
            load_GE = load_GE + got_GSE.sum(1)
            logits_GSE = logits_GSE.masked_fill(got_GSE, -torch.inf)
        return groups.join(torch.stack(rounds, -1))


class BaseRouter(AssigningRouter):
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

    def weights(self, logits_TK: Tensor) -> Tensor:
        return logits_TK.sigmoid()
