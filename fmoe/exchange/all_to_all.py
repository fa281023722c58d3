"""Expert parallelism by all-to-all with uneven splits (FastMoE section 3.2, GShard section 3.2).

Rows can be exchanged in chunks for two reasons. Chunks overlap communication with computation (FasterMoE's smart
schedule, PPoPP'22 section 4.2). They also bound the number of rows that a rank holds (``max_rows``).

Shape letters: see `fmoe.exchange.base`; P peers of one hop, X kinds of rows that a peer sends
(`fmoe.exchange.hops`).
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fmoe.errors import UserError
from fmoe.exchange import base
from fmoe.exchange.collectives import all_gather, all_reduce, all_to_all
from fmoe.exchange.hops import Counts, Hop, HopCounts, chunk_of, join_graph, tie
from fmoe.exchange.shadow import Cost, Shadowed, choose, measure
from fmoe.experts.ffn import ExpertCall
from fmoe.kernels.padded import PaddedPlan
from fmoe.kernels.rows import DispatchPlan, combine_unsaved

_DEPTHS = base.NO_GRAD + 1  # number of depths of `base.GroupExchange.open`


class _Agreed(NamedTuple):
    tensors: list[Tensor]  # the first result of `_exchange_counts`
    on_host: list[Counts]  # the same as lists
    shadowed: list[tuple[int, int]]  # (id, number of this rank's rows) of each shadowed expert
    needed: int  # number of chunks that ``max_rows`` requires
    depth: int


class AllToAllExchange(base.GroupExchange):
    """All-to-all without padding, optionally in chunks and with shadowed experts.

    Args:
        group, num_experts, wire_dtype: see `base.GroupExchange`.
        chunks: number of chunks of rows. One chunk is sent while the experts compute another one. 1 for no overlap.
        max_rows: maximum number of rows that a rank receives at a time, at least ``2 * num_experts``; None for no
            maximum. If any rank would receive more, all ranks exchange the rows in more chunks, one after the other.
            The backward pass then recomputes the experts' activations: a hot expert costs time, not memory.
        shadow: maximum number of shadowed experts per forward pass; 0 for none. A shadowed expert's weights are sent to
            all ranks. Experts are shadowed if that is faster than sending their rows (`fmoe.exchange.shadow`).
        cost: the cost model of `fmoe.exchange.shadow.choose`; None to measure it before the first forward pass.

    Raises:
        UserError: an option is invalid.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        *,
        chunks: int = 1,
        max_rows: int | None = None,
        wire_dtype: torch.dtype | None = None,
        shadow: int = 0,
        cost: Cost | None = None,
    ):
        super().__init__(group, num_experts, wire_dtype=wire_dtype)
        if not isinstance(shadow, int) or not 0 <= shadow <= num_experts:
            raise UserError(f"exchange_options.shadow={shadow!r} is not a whole number from 0 to {num_experts=}")
        if not isinstance(chunks, int) or chunks < 1:
            raise UserError(f"exchange_options.chunks={chunks!r} is not a positive whole number")
        if max_rows is not None and (not isinstance(max_rows, int) or max_rows < 2 * num_experts):
            raise UserError(
                f"exchange_options.max_rows={max_rows!r} must be a whole number of at least {2 * num_experts}, twice "
                f"num_experts={num_experts}"
            )
        self.chunks, self.max_rows, self.shadow, self.cost = chunks, max_rows, shadow, cost

    def prepare(self, facts: Mapping[str, Any], experts: nn.Module, device: torch.device) -> None:
        if not self.shadow:
            return super().prepare(facts, experts, device)
        try:
            parameters = self._first_expert(experts)
        except UserError as error:
            self.post_failure(error)  # other ranks may have experts that can be shadowed, and then wait for this one
            raise
        shapes = ", ".join(f"{list(p.shape)} {p.dtype}" for p in parameters)
        super().prepare({**facts, "expert shapes": shapes}, experts, device)
        if self.cost is None:
            self.cost = measure(self.group, parameters, facts["d_model"], device)
        return None

    def _first_expert(self, experts: nn.Module) -> list[Tensor]:
        """Return the parameters of this rank's first expert. Raise UserError if experts cannot be shadowed."""
        if (shadow := getattr(experts, "shadow", None)) is None:
            raise UserError(
                f"exchange_options.shadow={self.shadow} is not supported for {type(experts).__name__}: shadow "
                "needs FFNExperts, or modules of one class without buffers"
            )
        if getattr(experts, "_is_fsdp_managed_module", False):
            raise UserError(f"exchange_options.shadow={self.shadow} is not supported with fully_shard: use shadow=0")
        return shadow(0)

    def describe(self) -> str:
        return (
            f"{type(self).__name__}(chunks={self.chunks}, max_rows={self.max_rows}, wire_dtype={self.wire_dtype}, "
            f"shadow={self.shadow}, cost={self.cost})"
        )

    def open(self, plan: DispatchPlan, depth: int) -> "Dispatch | ChunkedDispatch":
        agreed = self._agree(plan.count_E, None, depth)
        hops, counts_PX, order_E = self._hops(agreed.tensors, agreed.on_host)
        if max(self.chunks, agreed.needed) > 1 or agreed.shadowed:
            return self._chunked(plan, agreed, hops, counts_PX, order_E)
        plan = plan if order_E is None else plan.arranged(1, order_E)
        return Dispatch(plan, [hop.hop(self.wire_dtype) for hop in hops], self._per_expert(counts_PX), agreed.depth)

    def abort(self, error: Exception, device: torch.device) -> None:
        """Send counts of zero rows and a failure flag to the other ranks, so that all ranks raise."""
        self._agree(torch.zeros(self.num_experts, dtype=torch.int64, device=device), error, 0)

    def _agree(self, count_E: Tensor, error: Exception | None, depth: int) -> "_Agreed":
        """Exchange the counts of rows and the depths of all ranks. Raise on every rank if one has an ``error``."""
        shadowed, count_E = self._choose_shadows(count_E, self.cost) if self.shadow and self.cost else ([], count_E)
        # A failed rank has a flag larger than every depth.
        flag = depth if error is None else _DEPTHS * (self.ep_rank + 1)
        tensors, received = self._exchange_counts(count_E, flag)
        bound = [] if self.max_rows is None else [self._chunks_needed(received, self.max_rows)]
        on_host = _to_host([*tensors, *bound])  # the only synchronization with the device
        needed = on_host.pop()[0][0] if bound else 1
        flags = [row[-1] for row in on_host[-1]]
        if max(flags) >= _DEPTHS:
            self.raise_on_all_ranks(sorted({f // _DEPTHS - 1 for f in flags if f >= _DEPTHS}), error, count_E.device)
        return _Agreed(tensors, on_host, shadowed, needed, self.agreed_depth(depth, max(flags)))

    def _chunked(
        self,
        plan: DispatchPlan,
        agreed: _Agreed,
        hops: list[HopCounts],
        counts_PX: Counts,
        order_E: Iterable[int] | None,
    ) -> "ChunkedDispatch":
        num_chunks, depth, shadowed = max(self.chunks, agreed.needed), agreed.depth, agreed.shadowed
        plan, chunks = plan.arranged(num_chunks, order_E, [expert for expert, _ in shadowed]), []
        for chunk in range(num_chunks):
            counts_L = self._per_expert(chunk_of(counts_PX, chunk, num_chunks))
            parts = [hop.chunk(chunk, num_chunks).hop(self.wire_dtype) for hop in hops]
            chunks.append(Dispatch(plan, parts, counts_L, depth))
        at_home = Shadowed(self.group, self.num_local_experts, shadowed, depth > 0) if shadowed else None
        return ChunkedDispatch(plan, chunks, at_home, is_bounded=agreed.needed > 1)

    def _per_expert(self, counts_PX: Counts) -> list[int]:
        """Return the number of rows of each local expert."""
        num_local = self.num_local_experts
        # Column x of the counts is for local expert x % num_local.
        return [sum(n for row in counts_PX for n in row[e::num_local]) for e in range(num_local)]

    def _choose_shadows(self, count_E: Tensor, cost: Cost) -> tuple[list[tuple[int, int]], Tensor]:
        """Return (id, number of this rank's rows) for each expert to shadow, and ``count_E`` with zeros for them."""
        gathered = all_gather(self.group, count_E, "exchange of loads").wait(for_host=True)
        loads_WE = gathered.view(self.ep_size, -1).tolist()
        chosen = choose(loads_WE, self.num_local_experts, self.shadow, cost)
        ids = torch.tensor(chosen, device=count_E.device, dtype=torch.int64)
        return [(expert, loads_WE[self.ep_rank][expert]) for expert in chosen], count_E.index_fill(0, ids, 0)

    def _chunks_needed(self, received: list[Tensor], max_rows: int) -> Tensor:
        num_rows = torch.stack([counts.sum() for counts in received]).max()
        # Each sender's rows of each expert are split as evenly as possible: a chunk has at most R / chunks + E rows.
        needed = -(-num_rows // (max_rows - self.num_experts))
        needed = torch.where(num_rows <= max_rows, 1, needed).view(1, 1)
        return all_reduce(self.group, needed, dist.ReduceOp.MAX, "agreement on chunks").wait(for_host=True)

    def _exchange_counts(self, count_E: Tensor, flag: int) -> tuple[list[Tensor], list[Tensor]]:
        """Send each rank the row counts of its experts and the flag.

        The first result has the counts sent and received, with flags. The second has those received, without flags.
        """
        # The first result is tensors [P, X + 1] for P peers and X experts: the counts sent in the first hop, then those
        # received in each hop. The last column of the last tensor holds flags, among them the largest of all ranks.
        # The second result is the received counts of each hop, without the last column.
        send = count_E.view(self.ep_size, self.num_local_experts)
        send = torch.cat([send, torch.full_like(send[:, :1], flag)], 1)
        receive = all_to_all(self.group, send, what="exchange of counts").wait(for_host=True)
        return [send, receive], [receive[:, :-1]]

    def _hops(
        self, tensors: list[Tensor], on_host: list[Counts]
    ) -> tuple[list[HopCounts], Counts, Iterable[int] | None]:
        """Return each hop's counts, the counts received in the last hop, and the expert ids in the order of sending."""
        # None in place of expert ids stands for ascending ids.
        send, receive = ([row[:-1] for row in rows] for rows in on_host)
        return [hop_counts(self.group, send, receive, tensors[1][:, :-1])], receive, None


def hop_counts(group: dist.ProcessGroup, send_WL: Counts, receive_WL: Counts, received: Tensor) -> HopCounts:
    """Return the counts of an all-to-all that sends rows to the ranks of their experts.

    Each rank gets its rows sorted by local expert.

    Args:
        send_WL, receive_WL: numbers of rows to and from each rank, for each local expert of the receiving rank.
        received: ``receive_WL`` on the device.
    """
    key_WL = torch.arange(received.shape[1], device=received.device, dtype=torch.int64).expand_as(received)
    return HopCounts(group, send_WL, receive_WL, received, key_WL)


def _to_host(tensors: list[Tensor]) -> list[Counts]:
    """Return the matrices as nested lists on the host. One copy moves them all."""
    values = iter(torch.cat([t.reshape(-1) for t in tensors]).tolist())
    return [[[next(values) for _ in range(t.shape[1])] for _ in range(t.shape[0])] for t in tensors]


class RowDispatch:
    """Base class of `Dispatch` and `ChunkedDispatch`, which permute, exchange and combine rows.

    If any rank needs the gradients of its combine weights, the weights are sent too, as a tensor [M]. The backward
    pass sends their gradients back (`fmoe.kernels.rows.weigh_gradient`).

    Attributes:
        plan: order of this rank's rows.
        num_rows: M, the number of this rank's rows. For one chunk, it is the number of this rank's rows in the chunk.
        depth: how far the backward pass reaches (`base.GroupExchange.open`).
    """

    plan: DispatchPlan | PaddedPlan
    num_rows: int
    depth: int

    def run(self, inputs: list[Tensor], weight_TK: Tensor, experts: ExpertCall) -> list[Tensor]:
        """Permute and exchange rows, compute, and return the combined outputs (`base.Dispatch.run`)."""
        rows = [self.plan.permute(join_graph(x, self.depth >= base.TOKENS), self.num_rows) for x in inputs]
        if self.depth < base.WEIGHTS:
            return [self.plan.combine(y, weight_TK) for y in self.through(*rows, experts=experts)]
        rows.append(join_graph(self.plan.weights(weight_TK, self.num_rows), True))
        return [combine_unsaved(y, weight_TK, self.plan) for y in self.through(*rows, experts=experts)]

    def through(self, *rows: Tensor, experts: ExpertCall) -> list[Tensor]:
        """Return the outputs of the experts for ``rows``, which are in the order of ``self.plan``.

        Args:
            rows: tensors [M, ...]. If ``self.depth`` is `base.WEIGHTS`, the last one holds the combine weights.
        """
        raise NotImplementedError


class Dispatch(RowDispatch):
    """Sends rows to the ranks of their experts, calls the experts, and returns the outputs.

    Args:
        plan, depth: see `RowDispatch`. The chunks of a `ChunkedDispatch` share one plan.
        hops: the all-to-alls to the experts' ranks, one after the other: two in the hierarchical exchange, else one.
        counts: number of rows of each local expert.
    """

    def __init__(self, plan: DispatchPlan | PaddedPlan, hops: list[Hop], counts: list[int], depth: int):
        self.plan, self.num_rows, self.depth = plan, sum(hops[0].send), depth
        self.hops, self.counts = hops, counts

    def through(self, *rows: Tensor, experts: ExpertCall) -> list[Tensor]:
        arrived = list(rows)
        for hop in self.hops:
            arrived = [hop.forward(r) for r in arrived]
        outputs = self.compute(arrived, experts)
        for hop in reversed(self.hops):
            outputs = [hop.back(y) for y in outputs]
        return outputs

    def compute(self, rows: list[Tensor], experts: ExpertCall) -> list[Tensor]:
        """Return the outputs of this rank's experts for their rows."""
        is_weighed = self.depth == base.WEIGHTS
        out = experts.weighed(rows[:-1], self.counts, rows[-1]) if is_weighed else experts(rows, self.counts)
        return [tie(join_graph(y, self.depth > 0), rows) for y in out]


class ChunkedDispatch(RowDispatch):
    """Sends rows in chunks. While the experts compute a chunk, the next one is sent and the previous one is returned.

    Args:
        plan: order of this rank's rows: by chunk, with the rows of shadowed experts at the end.
        chunks: a dispatch for each chunk.
        shadowed: experts whose weights are sent to all ranks, so that their rows stay on this rank; None if there are
            none.
        is_bounded: process the chunks one after the other without overlap, and recompute them in the backward pass.
    """

    def __init__(
        self,
        plan: DispatchPlan | PaddedPlan,
        chunks: list[Dispatch],
        shadowed: Shadowed | None = None,
        is_bounded: bool = False,
    ):
        self.sizes = [chunk.num_rows for chunk in chunks] + ([shadowed.num_rows] if shadowed else [])
        self.plan, self.num_rows, self.depth = plan, sum(self.sizes), chunks[0].depth
        self.chunks, self.shadowed, self.is_bounded = chunks, shadowed, is_bounded

    def through(self, *rows: Tensor, experts: ExpertCall) -> list[Tensor]:
        parts = list(zip(*(r.split(self.sizes) for r in rows), strict=True))
        at_home = list(parts.pop()) if self.shadowed else []
        if len(parts) == 1:
            outputs = [self.chunks[0].through(*parts[0], experts=experts)]
        elif self.is_bounded:
            outputs = [
                checkpoint(chunk.through, *part, experts=experts, use_reentrant=False)
                for chunk, part in zip(self.chunks, parts, strict=True)
            ]
        else:
            outputs = self._overlapped(parts, experts)
        if self.shadowed:
            weight_R = at_home.pop() if self.depth == base.WEIGHTS else None
            outputs.append(self.shadowed.run(at_home, experts, weight_R))
        return [torch.cat(p) if len(p) > 1 else p[0] for p in zip(*outputs, strict=True)]

    def _overlapped(self, parts: list[tuple[Tensor, ...]], experts: ExpertCall) -> list[list[Tensor]]:
        chunks, returning = self.chunks, []
        sending = [chunks[0].hops[0].start(r) for r in parts[0]]
        for index, chunk in enumerate(chunks):
            first, *rest = chunk.hops
            rows = [handle.wait() for handle in sending]
            for hop in rest:
                rows = [hop.forward(r) for r in rows]
            if index + 1 < len(chunks):
                sending = [chunks[index + 1].hops[0].start(r) for r in parts[index + 1]]
            outputs = chunk.compute(rows, experts)
            for hop in reversed(rest):
                outputs = [hop.back(y) for y in outputs]
            returning.append([first.start(y, back=True) for y in outputs])
        return [[handle.wait() for handle in handles] for handles in returning]
