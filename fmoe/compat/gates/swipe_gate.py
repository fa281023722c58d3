"""FastMoE's SWIPE gate."""

import torch
from torch import Tensor

from fmoe.compat.gates.naive_gate import NaiveGate
from fmoe.compat.gates.utils import grant, keep_first, softmax
from fmoe.exchange.collectives import all_gather
from fmoe.functions import moe_group_of


class SwipeGate(NaiveGate):
    """Top-k whose load is the same on all workers: in training, choices that a worker has no room for move to workers
    that have, one round for the first choices, one for the second, and so on. Workers hold as many tokens each."""

    runs_collectives = True

    def forward(self, inp: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] -> index [T, K], score [T, K]: softmax over the logits of the experts that were got."""
        logits_TE = self.gate(inp)
        index_TK = logits_TE.topk(self.top_k, dim=-1).indices
        if self.training:
            capacity = torch.tensor(inp.shape[0] * self.top_k, dtype=torch.int64, device="cpu")
            columns = []
            for k in range(self.top_k):
                column_T, capacity = self.swipe_once(index_TK[:, k], capacity, k % self.num_expert)
                columns.append(column_T)
            index_TK = torch.stack(columns, 1)
        logit_TK = logits_TE.gather(1, index_TK.clamp(min=0))
        return index_TK, softmax(logit_TK).to(inp.dtype)

    @torch.no_grad()
    def swipe_once(self, idx: Tensor, capacity: Tensor, bias: int) -> tuple[Tensor, Tensor]:
        """One round.

        Args:
            idx: int64 [T], an expert for each token of this worker.
            capacity: how many choices this worker's experts may still take together.
            bias: which expert of a worker takes those that were moved there.

        Returns:
            idx with the moved ones, -1 for those that no worker has room for; the capacity that is left.
        """
        worker_T = torch.div(idx, self.num_expert, rounding_mode="floor")
        want_W = torch.bincount(worker_T, minlength=self.world_size)
        want_WW, capacity_W, rank = want_W[None].cpu(), capacity.reshape(1).cpu(), 0
        if self.world_size > 1:
            group = moe_group_of(self.world_size)
            mine = torch.cat([want_W, capacity.reshape(1).to(want_W)])
            gathered = all_gather(group, mine, "a gate's exchange of counts").wait(for_host=True)
            gathered = gathered.view(self.world_size, -1).cpu()
            want_WW, capacity_W, rank = gathered[:, :-1], gathered[:, -1], group.rank()
        # From worker (row) to worker (column). What is refused, lined up, meets the room that is left, lined up.
        taken_WW = grant(want_WW, capacity_W)
        refused_W, room_W = (want_WW - taken_WW).sum(1), capacity_W - taken_WW.sum(0)
        refused_end_W1, room_end_W = refused_W.cumsum(0).unsqueeze(1), room_W.cumsum(0)
        end_WW = torch.minimum(refused_end_W1, room_end_W)
        begin_WW = torch.maximum(refused_end_W1 - refused_W.unsqueeze(1), room_end_W - room_W)
        moved_WW = (end_WW - begin_WW).clamp(min=0)

        stays_T = keep_first(worker_T, taken_WW[rank].to(idx.device)) >= 0
        targets_M = (
            torch.arange(self.world_size, dtype=torch.int64, device="cpu")
            .repeat_interleave(moved_WW[rank])
            .to(idx.device)
        )
        new_idx = torch.where(stays_T, idx, -1)
        new_idx[(~stays_T).nonzero().squeeze(1)[: len(targets_M)]] = targets_M * self.num_expert + bias
        return new_idx, (room_W - moved_WW.sum(0))[rank].to(capacity.device)
