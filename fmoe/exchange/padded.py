"""Exchange without counts: every rank sends every expert the same number of rows, padded with zeros.

Counts stay on the device and are not exchanged, and shapes do not depend on them. This is GShard's form of the exchange
(arXiv 2006.16668 section 3.2), for gates with a capacity.

Shape letters: S slots that an expert has for one rank's rows, P = E * S slots of all experts; others as in
`fmoe.exchange.base`.
"""

import torch
import torch.distributed as dist

from fmoe.errors import UserError
from fmoe.exchange.all_to_all import hop_counts
from fmoe.exchange.base import Forward, GroupExchange
from fmoe.exchange.collectives import all_reduce
from fmoe.exchange.dispatch import ChunkedDispatch, Dispatch
from fmoe.exchange.hops import HopCounts
from fmoe.kernels.padded import PaddedPlan
from fmoe.routing import Routing


class PaddedExchange(GroupExchange):
    """All-to-all of equally many rows for every expert, padded with zeros (arXiv 2006.16668 section 3.2).

    The host reads no counts, except in the first batches if ``slots`` is None.

    Args:
        group, num_experts, wire_dtype: see `GroupExchange`.
        chunks: see `fmoe.exchange.AllToAllExchange`.
        slots: upper bound on the rows of one rank for one expert. None for the largest `Routing.max_load` of any rank
            in the first batch of training, which later ones must not exceed; evaluation has its own bound, from its
            first batch.

    Raises:
        UserError: an option is invalid; in a forward pass, if ``Routing.max_load`` exceeds ``slots``.
    """

    compared = ("chunks", "slots", "wire_dtype")

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        *,
        chunks: int = 1,
        slots: int | None = None,
        wire_dtype: torch.dtype | None = None,
    ):
        super().__init__(group, num_experts, wire_dtype=wire_dtype)
        for name, value in (("chunks", chunks), ("slots", slots)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"exchange_options.{name}={value!r} is not a positive whole number")
        self.chunks = chunks
        self.slots = slots
        self._counts: dict[tuple[int, torch.device], HopCounts] = {}

    @property
    def slots(self) -> int | None:
        """Upper bound on the rows of one rank for one expert, in the present mode; None before the first batch."""
        return self._slots.get(self.is_training)

    @slots.setter
    def slots(self, value: int | None) -> None:
        # One for each mode, because gates may have a capacity for each.
        self._slots = {} if value is None else {True: value, False: value}

    def plan(self, routing: Routing) -> PaddedPlan:
        max_load = routing.expert_TK.numel() if routing.max_load is None else routing.max_load
        device = routing.expert_TK.device
        if self.slots is None:
            agreed = torch.tensor([max(max_load, 1)], device=device, dtype=torch.int64)
            with self.traffic.paused():
                all_reduce(self.group, agreed, dist.ReduceOp.MAX, "agreement on slots").wait(for_host=True)
            self._slots[self.is_training] = int(agreed)
        slots = self._slots[self.is_training]
        if max_load > slots:
            raise UserError(
                f"an expert may get {max_load} rows of this batch, more than slots={slots} of the padded exchange (by "
                f"default, the maximum of the first batch of {'training' if self.is_training else 'evaluation'}): set "
                f"exchange_options={{'slots': {max_load}}} or more, or a smaller capacity_factor if the gate has one"
            )
        slots = -(-slots // self.chunks) * self.chunks
        return PaddedPlan(super().plan(routing), slots, self.chunks)

    def open(self, plan: PaddedPlan, needs_grad: bool) -> Forward:
        slots = plan.slots
        device = plan.inverse_TK.device
        if (slots, device) not in self._counts:
            counts = [[slots] * self.num_local_experts] * self.ep_size
            on_device = torch.tensor(counts, device=device, dtype=torch.int64)
            self._counts[slots, device] = hop_counts(self.group, counts, counts, on_device)
        # This rank may be the only one that needs no gradients, and all ranks must run the same collectives.
        needs_grad = torch.is_grad_enabled()
        rows = [slots // self.chunks * self.ep_size] * self.num_local_experts  # of each expert in a chunk
        chunks = []
        for chunk in range(self.chunks):
            hop = self._counts[slots, device].chunk(chunk, self.chunks).hop(self.wire_dtype)
            chunks.append(Dispatch(plan, [hop], rows, needs_grad))
        return chunks[0].run if self.chunks == 1 else ChunkedDispatch(plan, chunks).run
