"""Exchanges: ways for rows to travel to the workers that own their experts, and back.

``exchange.open(routing) -> Transfer`` agrees on what goes where; ``transfer.run(inputs, weight_TK, experts)`` permutes,
sends, has the experts compute, brings their outputs back and combines them. `build_exchange` makes one by name.

Shape letters: T tokens, K choices, D width, E experts in all, L experts of a worker, W workers, M rows that this worker
sends, R rows that it gets. Worker w owns the experts w * L ... (w + 1) * L - 1.
"""

from collections.abc import Mapping
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe.dispatch.watch import PeerError, Traffic, all_gather, broadcast, watch_of
from fmoe.errors import UserError
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing


class Experts(Protocol):
    """This worker's experts, as a transfer calls them."""

    def __call__(self, rows: list[Tensor], counts: list[int]) -> list[Tensor]:
        """Rows of each input tensor, sorted by expert, and how many each expert has -> rows of each output tensor."""
        ...

    def mix(self, inputs: list[Tensor], weight_TK: Tensor, plan: DispatchPlan) -> list[Tensor] | None:
        """Where this worker has all experts: permute, a call and combine, in one; None where that cannot be."""
        ...

    def lend(self, local: int) -> list[Tensor]:
        """The parameters of one of them (`fmoe.dispatch.shadow`)."""
        ...

    def run_with(self, parameters: list[list[Tensor]], rows: list[Tensor], counts: list[int]) -> list[Tensor]:
        """As a call, by experts of other workers whose parameters were lent."""
        ...


class Transfer(Protocol):
    """One forward pass through the experts, differentiable."""

    def run(self, inputs: list[Tensor], weight_TK: Tensor, experts: Experts) -> list[Tensor]:
        """Tensors [T, ...] of which each expert gets its tokens' rows -> ``sum_k weight_tk * output of expert (t, k)``,
        [T, ...] for each tensor that the experts return."""
        ...


class Exchange(Protocol):
    """A way for rows to travel between ``num_workers`` workers.

    Attributes:
        traffic: what this worker has sent to others, in forward and backward passes.
    """

    num_workers: int
    traffic: Traffic

    def begin(self, name: str) -> None:
        """A forward pass of the layer of that name begins."""
        ...

    def prepare(self, fields: Mapping[str, object], experts: nn.Module, row_width: int, device: torch.device) -> None:
        """Before the first exchange of a layer: all workers tell ``fields``, which must be the same.

        Raises:
            UserError: they are not; on all workers, naming the field, the ranks and the values.
        """
        ...

    def open(self, routing: Routing, depth: int = 0) -> Transfer:
        """Agrees on the counts. Where the host has to wait for the device, it does so here, once.

        Args:
            depth: how far this worker's backward pass goes: 2 to the tokens, 1 to its experts, 0 to neither. All go as
                far as one of them has to (but for padded, which exchanges nothing beforehand).

        Raises:
            PeerError: another worker failed before it came here.
        """
        ...

    def abort(self, error: Exception, device: torch.device) -> None:
        """Called instead of `open` by a worker that failed before it: every worker raises.

        Args:
            device: where the layer is, and so where the others exchange their counts.
        """
        ...

    def follow(self, outputs: list[Tensor]) -> None:
        """Has errors in the backward pass of ``outputs`` name this forward pass, not the latest of another layer."""
        ...

    def fail(self, error: Exception) -> None:
        """Tells those who wait for this worker that it failed after `open` and will not join them."""
        ...


class LocalExchange:
    """One worker, which owns every expert: nothing moves.

    Args:
        num_experts: E.
    """

    num_workers = 1

    def __init__(self, num_experts: int):
        self.num_experts, self.traffic = num_experts, Traffic()

    def begin(self, name: str) -> None:
        pass

    def prepare(self, fields: Mapping[str, object], experts: nn.Module, row_width: int, device: torch.device) -> None:
        pass

    def open(self, routing: Routing, depth: int = 0) -> Transfer:
        plan = DispatchPlan.from_routing(routing, self.num_experts)
        return _Stay(plan)

    def abort(self, error: Exception, device: torch.device) -> None:
        pass

    def follow(self, outputs: list[Tensor]) -> None:
        pass

    def fail(self, error: Exception) -> None:
        pass


class _Stay:
    def __init__(self, plan: DispatchPlan):
        self._plan = plan

    def run(self, inputs: list[Tensor], weight_TK: Tensor, experts: Experts) -> list[Tensor]:
        if (outputs := experts.mix(inputs, weight_TK, self._plan)) is not None:
            return outputs
        counts = self._plan.counts  # the host waits for the device here, and only here
        num_rows = sum(counts)
        rows = experts([self._plan.permute(x, num_rows) for x in inputs], counts)
        return [self._plan.combine(out, weight_TK) for out in rows]


class GroupExchange:
    """What the exchanges of a process group share.

    Args:
        group: the expert parallel group, gloo or nccl.
        num_experts: E.
        wire_dtype: in which rows travel, e.g. ``torch.bfloat16`` for half of the bytes of float32; None for their own.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, *, wire_dtype: torch.dtype | None = None):
        if wire_dtype is not None and not (isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point):
            raise UserError(f"exchange_options: wire_dtype={wire_dtype!r} is no floating point dtype")
        self.group, self.wire_dtype, self.traffic = group, wire_dtype, Traffic()
        self.num_workers = group.size()
        self.num_experts = num_experts
        self.num_local_experts = num_experts // self.num_workers
        self.worker = group.rank()

    def __deepcopy__(self, memo) -> "GroupExchange":
        return self  # process groups cannot be copied, and what else is in it is of the group

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """All groups that rows travel over."""
        return (self.group,)

    def begin(self, name: str) -> None:
        for group in self.groups:
            watch_of(group).begin(name, self.traffic)

    def prepare(self, fields: Mapping[str, object], experts: nn.Module, row_width: int, device: torch.device) -> None:
        introduce(self.group, {**fields, "exchange": self.describe()}, device)

    def describe(self) -> str:
        """The exchange and its options, for `prepare`."""
        return f"{type(self).__name__}(wire_dtype={self.wire_dtype})"

    def follow(self, outputs: list[Tensor]) -> None:
        places = [(watch, watch.place) for watch in map(watch_of, self.groups)]

        def resume(_grad: Tensor) -> None:
            for watch, place in places:
                watch.place, watch.traffic = place, self.traffic

        for out in outputs:
            if out.requires_grad:
                out.register_hook(resume)

    def fail(self, error: Exception) -> None:
        # What comes from another worker is known to the whole group, but not to other groups.
        if not isinstance(error, PeerError) or len(self.groups) > 1:
            for group in self.groups:
                watch_of(group).fail(error)

    def abort(self, error: Exception, device: torch.device) -> None:
        self.fail(error)

    def raise_together(self, failed: list[int], error: Exception | None, device: torch.device) -> NoReturn:
        """Every worker is here: they share the first failed one's message and raise. It keeps its own exception."""
        raise_together(self.group, failed, error, device)


_MESSAGE_BYTES = 2048


def raise_together(
    group: dist.ProcessGroup, failed: list[int], error: Exception | None, device: torch.device
) -> NoReturn:
    """Called by every worker of the group, with the same ``failed`` ones and, on those, their error."""
    text = f"{type(error).__name__}: {error}".encode()[:_MESSAGE_BYTES] if error is not None else b""
    message = _as_bytes(text, device)
    broadcast(group, message, failed[0], "sharing of an error").wait(for_host=True)
    if error is not None:
        raise error
    ranks = ", ".join(str(dist.get_global_rank(group, worker)) for worker in failed)
    raise PeerError(f"rank {ranks} failed in {watch_of(group).place}, before the exchange: {_as_text(message)}")


def _as_bytes(text: bytes, device: torch.device) -> Tensor:
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
    if text:
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return message.to(device)


def _as_text(message: Tensor) -> str:
    return bytes(message.cpu().tolist()).rstrip(b"\0").decode(errors="replace")


def introduce(group: dist.ProcessGroup, fields: Mapping[str, object], device: torch.device) -> None:
    """Every worker tells what it is about to do, once; all of them raise the same error if they differ.

    Args:
        fields: what must be the same on all workers, as text that is shown.

    Raises:
        UserError: names the field, the ranks that differ from most, and both values.
    """
    lines = [f"{name}={value}".replace("\n", " ")[:120] for name, value in fields.items()]
    mine = _as_bytes("\n".join(lines).encode()[:_MESSAGE_BYTES], device)
    everyones = all_gather(group, mine, "introduction of a layer").wait(for_host=True).view(group.size(), -1)
    told = [_as_text(message).split("\n") for message in everyones]
    for column in zip(*told, strict=False):
        values = sorted(set(column), key=lambda value: (-column.count(value), column.index(value)))
        if len(values) > 1:
            ranks = [dist.get_global_rank(group, worker) for worker, v in enumerate(column) if v != values[0]]
            others = ", ".join(v.partition("=")[2] for v in values[1:])
            name, _, usual = values[0].partition("=")
            raise UserError(
                f"{told[0][0].partition('=')[2]}: rank {', '.join(map(str, ranks))} has {name}={others}, "
                f"the others of moe_group have {usual}"
            )
