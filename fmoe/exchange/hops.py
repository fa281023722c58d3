"""A differentiable all-to-all of rows with uneven splits, which sorts the rows as the receiver needs them.

A peer sends rows of several kinds, such as the rows of one expert. Its rows of one kind are adjacent, and are a
segment.

Shape letters: M rows sent, R rows received, D width, P peers of the group, X kinds of rows that a peer sends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.exchange.collectives import Pending, all_to_all
from fmoe.kernels.rows import gather, segment_order

Counts = list[list[int]]


@dataclass(frozen=True, eq=False)
class Hop:
    """One all-to-all, which sends rows to the peers of ``group`` and, on the way back, one row for each row received.

    `AllToAll` is the differentiable operation. A `Handle` starts it asynchronously, so that experts can compute
    meanwhile; the gradients are then exchanged asynchronously too.

    Attributes:
        send, receive: number of rows to and from each peer on the way there.
        order: permutation from the order in which rows arrive to the order that the receiver needs, and its inverse;
            None if the two orders are equal.
        wire_dtype: dtype in which rows are sent; None for the dtype that they have.
    """

    group: dist.ProcessGroup
    send: list[int]
    receive: list[int]
    order: tuple[Tensor, Tensor] | None = None
    wire_dtype: torch.dtype | None = None

    def pack(self, rows: Tensor, back: bool) -> Tensor:
        """Return the rows in the order and dtype in which they are sent; not differentiable."""
        dtype = rows.dtype
        # Keys, which are integers, and weights, which are vectors, are not rounded.
        if self.wire_dtype is not None and rows.dim() > 1 and rows.is_floating_point():
            dtype = self.wire_dtype
        if self.order is None or not back:
            return rows.to(dtype)
        return gather(rows, self.order[1], dtype)

    def launch(self, rows: Tensor, back: bool) -> Pending:
        """Start the collective of packed rows, without autograd."""
        if back:
            return all_to_all(self.group, rows, self.send, self.receive)
        return all_to_all(self.group, rows, self.receive, self.send)

    def unpack(self, rows: Tensor, back: bool, dtype: torch.dtype) -> Tensor:
        """Return received rows in ``dtype`` and in the order that the receiver needs; not differentiable."""
        if self.order is None or back:
            return rows.to(dtype)
        return gather(rows, self.order[0], dtype)


class AllToAll(torch.autograd.Function):
    """``AllToAll.apply(rows, hop, back)``: send rows there, [M, ...] -> [R, ...], or back, [R, ...] -> [M, ...].

    Rows there arrive in the order that the receiver needs; rows back in that in which they were sent there.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, hop: Hop, back: bool) -> Tensor:
        ctx.hop = hop
        ctx.back = back
        arrived = hop.launch(hop.pack(rows, back), back).wait()
        return hop.unpack(arrived, back, rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return AllToAll.apply(grad, ctx.hop, not ctx.back), None, None


class Handle:
    """An all-to-all in flight, from the constructor to `wait`.

    Args:
        hop, rows, back: as in `AllToAll`.
    """

    def __init__(self, hop: Hop, rows: Tensor, back: bool):
        self.hop = hop
        self.back = back
        self.dtype = rows.dtype
        self.pending: list[Pending] = []  # collective of the rows
        self.grads: list[Pending] = []  # collective of their gradients
        self._placeholder: Tensor | None = _Start.apply(rows, self)  # of the rows in the autograd graph

    def wait(self) -> Tensor:
        """Return the rows. Call it only once."""
        placeholder = self._placeholder
        self._placeholder = None  # its graph refers to this handle: otherwise a reference cycle
        return _Wait.apply(placeholder, self)


class _Start(torch.autograd.Function):
    """Start the all-to-all of ``rows``. The result is a placeholder for `_Wait`, which returns the received rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, handle: Handle) -> Tensor:
        ctx.handle = handle
        hop = handle.hop
        handle.pending.append(hop.launch(hop.pack(rows, handle.back), handle.back))
        # In the dtype of the rows, so that autograd does not cast their gradient.
        num_rows = sum(hop.send if handle.back else hop.receive)
        return rows.new_empty(()).expand(num_rows, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        handle = ctx.handle
        if torch.is_grad_enabled():  # create_graph: `_Wait` leaves the exchange to this function
            return AllToAll.apply(grad, handle.hop, not handle.back), None
        return handle.hop.unpack(handle.grads.pop().wait(), not handle.back, handle.dtype), None


class _Wait(torch.autograd.Function):
    """Wait for rows. The backward pass starts the collective of their gradients."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, handle: Handle) -> Tensor:
        ctx.handle = handle
        return handle.hop.unpack(handle.pending.pop().wait(), handle.back, handle.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        handle = ctx.handle
        if torch.is_grad_enabled():
            return grad, None
        handle.grads.append(handle.hop.launch(handle.hop.pack(grad, not handle.back), not handle.back))
        return grad.new_zeros(()).expand(grad.shape), None


@dataclass(frozen=True, eq=False)
class HopCounts:
    """Numbers of rows that a `Hop` moves, by peer and by kind. The rows of one expert are a kind, for example.

    Attributes:
        send_PX, receive_PX: numbers of rows to and from each peer, on the host.
        receive: ``receive_PX`` on the device.
        key_PX: sort key of the received rows of each peer and kind. The receiver needs rows in ascending order of keys.
            Rows with equal keys keep the order of arrival.
    """

    group: dist.ProcessGroup
    send_PX: Counts
    receive_PX: Counts
    receive: Tensor
    key_PX: Tensor

    def hop(self, wire_dtype: torch.dtype | None = None) -> Hop:
        """Return a `Hop` for all rows of these counts."""
        send = [sum(row) for row in self.send_PX]
        receive = [sum(row) for row in self.receive_PX]
        # With one segment per peer rows arrive in the order needed, because keys never decrease from peer to peer.
        is_sorted = self.key_PX.shape[1] == 1
        order = None if is_sorted else segment_order(self.receive, self.key_PX, sum(receive))
        return Hop(self.group, send, receive, order, wire_dtype)

    def chunk(self, chunk: int, num_chunks: int) -> "HopCounts":
        """Return the counts of chunk ``chunk`` of ``num_chunks`` (`DispatchPlan.arranged`)."""
        if num_chunks == 1:
            return self
        send = torch.tensor(self.send_PX, dtype=torch.int64, device="cpu")
        receive = torch.tensor(self.receive_PX, dtype=torch.int64, device="cpu")
        parts = [chunk_of(counts, chunk, num_chunks) for counts in (send, receive, self.receive)]
        return HopCounts(self.group, parts[0].tolist(), parts[1].tolist(), parts[2], self.key_PX)


def chunk_of(counts: Tensor, chunk: int, num_chunks: int) -> Tensor:
    """Return the part of each count that is in chunk ``chunk`` of ``num_chunks`` (`DispatchPlan.arranged`)."""
    begin, end = (-(-counts * c // num_chunks) for c in (chunk, chunk + 1))
    return end - begin


def join_graph(x: Tensor, is_needed: bool) -> Tensor:
    """Return ``x``. If ``is_needed``, it requires gradients, unless it holds integers.

    Gradients are needed if another rank's backward pass waits for this rank's collectives.
    """
    if is_needed and not x.requires_grad and x.is_floating_point():
        return x.detach().requires_grad_()
    return x


def tie(outputs: Sequence[Tensor], rows: Sequence[Tensor], is_needed: bool) -> list[Tensor]:
    """Return the ``outputs`` of experts, made to depend on ``rows`` in the autograd graph, and joined to it.

    All ranks then run the same collectives in the backward pass and when a checkpoint recomputes. This holds even if no
    expert of this rank uses its rows or saves a tensor.
    """
    return [_Tie.apply(join_graph(out, is_needed), *rows) for out in outputs]


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *rows: Tensor) -> Tensor:
        ctx.save_for_backward(out.new_empty(0))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # makes a checkpoint start its recomputation
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)
