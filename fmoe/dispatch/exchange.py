"""Moving rows to the workers that own their experts, and back.

Shape letters: M rows that this worker sends, R rows that it gets, D width, E experts in all, L experts of a worker,
W workers. Worker w owns the experts w * L ... (w + 1) * L - 1.
"""

from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.dispatch.plan import DispatchPlan
from fmoe.errors import UserError
from fmoe.ops import reorder


class Transfer(Protocol):
    """The two journeys of one forward pass. Both are differentiable, and one is the other's inverse.

    Attributes:
        num_rows: M, the rows that this worker sends.
        counts: rows that each of this worker's experts gets, L numbers.
    """

    num_rows: int
    counts: list[int]

    def dispatch(self, rows_MD: Tensor) -> Tensor:
        """Rows sorted by expert -> the rows of this worker's experts, sorted by expert: [R, D]."""
        ...

    def combine(self, rows_RD: Tensor) -> Tensor:
        """Outputs of the experts -> where their rows came from, in the order they had there: [M, D]."""
        ...


class Exchange(Protocol):
    """A way for rows to travel between ``num_workers`` workers."""

    num_workers: int

    def open(self, plan: DispatchPlan) -> Transfer:
        """Agrees on the counts; the one place where the host waits for the device."""
        ...

    def abort(self, error: Exception, device: torch.device) -> None:
        """Tells the other workers, who are waiting in `open`, that this one failed before it. Every worker raises.

        Args:
            device: where the layer is, and so where the others exchange their counts.
        """
        ...


class LocalExchange:
    """One worker, which owns every expert: nothing moves."""

    num_workers = 1

    def open(self, plan: DispatchPlan) -> Transfer:
        return _Stay(plan.counts)

    def abort(self, error: Exception, device: torch.device) -> None:
        pass


class _Stay:
    def __init__(self, counts: list[int]):
        self.counts, self.num_rows = counts, sum(counts)

    def dispatch(self, rows_MD: Tensor) -> Tensor:
        return rows_MD

    def combine(self, rows_RD: Tensor) -> Tensor:
        return rows_RD


class AllToAllExchange:
    """Expert parallelism by ``all_to_all_single`` with uneven splits (FastMoE section 3.2, GShard section 3.2).

    Args:
        group: the expert parallel group, gloo or nccl.
        num_experts: E.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int):
        self.group = group
        self.num_workers = group.size()
        self.num_local_experts = num_experts // self.num_workers

    def open(self, plan: DispatchPlan) -> Transfer:
        return self._agree(plan.count_E.view(self.num_workers, self.num_local_experts), None)

    def abort(self, error: Exception, device: torch.device) -> None:
        nothing_WL = torch.zeros(self.num_workers, self.num_local_experts, dtype=torch.int64, device=device)
        self._agree(nothing_WL, error)

    def __deepcopy__(self, memo) -> "AllToAllExchange":
        return self  # process groups cannot be copied, and there is nothing else in it

    def _agree(self, send_WL: Tensor, error: Exception | None) -> Transfer:
        # A column beside the counts says "I failed before the exchange", lest the others wait for rows for ever.
        failed_W1 = torch.full_like(send_WL[:, :1], int(error is not None))
        send = torch.cat([send_WL, failed_W1], 1)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        sent, received = torch.stack([send, receive]).tolist()
        failed = [worker for worker, row in enumerate(received) if row[-1]]
        if failed:
            _raise_together(self.group, failed, error, send.device)
        return AllToAllTransfer(self.group, [row[:-1] for row in sent], [row[:-1] for row in received], send.device)


class AllToAllTransfer:
    def __init__(self, group, sent_WL: list[list[int]], received_WL: list[list[int]], device: torch.device):
        self._group = group
        self._sent, self._received = [sum(row) for row in sent_WL], [sum(row) for row in received_WL]
        self.num_rows = sum(self._sent)
        self.counts = [sum(column) for column in zip(*received_WL, strict=True)]
        # Rows arrive by (sender, expert); experts want them by (expert, sender).
        num_local = len(self.counts)
        expert_R = torch.arange(num_local, device=device).repeat(len(received_WL))
        expert_R = expert_R.repeat_interleave(
            torch.tensor([n for row in received_WL for n in row], device=device), output_size=sum(self._received)
        )
        self._by_expert_R = expert_R.argsort(stable=True)
        self._by_sender_R = torch.empty_like(self._by_expert_R)
        self._by_sender_R[self._by_expert_R] = torch.arange(len(expert_R), device=device)

    def dispatch(self, rows_MD: Tensor) -> Tensor:
        rows_RD = _AllToAll.apply(rows_MD, self._received, self._sent, self._group)
        return reorder(rows_RD, self._by_expert_R, self._by_sender_R)

    def combine(self, rows_RD: Tensor) -> Tensor:
        rows_RD = reorder(rows_RD, self._by_sender_R, self._by_expert_R)
        return _AllToAll.apply(rows_RD, self._sent, self._received, self._group)


class _AllToAll(torch.autograd.Function):
    """Rows by worker, ``send`` of them to each, ``receive`` of them from each; gradients travel the other way."""

    @staticmethod
    def forward(ctx, rows, receive: list[int], send: list[int], group):
        ctx.receive, ctx.send, ctx.group = receive, send, group
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, ctx.send, ctx.receive, ctx.group), None, None, None


_MESSAGE_BYTES = 2048


def _raise_together(group, failed: list[int], error: Exception | None, device: torch.device) -> NoReturn:
    """Every worker is here: they share the first failed one's message and raise. It keeps its own exception."""
    text = f"{type(error).__name__}: {error}".encode()[:_MESSAGE_BYTES] if error is not None else b""
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    message = message.to(device)
    dist.broadcast(message, src=dist.get_global_rank(group, failed[0]), group=group)
    if error is not None:
        raise error
    text = bytes(message.cpu().tolist()).rstrip(b"\0").decode(errors="replace")
    ranks = ", ".join(str(dist.get_global_rank(group, worker)) for worker in failed)
    raise RuntimeError(f"rank {ranks} failed before the exchange of an MoE layer: {text}")


def build_exchange(group: dist.ProcessGroup | None, num_experts: int) -> Exchange:
    """The exchange for an expert parallel group; a local one without a group or with one worker.

    Raises:
        UserError: the experts do not spread evenly over the group.
    """
    if group is None or group.size() == 1:
        return LocalExchange()
    if num_experts % group.size():
        raise UserError(f"num_experts={num_experts} is not divisible by the {group.size()} workers of moe_group")
    return AllToAllExchange(group, num_experts)
