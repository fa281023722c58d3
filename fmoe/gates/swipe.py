"""The SWIPE gate of BaGuaLu (PPoPP 2022)."""

import torch
from torch import Tensor

from fmoe.gates.assignment import balanced_assignment
from fmoe.gates.router import Choice, Scores, TopKRouter
from fmoe.routing import RoutingGroups


class SwipeRouter(TopKRouter):
    """Top-k routing that moves tokens from full experts to others (SWIPE of BaGuaLu, PPoPP 2022; FastMoE's SwipeGate).

    In training, each expert is limited to an even share of the routing group (`fmoe.routing.RoutingGroups`). First
    choices are assigned first: an expert keeps up to ``ceil(tokens / E)`` of them in token order, and the others are
    moved. Second choices follow, up to ``ceil(2 tokens / E)`` including the first ones, and so on. Evaluation moves no
    tokens. Weights are a softmax over the logits of the final experts.

    The moved tokens make loads as even as possible, with the maximal sum of their logits. A token's experts always
    differ, whereas FastMoE may move a token to an expert that it already has.
    """

    routes_by_logits = True

    common_losses = ("z",)

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        logits_TE = scores.logits_TE
        expert_TK = self.assign(logits_TE.detach(), groups) if self.training else logits_TE.topk(self.top_k).indices
        return Choice(expert_TK, logits_TE.gather(-1, expert_TK.clamp(min=0)).softmax(-1))

    def assign(self, logits_TE: Tensor, groups: RoutingGroups) -> Tensor:
        """Return the experts of each token, int64 [T, K]; -1 for padding."""
        logits_GSE = groups.split(logits_TE)
        valid_GS = groups.valid(logits_TE.device)
        tokens_G1 = valid_GS.sum(1, keepdim=True)
        load_GE = torch.zeros_like(logits_GSE[:, 0], dtype=torch.int64)
        ids_E = torch.arange(self.num_experts, device=logits_TE.device, dtype=torch.int64)
        rounds = []
        for k in range(1, self.top_k + 1):
            best_GS = logits_GSE.argmax(-1)
            asked_GSE = (best_GS.unsqueeze(-1) == ids_E) & valid_GS.unsqueeze(-1)
            room_GE = -(-k * tokens_G1 // self.num_experts) - load_GE
            kept_GSE = asked_GSE & (asked_GSE.cumsum(1) <= room_GE.unsqueeze(1))
            kept_GS = kept_GSE.any(-1)
            moved_GS = balanced_assignment(logits_GSE, valid_GS & ~kept_GS, load_GE + kept_GSE.sum(1))
            rounds.append(torch.where(kept_GS, best_GS, moved_GS))
            got_GSE = rounds[-1].unsqueeze(-1) == ids_E
            load_GE = load_GE + got_GSE.sum(1)
            logits_GSE = logits_GSE.masked_fill(got_GSE, -torch.inf)
        return groups.join(torch.stack(rounds, -1))
