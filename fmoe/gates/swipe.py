"""The SWIPE gate of BaGuaLu (PPoPP 2022)."""

import torch
from torch import Tensor

from fmoe.gates.base_layers import AssigningRouter


class SwipeRouter(AssigningRouter):
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

    def weights(self, logits_TK: Tensor) -> Tensor:
        return logits_TK.softmax(-1)

    def assign_round(self, k: int, logits_GSE: Tensor, valid_GS: Tensor, load_GE: Tensor) -> Tensor:
        best_GS = logits_GSE.argmax(-1)
        ids_E = torch.arange(self.num_experts, device=best_GS.device, dtype=torch.int64)
        asked_GSE = (best_GS.unsqueeze(-1) == ids_E) & valid_GS.unsqueeze(-1)
        room_GE = -(-k * valid_GS.sum(1, keepdim=True) // self.num_experts) - load_GE
        kept_GSE = asked_GSE & (asked_GSE.cumsum(1) <= room_GE.unsqueeze(1))
        kept_GS = kept_GSE.any(-1)
        moved_GS = super().assign_round(k, logits_GSE, valid_GS & ~kept_GS, load_GE + kept_GSE.sum(1))
        return torch.where(kept_GS, best_GS, moved_GS)
