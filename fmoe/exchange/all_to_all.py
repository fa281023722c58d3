"""Expert parallelism by all-to-all with uneven splits (FastMoE section 3.2, GShard section 3.2).

Rows can be exchanged in chunks for two reasons. Chunks overlap communication with computation (FasterMoE's smart
schedule, PPoPP'22 section 4.2). They also bound the number of rows that a rank holds (``max_rows``).

Shape letters: see `fmoe.exchange.base`; P peers of one hop, X kinds of rows that a peer sends
(`fmoe.exchange.hops`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe.errors import UserError
from fmoe.exchange.base import NO_GRAD, Forward, GroupExchange, grad_flag
from fmoe.exchange.checks import raise_on_all_ranks
from fmoe.exchange.collectives import all_gather, all_reduce, all_to_all
from fmoe.exchange.dispatch import ChunkedDispatch, Dispatch
from fmoe.exchange.hops import Counts, HopCounts
from fmoe.exchange.shadow import Cost, Shadowed, choose, measure
from fmoe.kernels.rows import DispatchPlan

_FLAGS = NO_GRAD + 1  # number of flags of ranks that did not fail


class _Agreed(NamedTuple):
    hops: list[HopCounts]
    shadowed: list[tuple[int, int]]  # (id, number of this rank's rows) of each shadowed expert
    needed: int  # number of chunks that ``max_rows`` requires
    needs_grad: bool  # on any rank


class AllToAllExchange(GroupExchange):
    """All-to-all without padding, optionally in chunks and with shadowed experts.

    Args:
        group, num_experts, wire_dtype: see `GroupExchange`.
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

    order_E: list[int] | None = None  # expert ids in the order in which a rank sends rows; None for ascending ids
    compared: tuple[str, ...] = ("chunks", "max_rows", "wire_dtype", "shadow", "cost")

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
        self.chunks = chunks
        self.max_rows = max_rows
        self.shadow = shadow
        self.cost = cost

    def prepare(self, facts: Mapping[str, Any], experts: nn.Module, device: torch.device) -> None:
        if not self.shadow:
            super().prepare(facts, experts, device)
            return
        try:
            parameters = self._first_expert(experts)
        except UserError as error:
            self.post_failure(error)  # other ranks may have experts that can be shadowed, and then wait for this one
            raise
        shapes = ", ".join(f"{list(p.shape)} {p.dtype}" for p in parameters)
        super().prepare({**facts, "expert shapes": shapes}, experts, device)
        if self.cost is None:
            self.cost = measure(self.group, parameters, facts["d_model"], device)

    def _first_expert(self, experts: nn.Module) -> list[Tensor]:
        """Return the parameters of this rank's first expert. Raise UserError if experts cannot be shadowed."""
        if not hasattr(experts, "shadow"):
            raise UserError(
                f"exchange_options.shadow={self.shadow} is not supported for {type(experts).__name__}: shadow "
                "needs FFNExperts, or modules of one class without buffers"
            )
        if getattr(experts, "_is_fsdp_managed_module", False):
            raise UserError(f"exchange_options.shadow={self.shadow} is not supported with fully_shard: use shadow=0")
        shadow: Any = experts.shadow
        return shadow(0)

    def open(self, plan: DispatchPlan, needs_grad: bool) -> Forward:
        agreed = self._agree(plan.count_E, needs_grad)
        num_chunks = max(self.chunks, agreed.needed)
        num_local = self.num_local_experts
        plan = plan.arranged(num_chunks, self.order_E, [expert for expert, _ in agreed.shadowed])
        chunks = []
        for chunk in range(num_chunks):
            counts = [hop.chunk(chunk, num_chunks) for hop in agreed.hops]
            hops = [count.hop(self.wire_dtype) for count in counts]
            # Column x of the counts is for local expert x % num_local.
            received = counts[-1].receive_PX
            rows = [sum(n for row in received for n in row[e::num_local]) for e in range(num_local)]
            chunks.append(Dispatch(plan, hops, rows, agreed.needs_grad))
        if num_chunks == 1 and not agreed.shadowed:
            return chunks[0].run
        shadowed = None
        if agreed.shadowed:
            shadowed = Shadowed(self.group, self.num_local_experts, agreed.shadowed, agreed.needs_grad)
        return ChunkedDispatch(plan, chunks, shadowed, is_bounded=agreed.needed > 1).run

    def abort(self, error: Exception, device: torch.device) -> None:
        """Send counts of zero rows and a failure flag to the other ranks, so that all ranks raise."""
        self._agree(torch.zeros(self.num_experts, dtype=torch.int64, device=device), False, error)

    def _agree(self, count_E: Tensor, needs_grad: bool, error: Exception | None = None) -> "_Agreed":
        """Exchange the counts of rows and the flags of all ranks. Raise on every rank if one has an ``error``."""
        shadowed: list[tuple[int, int]] = []
        if self.shadow and self.cost is not None:
            shadowed, count_E = self._choose_shadows(count_E, self.cost)
        # A failed rank has a flag larger than the others.
        flag = grad_flag(needs_grad) if error is None else _FLAGS * (self.ep_rank + 1)
        tensors = self._exchange_counts(count_E, flag)
        bound = [] if self.max_rows is None else [self._chunks_needed(tensors[1:], self.max_rows)]
        on_host = _to_host([*tensors, *bound])  # the only synchronization with the device
        needed = on_host.pop()[0][0] if bound else 1
        flags = [row[-1] for row in on_host[-1]]
        failed = sorted({flag // _FLAGS - 1 for flag in flags if flag >= _FLAGS})
        if failed:
            raise_on_all_ranks(self.group, failed, error, count_E.device)
        hops = self._hops(tensors, on_host)
        return _Agreed(hops, shadowed, needed, self.needs_grad_on_any(needs_grad, flags))

    def _choose_shadows(self, count_E: Tensor, cost: Cost) -> tuple[list[tuple[int, int]], Tensor]:
        """Return (id, number of this rank's rows) for each expert to shadow, and ``count_E`` with zeros for them."""
        gathered = all_gather(self.group, count_E, "exchange of loads").wait(for_host=True)
        loads_WE = gathered.view(self.ep_size, -1).tolist()
        chosen = choose(loads_WE, self.num_local_experts, self.shadow, cost)
        ids = torch.tensor(chosen, device=count_E.device, dtype=torch.int64)
        return [(expert, loads_WE[self.ep_rank][expert]) for expert in chosen], count_E.index_fill(0, ids, 0)

    def _chunks_needed(self, received: list[Tensor], max_rows: int) -> Tensor:
        num_rows = torch.stack([counts[:, :-1].sum() for counts in received]).max()
        # Each sender's rows of each expert are split as evenly as possible: a chunk has at most R / chunks + E rows.
        needed = -(-num_rows // (max_rows - self.num_experts))
        needed = torch.where(num_rows <= max_rows, 1, needed).view(1, 1)
        return all_reduce(self.group, needed, dist.ReduceOp.MAX, "agreement on chunks").wait(for_host=True)

    def _exchange_counts(self, count_E: Tensor, flag: int) -> list[Tensor]:
        """Send each rank the row counts of its experts and the flag.

        Returns:
            Tensors [P, X + 1] for P peers and X kinds of rows: the counts sent in the first hop, then those received in
            each hop. The last column of the last tensor holds flags, among them the largest of all ranks.
        """
        send = count_E.view(self.ep_size, self.num_local_experts)
        send = torch.cat([send, torch.full_like(send[:, :1], flag)], 1)
        return [send, all_to_all(self.group, send, what="exchange of counts").wait(for_host=True)]

    def _hops(self, tensors: list[Tensor], on_host: list[Counts]) -> list[HopCounts]:
        """Return each hop's counts, given the result of `_exchange_counts` on the device and on the host."""
        send, receive = (without_last(counts) for counts in on_host)
        return [hop_counts(self.group, send, receive, tensors[1][:, :-1])]


def without_last(counts: Counts) -> Counts:
    """Return counts without their last column, which holds flags."""
    return [row[:-1] for row in counts]


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
    values = torch.cat([t.reshape(-1) for t in tensors]).tolist()
    matrices = []
    for num_rows, num_columns in (t.shape for t in tensors):
        rows = [values[row * num_columns : (row + 1) * num_columns] for row in range(num_rows)]
        values = values[num_rows * num_columns :]
        matrices.append(rows)
    return matrices
