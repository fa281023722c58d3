"""Expert parallelism by all-to-all with uneven splits: every row goes to its expert's worker and back, none is padded.

FastMoE section 3.2, GShard section 3.2. Rows can travel and be computed in chunks, so that the exchange of one chunk
goes on while experts compute another (FasterMoE's smart schedule, PPoPP'22 section 4.2), or so that no worker ever
holds more than ``max_rows`` of them.

Shape letters: see `fmoe.dispatch.exchange`; C chunks, P workers of one stage, X kinds of rows that one of them sends.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fmoe.dispatch.exchange import Experts, GroupExchange, Transfer
from fmoe.dispatch.routes import Route, Stage, in_step, reached
from fmoe.dispatch.shadow import Cost, Shadowed, choose, measure
from fmoe.dispatch.watch import all_gather, all_reduce, all_to_all
from fmoe.errors import UserError
from fmoe.kernels import backends
from fmoe.kernels.cuda import calls
from fmoe.kernels.rows import DispatchPlan, chunk_counts
from fmoe.routing import Routing

_DEPTHS = 3  # of `fmoe.dispatch.Exchange.open`


@dataclass(frozen=True, eq=False)
class Leg:
    """How many rows of each kind one stage of the journey moves.

    Attributes:
        send_PX, receive_PX: on the host.
        receive: ``receive_PX`` on the device.
        key_PX: rows are wanted in the order of these numbers, and otherwise as they arrive.
    """

    group: dist.ProcessGroup
    send_PX: list[list[int]]
    receive_PX: list[list[int]]
    receive: Tensor
    key_PX: Tensor

    def stage(self, chunk: int, num_chunks: int, wire_dtype: torch.dtype | None) -> Stage:
        """The all-to-all of one chunk."""
        if num_chunks == 1:
            send, received, receive = self.send_PX, self.receive_PX, self.receive
        else:
            send, received = (_part(counts, chunk, num_chunks) for counts in (self.send_PX, self.receive_PX))
            ends = [-(-self.receive * c // num_chunks) for c in (chunk, chunk + 1)]
            receive = ends[1] - ends[0]
        sizes = [sum(row) for row in received]
        order, inverse = self._order(receive.reshape(-1), sum(sizes))
        return Stage(self.group, [sum(row) for row in send], sizes, order, inverse, wire_dtype)

    def _order(self, receive_S: Tensor, num_rows: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Of rows, from the order of their S = P * X segments: one that moves takes all its rows along."""
        if self.key_PX.shape[1] == 1:  # one segment of each worker, and keys rise with workers
            return None, None
        order_S = self.key_PX.reshape(-1).argsort(stable=True)
        if backends.cuda_takes_segments(receive_S):
            return calls.segment_order(receive_S.contiguous(), order_S, num_rows)
        inverse_S = order_S.argsort()
        wanted_S = receive_S[order_S]
        shift_S = (receive_S.cumsum(0) - receive_S)[order_S] - (wanted_S.cumsum(0) - wanted_S)
        row_R = torch.arange(num_rows, device=receive_S.device, dtype=torch.int64)
        order_R = row_R + shift_S.repeat_interleave(wanted_S, output_size=num_rows)
        return order_R, row_R - shift_S[inverse_S].repeat_interleave(receive_S, output_size=num_rows)


def _part(counts: list[list[int]], chunk: int, num_chunks: int) -> list[list[int]]:
    return [[chunk_counts(n, num_chunks)[chunk] for n in row] for row in counts]


class AllToAllExchange(GroupExchange):
    """See the module.

    Args:
        group, num_experts, wire_dtype: see `GroupExchange`.
        chunks: C; 1 exchanges everything, computes, exchanges everything.
        max_rows: R is kept to this by more chunks where the gate would send more to any worker, and the experts'
            activations are computed again in the backward pass then: a hot expert costs time, not memory. At least
            2 * E; None for no bound.
        shadow: the most experts in a forward pass that are sent to all workers instead of their rows to them, where
            that is faster (`fmoe.dispatch.shadow`); 0 for none.
        cost: what `fmoe.dispatch.shadow.choose` reckons with; None to measure it in the first forward pass.
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
            raise UserError(f"exchange_options: shadow={shadow!r} is not between 0 and num_experts={num_experts}")
        if not isinstance(chunks, int) or chunks < 1:
            raise UserError(f"exchange_options: chunks={chunks!r} is not a positive whole number")
        if max_rows is not None and (not isinstance(max_rows, int) or max_rows < 2 * num_experts):
            raise UserError(f"exchange_options: max_rows={max_rows!r} is below 2 * num_experts={2 * num_experts}")
        self.chunks, self.max_rows, self.shadow, self.cost = chunks, max_rows, shadow, cost

    def prepare(self, fields: Mapping[str, object], experts: nn.Module, row_width: int, device: torch.device) -> None:
        if self.shadow and not hasattr(experts, "lend"):
            raise UserError(
                f"exchange_options: shadow={self.shadow} needs experts that can be lent (FFNExperts, or modules of one "
                f"kind without buffers), not {type(experts).__name__}"
            )
        if self.shadow and getattr(experts, "_is_fsdp_managed_module", False):
            raise UserError(f"exchange_options: shadow={self.shadow} cannot lend experts that fully_shard cut")
        if self.shadow:
            try:
                lent = experts.lend(0)
            except UserError as error:
                self.fail(error)  # others may have experts that can be lent, and wait
                raise
            fields = {**fields, "experts to lend": ", ".join(f"{list(p.shape)} {p.dtype}" for p in lent)}
        super().prepare(fields, experts, row_width, device)
        if self.shadow and self.cost is None:
            self.cost = measure(self.group, lent, row_width, device)

    def open(self, routing: Routing, depth: int = 0) -> Transfer:
        plan = DispatchPlan.from_routing(routing, self.num_experts)
        return self._agree(plan, plan.count_E, None, depth)

    def abort(self, error: Exception, device: torch.device) -> None:
        self._agree(None, torch.zeros(self.num_experts, dtype=torch.int64, device=device), error, 0)

    def _agree(self, plan: DispatchPlan | None, count_E: Tensor, error: Exception | None, depth: int) -> Transfer:
        """Exchanges the counts, and beside them who failed (lest the others wait for rows for ever) and the depth."""
        shadows, shadow_counts = [], []
        if self.shadow:
            everyones = all_gather(self.group, count_E, "exchange of loads").wait(for_host=True)
            loads_WE = everyones.view(self.num_workers, -1).tolist()
            shadows = choose(loads_WE, self.num_local_experts, self.shadow, self.cost)
            shadow_counts = [loads_WE[self.worker][e] for e in shadows]
            if shadows:
                count_E = count_E.index_fill(0, torch.tensor(shadows, device=count_E.device, dtype=torch.int64), 0)
        # One number for both, of which the largest counts: a failure is more than any depth.
        note = depth if error is None else _DEPTHS * (self.worker + 1)
        tensors, received = self._exchange_counts(count_E, note)
        if self.max_rows is not None:
            num_rows = torch.stack([counts.sum() for counts in received]).max()
            # An expert's rows of one sender are split as evenly as can be: at most one a chunk more than R / C.
            needed = -(-num_rows // (self.max_rows - self.num_experts))
            needed = torch.where(num_rows <= self.max_rows, 1, needed).view(1)
            tensors.append(all_reduce(self.group, needed, dist.ReduceOp.MAX, "agreement on chunks").wait(for_host=True))
        values = iter(torch.cat([t.reshape(-1) for t in tensors]).tolist())  # the one look of the host
        on_host = [[next(values) for _ in range(t.numel())] for t in tensors]
        needed = on_host.pop()[0] if self.max_rows is not None else 1
        notes = self._notes(on_host)
        failed = sorted({note // _DEPTHS - 1 for note in notes if note >= _DEPTHS})
        if failed:
            self.raise_together(failed, error, count_E.device)
        legs, counts_X, order_E = self._legs(tensors, on_host)
        num_chunks = max(self.chunks, needed)
        depth = max(notes)
        shadowed = Shadowed(self.group, self.num_local_experts, shadows, shadow_counts, depth > 0)
        return AllToAllTransfer(self, plan, legs, counts_X, order_E, num_chunks, needed > 1, shadowed, depth)

    def _exchange_counts(self, count_E: Tensor, note: int) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors that the host is to see, and the counts of the rows that this worker gets in each stage."""
        send = count_E.view(self.num_workers, self.num_local_experts)
        send = torch.cat([send, torch.full_like(send[:, :1], note)], 1)
        receive = all_to_all(self.group, send, what="exchange of counts").wait(for_host=True)
        return [send, receive], [receive[:, :-1]]

    def _notes(self, on_host: list[list[int]]) -> list[int]:
        """What workers told beside their counts, the largest at least."""
        return [row[-1] for row in _rows(on_host[-1], self.num_workers)]

    def _legs(self, tensors: list[Tensor], on_host: list[list[int]]) -> tuple[list[Leg], list[list[int]], None]:
        """The stages, the last one's counts [P][X] whose kind x is of local expert ``x % L``, and the order of experts
        in which rows are to leave (None: by id)."""
        send, receive = ([row[:-1] for row in _rows(values, self.num_workers)] for values in on_host)
        receive_WL = tensors[1][:, :-1]
        key_WL = torch.arange(self.num_local_experts, device=receive_WL.device, dtype=torch.int64).expand_as(receive_WL)
        return [Leg(self.group, send, receive, receive_WL, key_WL)], receive, None

    def describe(self) -> str:
        return (
            f"{type(self).__name__}(chunks={self.chunks}, max_rows={self.max_rows}, wire_dtype={self.wire_dtype}, "
            f"shadow={self.shadow}, cost={self.cost})"
        )


def _rows(values: list[int], count: int) -> list[list[int]]:
    width = len(values) // count
    return [values[i * width : (i + 1) * width] for i in range(count)]


class AllToAllTransfer:
    """Rows in chunks: while the experts compute one, the next one travels there and the one before travels back."""

    def __init__(
        self,
        exchange: GroupExchange,
        plan: DispatchPlan,
        legs: list[Leg],
        received_PX: list[list[int]],
        order_E: Iterable[int] | None,
        num_chunks: int,
        is_bounded: bool = False,
        shadowed: Shadowed | None = None,
        depth: int = 0,
    ):
        self._shadowed = shadowed if shadowed is not None and shadowed.ids else None
        last = self._shadowed.ids if self._shadowed else ()
        self._plan = plan.arranged(num_chunks, order_E, last)
        self._is_bounded, self._depth = is_bounded, depth
        self._routes, self._counts = [], []
        num_local = exchange.num_local_experts
        for chunk in range(num_chunks):
            self._routes.append(Route([leg.stage(chunk, num_chunks, exchange.wire_dtype) for leg in legs]))
            part_PX = received_PX if num_chunks == 1 else _part(received_PX, chunk, num_chunks)
            self._counts.append([sum(n for row in part_PX for n in row[e::num_local]) for e in range(num_local)])

    def run(self, inputs: list[Tensor], weight_TK: Tensor, experts: Experts) -> list[Tensor]:
        sizes = [route.num_rows for route in self._routes]
        if self._shadowed:
            sizes.append(self._shadowed.num_rows)
        rows = [self._plan.permute(reached(x, self._depth == 2), sum(sizes)) for x in inputs]
        chunks = list(zip(*(r.split(sizes) for r in rows), strict=True))
        at_home = chunks.pop() if self._shadowed else None
        if len(chunks) == 1:
            outputs = [self._through(*chunks[0], index=0, experts=experts)]
        elif self._is_bounded:
            outputs = [
                checkpoint(self._through, *chunk, index=index, experts=experts, use_reentrant=False)
                for index, chunk in enumerate(chunks)
            ]
        else:
            outputs = self._overlapped(chunks, experts)
        if self._shadowed:
            outputs.append(self._shadowed.run(list(at_home), experts))
        joined = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*outputs, strict=True)]
        return [self._plan.combine(out, weight_TK) for out in joined]

    def _through(self, *rows: Tensor, index: int, experts: Experts) -> list[Tensor]:
        route = self._routes[index]
        there = [route.dispatch(r) for r in rows]
        return [route.combine(out) for out in self._computed(there, index, experts)]

    def _computed(self, rows: list[Tensor], index: int, experts: Experts) -> list[Tensor]:
        return [in_step(reached(out, self._depth > 0), rows) for out in experts(rows, self._counts[index])]

    def _overlapped(self, chunks: list[tuple[Tensor, ...]], experts: Experts) -> list[list[Tensor]]:
        routes = self._routes
        going = [routes[0].start_dispatch(r) for r in chunks[0]]
        coming = []
        for index, route in enumerate(routes):
            there = [route.finish_dispatch(parcel) for parcel in going]
            if index + 1 < len(routes):
                going = [routes[index + 1].start_dispatch(r) for r in chunks[index + 1]]
            coming.append([route.start_combine(out) for out in self._computed(there, index, experts)])
        return [
            [route.finish_combine(parcel) for parcel in parcels] for route, parcels in zip(routes, coming, strict=True)
        ]


def route_of_counts(group: dist.ProcessGroup, sent_WL: Tensor, received_WL: Tensor, device: torch.device) -> Route:
    """The route of rows whose counts are known: int64 tensors [W, L]."""
    received = received_WL.to(device)
    key_WL = torch.arange(received.shape[1], device=device, dtype=torch.int64).expand_as(received)
    return Route([Leg(group, sent_WL.tolist(), received_WL.tolist(), received, key_WL).stage(0, 1, None)])
