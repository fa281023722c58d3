"""FastMoE's gates: ``gate(d_model, num_expert, world_size, top_k)``, which return ``(index, score)`` and keep a loss.

They behave as its release 1.1 documents them, but for what was broken there (docs/migration.md). For new work take the
routers of `fmoe.gates`.

Shape letters: T tokens, K choices, E experts of all workers.
"""

import torch
from torch import Tensor, nn


class BaseGate(nn.Module):
    """What FastMoE's gates share: numbers of experts, and a loss that is kept until it is asked for."""

    def __init__(self, num_expert: int, world_size: int):
        super().__init__()
        self.world_size, self.num_expert = world_size, num_expert
        self.tot_expert = world_size * num_expert
        self.loss: Tensor | None = None

    def forward(self, x: Tensor):
        raise NotImplementedError("a gate implements forward(x) -> (index, score)")

    def set_loss(self, loss: Tensor) -> None:
        """Keeps the loss of this forward pass."""
        self.loss = loss

    def get_loss(self, clear: bool = True) -> Tensor | None:
        """The loss that was kept, to be added to the training loss; None if there is none."""
        loss = self.loss
        if clear:
            self.loss = None
        return loss

    @property
    def has_loss(self) -> bool:
        """Whether a loss is kept."""
        return self.loss is not None


class NaiveGate(BaseGate):
    """Top-k of a linear map, weighted by a softmax over the k."""

    def __init__(self, d_model: int, num_expert: int, world_size: int, top_k: int = 2, gate_bias: bool = True):
        super().__init__(num_expert, world_size)
        self.gate = nn.Linear(d_model, self.tot_expert, bias=gate_bias)
        self.top_k = top_k

    def forward(self, inp: Tensor, return_all_scores: bool = False):
        """[T, D] -> index [T, K], score [T, K] (and all logits [T, E])."""
        logits_TE = self.gate(inp)
        logit_TK, index_TK = torch.topk(logits_TE, k=self.top_k, dim=-1, largest=True, sorted=False)
        score_TK = logit_TK.view(-1, self.top_k).softmax(-1)
        return (index_TK, score_TK, logits_TE) if return_all_scores else (index_TK, score_TK)
