"""Every expert gets the same number of rows from every worker, filled up with zeros: nothing for the host to read.

GShard's form of the exchange (arXiv 2006.16668 section 3.2), for gates with a capacity. Counts stay on the device, no
count exchange goes before the rows, and shapes are the same in every step.

Shape letters: S places that an expert has for one worker's rows, P = E * S places in all; others as in
`fmoe.dispatch.exchange`.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.dispatch.all_to_all import AllToAllTransfer, Leg
from fmoe.dispatch.exchange import GroupExchange, Transfer
from fmoe.dispatch.watch import all_reduce
from fmoe.errors import UserError
from fmoe.kernels.padded import PaddedPlan
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing


class PaddedExchange(GroupExchange):
    """See the module.

    Args:
        group, num_experts, wire_dtype: see `GroupExchange`.
        chunks: see `fmoe.dispatch.AllToAllExchange`.
        slots: S, the most rows of one worker for one expert; None to agree, in the first forward pass, on the largest
            capacity of any worker. Later batches may be smaller, not larger.
    """

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
                raise UserError(f"exchange_options: {name}={value!r} is not a positive whole number")
        self.chunks, self.slots = chunks, slots
        self._counts: tuple[list[list[int]], Tensor, Tensor] | None = None

    def open(self, routing: Routing, depth: int = 0) -> Transfer:
        most = routing.expert_TK.numel() if routing.most is None else routing.most
        device = routing.expert_TK.device
        if self.slots is None:
            agreed = torch.tensor([max(most, 1)], device=device, dtype=torch.int64)
            with self.traffic.paused():
                all_reduce(self.group, agreed, dist.ReduceOp.MAX, "agreement on slots").wait(for_host=True)
            self.slots = int(agreed)
        if most > self.slots:
            error = UserError(
                f"an expert may get {most} rows of this batch, and the padded exchange has slots={self.slots}: give "
                "exchange_options={'slots': ...} for the largest batch, or a gate with a smaller capacity_factor"
            )
            self.fail(error)
            raise error
        slots = -(-self.slots // self.chunks) * self.chunks
        plan = PaddedPlan(DispatchPlan.from_routing(routing, self.num_experts), slots, self.chunks)
        if self._counts is None or self._counts[1].device != device:
            counts = [[slots] * self.num_local_experts] * self.num_workers
            key_WL = torch.arange(self.num_local_experts, device=device, dtype=torch.int64).expand(self.num_workers, -1)
            self._counts = counts, torch.tensor(counts, device=device, dtype=torch.int64), key_WL
        counts, on_device, key_WL = self._counts
        leg = Leg(self.group, counts, counts, on_device, key_WL)
        return AllToAllTransfer(self, plan, [leg], counts, None, self.chunks, depth=depth)

    def describe(self) -> str:
        return f"PaddedExchange(chunks={self.chunks}, slots={self.slots}, wire_dtype={self.wire_dtype})"
