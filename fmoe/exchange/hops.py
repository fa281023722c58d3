"""A differentiable all-to-all of rows with uneven splits, which sorts the rows as the receiver needs them.

A peer sends rows of several kinds, such as the rows of one expert. Its rows of one kind are adjacent, and are a
segment.

Shape letters: M rows sent, R rows received, D width, P peers of the group, X kinds of rows that a peer sends, S = P * X
segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.exchange.collectives import Pending, all_to_all
from fmoe.kernels import backends, reorder
from fmoe.kernels.cuda import calls
from fmoe.kernels.rows import chunk_counts

Counts = list[list[int]]


@dataclass(frozen=True, eq=False)
class Hop:
    """One all-to-all: `forward` sends rows to the peers of ``group``, `back` returns one row for each row sent.

    `start` runs one of the two asynchronously, so that experts can compute meanwhile. The gradients are exchanged
    asynchronously too.

    Attributes:
        send, receive: number of rows to and from each peer in `forward`.
        order: permutation from the order in which rows arrive to the order that the receiver needs, and its inverse;
            None if the two orders are equal.
        wire_dtype: dtype in which rows are sent; None for the dtype that they have.
    """

    group: dist.ProcessGroup
    send: list[int]
    receive: list[int]
    order: tuple[Tensor, Tensor] | None = None
    wire_dtype: torch.dtype | None = None

    def forward(self, rows_MD: Tensor) -> Tensor:
        """Send rows to the peers, and return those received, in the order that the receiver needs: [R, D]."""
        return self.unpack(_AllToAll.apply(rows_MD.to(self._wire(rows_MD)), self, False), rows_MD.dtype)

    def back(self, rows_RD: Tensor) -> Tensor:
        """Send one row back for each row that `forward` received.

        Returns:
            The rows that come back, [M, D], in the order of the rows that `forward` sent.
        """
        return _AllToAll.apply(self.pack(rows_RD), self, True).to(rows_RD.dtype)

    def start(self, rows: Tensor, back: bool = False) -> "Handle":
        """Start `forward` or `back`; `Handle.wait` returns the rows."""
        handle = Handle(self, back, rows.dtype)
        handle.rows = _Start.apply(self.pack(rows) if back else rows.to(self._wire(rows)), handle)
        return handle

    def launch(self, rows: Tensor, back: bool) -> Pending:
        """Start the collective of rows that are already sorted, without autograd."""
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        return all_to_all(self.group, rows, receive, send)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert received rows to ``dtype`` and to the order that the receiver needs, in one pass."""
        return rows.to(dtype) if self.order is None else reorder(rows, *self.order, dtype)

    def pack(self, rows: Tensor) -> Tensor:
        """Convert rows to the order and dtype in which they are sent back; the inverse of `unpack`."""
        dtype = self._wire(rows)
        return rows.to(dtype) if self.order is None else reorder(rows, *self.order[::-1], dtype)

    def _wire(self, rows: Tensor) -> torch.dtype:
        # Keys, which are integers, and weights, which are vectors, are not rounded.
        return (rows.dim() > 1 and rows.is_floating_point() and self.wire_dtype) or rows.dtype


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
        send, receive = ([sum(row) for row in counts] for counts in (self.send_PX, self.receive_PX))
        # With one segment per peer rows arrive in the order needed, because keys never decrease from peer to peer.
        is_sorted = self.key_PX.shape[1] == 1
        order = None if is_sorted else segment_order(self.receive, self.key_PX, sum(receive))
        return Hop(self.group, send, receive, order, wire_dtype)

    def chunk(self, chunk: int, num_chunks: int) -> "HopCounts":
        """Return the counts of chunk ``chunk`` of ``num_chunks``."""
        if num_chunks == 1:
            return self
        send, receive = (chunk_of(counts, chunk, num_chunks) for counts in (self.send_PX, self.receive_PX))
        begin, end = (-(-self.receive * c // num_chunks) for c in (chunk, chunk + 1))
        return HopCounts(self.group, send, receive, end - begin, self.key_PX)


def chunk_of(counts: Counts, chunk: int, num_chunks: int) -> Counts:
    """Return the part of each count that is in chunk ``chunk`` of ``num_chunks`` (`fmoe.kernels.rows.chunk_counts`)."""
    return [[chunk_counts(n, num_chunks)[chunk] for n in row] for row in counts]


def segment_order(receive_PX: Tensor, key_PX: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation that sorts received segments (rows of one peer and kind) by key, and its inverse."""
    receive_S, order_S = receive_PX.reshape(-1), key_PX.reshape(-1).argsort(stable=True)
    if backends.cuda_takes_segments(receive_S):
        return calls.segment_order(receive_S.contiguous(), order_S, num_rows)
    sorted_S = receive_S[order_S]
    shift_S = (receive_S.cumsum(0) - receive_S)[order_S] - (sorted_S.cumsum(0) - sorted_S)
    row_R = torch.arange(num_rows, device=receive_S.device, dtype=torch.int64)
    order_R = row_R + shift_S.repeat_interleave(sorted_S, output_size=num_rows)
    return order_R, row_R - shift_S[order_S.argsort()].repeat_interleave(receive_S, output_size=num_rows)


def join_graph(x: Tensor, is_needed: bool) -> Tensor:
    """Return ``x``. If ``is_needed``, it requires gradients, unless it holds integers.

    Gradients are needed if another rank's backward pass waits for this rank's collectives.
    """
    if is_needed and not x.requires_grad and x.is_floating_point():
        return x.detach().requires_grad_()
    return x


def tie(out: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """Return ``out``, an output of experts, made to depend on ``rows`` in the autograd graph.

    All ranks then run the same collectives in the backward pass and when a checkpoint recomputes. This holds even if no
    expert of this rank uses its rows or saves a tensor.
    """
    return _Tie.apply(out, *rows)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *rows: Tensor) -> Tensor:
        ctx.save_for_backward(out.new_empty(0))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # makes a checkpoint start its recomputation
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, hop: Hop, back: bool) -> Tensor:
        ctx.hop, ctx.back = hop, back
        return hop.launch(rows, back).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _AllToAll.apply(grad, ctx.hop, not ctx.back), None, None


@dataclass(eq=False)
class Handle:
    """An all-to-all in flight.

    Attributes:
        back: True for `Hop.back`, False for `Hop.forward`.
        dtype: dtype of the rows before and after the exchange.
        rows: placeholder of the rows in the autograd graph until `wait`.
        pending, grads: running collectives of rows and of their gradients.
    """

    hop: Hop
    back: bool
    dtype: torch.dtype
    rows: Tensor | None = None
    pending: list[Pending] = field(default_factory=list)
    grads: list[Pending] = field(default_factory=list)

    def wait(self) -> Tensor:
        """Return the rows. Call it only once."""
        placeholder, self.rows = self.rows, None  # its graph refers to this handle: otherwise a reference cycle
        rows = _Wait.apply(placeholder, self)
        return rows.to(self.dtype) if self.back else self.hop.unpack(rows, self.dtype)


class _Start(torch.autograd.Function):
    """Start the all-to-all of ``rows``. The result is a placeholder for `_Wait`, which returns the received rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, handle: Handle) -> Tensor:
        ctx.handle = handle
        handle.pending.append(handle.hop.launch(rows, handle.back))
        # In the dtype of the rows, so that autograd does not cast their gradient.
        size = sum(handle.hop.send if handle.back else handle.hop.receive)
        return rows.new_empty(()).expand(size, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        handle = ctx.handle
        if torch.is_grad_enabled():  # create_graph: `_Wait` leaves the exchange to this function
            return _AllToAll.apply(grad, handle.hop, not handle.back), None
        return handle.grads.pop().wait(), None


class _Wait(torch.autograd.Function):
    """Wait for rows. The backward pass starts the collective of their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, handle: Handle) -> Tensor:
        ctx.handle = handle
        return handle.pending.pop().wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        handle = ctx.handle
        if torch.is_grad_enabled():
            return grad, None
        handle.grads.append(handle.hop.launch(grad, not handle.back))
        return grad.new_zeros(()).expand(grad.shape), None
