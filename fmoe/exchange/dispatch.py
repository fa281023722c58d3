"""The way of rows to the ranks of their experts and back, once the ranks know how many rows each of them sends.

If any rank needs gradients, the combine weights are sent with the rows, as a tensor [M]. The rank of an expert then
computes their gradients (`ExpertCall.rows`): a native or CUDA operation from the hidden units, others from the outputs
(`fmoe.kernels.rows.weigh_gradient`). The backward pass sends them back. So the token's rank need not save the outputs
that it combines (`combine_unsaved`).

Shape letters: see `fmoe.exchange.base`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fmoe.exchange.hops import AllToAll, Handle, Hop, join_graph, tie
from fmoe.exchange.shadow import Shadowed
from fmoe.experts.call import ExpertCall
from fmoe.kernels.padded import PaddedPlan
from fmoe.kernels.rows import DispatchPlan, combine_unsaved


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Sends rows to the ranks of their experts, calls the experts, and returns the combined outputs.

    Attributes:
        plan: order of this rank's rows.
        hops: the all-to-alls to the experts' ranks, one after the other: two in the hierarchical exchange, else one.
        counts: number of rows of each local expert.
        needs_grad: whether any rank needs gradients.
    """

    plan: DispatchPlan | PaddedPlan
    hops: list[Hop]
    counts: list[int]
    needs_grad: bool

    @property
    def num_rows(self) -> int:
        """M, the number of rows that this rank sends."""
        return sum(self.hops[0].send)

    def run(self, inputs: list[Tensor], weight_TK: Tensor, experts: ExpertCall) -> list[Tensor]:
        """Run the rest of a forward pass (`fmoe.exchange.base.GroupExchange.open`)."""
        plan = self.plan
        needs_grad = self.needs_grad
        # 1. Send each row, and its weight, to the rank of its expert.
        rows = [plan.permute(join_graph(x, needs_grad), self.num_rows) for x in inputs]
        if needs_grad:
            rows.append(plan.weights(join_graph(weight_TK, True), self.num_rows))
        for hop in self.hops:
            rows = [AllToAll.apply(r, hop, False) for r in rows]
        # 2. Compute the rows of this rank's experts.
        outputs = self.compute(rows, experts)
        # 3. Return the outputs, and sum those of each token.
        for hop in reversed(self.hops):
            outputs = [AllToAll.apply(y, hop, True) for y in outputs]
        if needs_grad:
            return [combine_unsaved(y, weight_TK, plan) for y in outputs]
        return [plan.combine(y, weight_TK) for y in outputs]

    def compute(self, rows: list[Tensor], experts: ExpertCall) -> list[Tensor]:
        """Return the outputs of this rank's experts for their rows, of which the last tensor may hold the weights."""
        if not self.needs_grad:
            return tie(experts.rows(rows, self.counts), rows, False)
        return tie(experts.rows(rows[:-1], self.counts, rows[-1]), rows, True)


@dataclass(frozen=True, eq=False)
class ChunkedDispatch:
    """Sends rows in chunks. While the experts compute a chunk, the next one is sent and the previous one is returned.

    Attributes:
        plan: order of this rank's rows: by chunk, with the rows of shadowed experts at the end.
        chunks: a dispatch for each chunk.
        shadowed: experts whose weights are sent to all ranks, so that their rows stay on this rank; None if there are
            none.
        is_bounded: process the chunks one after the other without overlap, and recompute them in the backward pass.
    """

    plan: DispatchPlan | PaddedPlan
    chunks: list[Dispatch]
    shadowed: Shadowed | None = None
    is_bounded: bool = False

    def run(self, inputs: list[Tensor], weight_TK: Tensor, experts: ExpertCall) -> list[Tensor]:
        """Run the rest of a forward pass (`fmoe.exchange.base.GroupExchange.open`)."""
        plan = self.plan
        needs_grad = self.chunks[0].needs_grad
        sizes = [chunk.num_rows for chunk in self.chunks]
        if self.shadowed:
            sizes.append(self.shadowed.num_rows)
        rows = [plan.permute(join_graph(x, needs_grad), sum(sizes)) for x in inputs]
        if needs_grad:
            rows.append(plan.weights(join_graph(weight_TK, True), sum(sizes)))
        parts = list(zip(*(r.split(sizes) for r in rows), strict=True))
        at_home = list(parts.pop()) if self.shadowed else []
        outputs: list[list[Tensor]] = []
        if self.is_bounded:
            for chunk, part in zip(self.chunks, parts, strict=True):
                outputs += checkpoint(self._overlapped, [chunk], [part], experts, use_reentrant=False)
        else:
            outputs = self._overlapped(self.chunks, parts, experts)
        if self.shadowed:
            weight_R = at_home.pop() if needs_grad else None
            outputs.append(self.shadowed.run(at_home, experts, weight_R))
        joined = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*outputs, strict=True)]
        if needs_grad:
            return [combine_unsaved(y, weight_TK, plan) for y in joined]
        return [plan.combine(y, weight_TK) for y in joined]

    @staticmethod
    def _overlapped(
        chunks: list[Dispatch], parts: Sequence[Sequence[Tensor]], experts: ExpertCall
    ) -> list[list[Tensor]]:
        """Return the outputs of the experts for each chunk. Only the first hop overlaps with the experts."""
        returning: list[list[Handle]] = []
        sending = [Handle(chunks[0].hops[0], r, False) for r in parts[0]]
        for index, chunk in enumerate(chunks):
            first, *others = chunk.hops
            rows = [handle.wait() for handle in sending]
            for hop in others:
                rows = [AllToAll.apply(r, hop, False) for r in rows]
            if index + 1 < len(chunks):
                sending = [Handle(chunks[index + 1].hops[0], r, False) for r in parts[index + 1]]
            outputs = chunk.compute(rows, experts)
            for hop in reversed(others):
                outputs = [AllToAll.apply(y, hop, True) for y in outputs]
            returning.append([Handle(first, y, True) for y in outputs])
        return [[handle.wait() for handle in handles] for handles in returning]
