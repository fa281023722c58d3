"""How rows get from one worker to another and back, uneven splits and all: one all-to-all, or one a stage.

Shape letters: M rows that this worker sends, R rows that it gets, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.dispatch.watch import Pending, all_to_all
from fmoe.kernels import reorder


@dataclass(frozen=True, eq=False)
class Stage:
    """One all-to-all and the order in which its rows are wanted afterwards.

    Attributes:
        send, receive: rows to and from each worker of ``group``.
        order_R: place, among the rows as they arrive, of each row as it is wanted; None where it is the same.
        inverse_R: the inverse of ``order_R``.
        wire_dtype: rows travel in it; None for their own.
    """

    group: dist.ProcessGroup
    send: list[int]
    receive: list[int]
    order_R: Tensor | None
    inverse_R: Tensor | None
    wire_dtype: torch.dtype | None = None

    def packed(self, rows: Tensor) -> Tensor:
        """Rows as they travel."""
        return rows.to(self._wire(rows))

    def wanted(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows as they arrive -> as they are wanted, in one pass."""
        return rows.to(dtype) if self.order_R is None else reorder(rows, self.order_R, self.inverse_R, dtype)

    def arrived(self, rows: Tensor) -> Tensor:
        """The inverse of `wanted`: as they travel back."""
        if self.order_R is None:
            return self.packed(rows)
        return reorder(rows, self.inverse_R, self.order_R, self._wire(rows))

    def _wire(self, rows: Tensor) -> torch.dtype:
        return rows.dtype if self.wire_dtype is None or not rows.is_floating_point() else self.wire_dtype


def reached(x: Tensor, is_reached: bool) -> Tensor:
    """``x``, by which the backward pass comes if it does at another worker: all of them take part in every journey."""
    if is_reached and not x.requires_grad and x.is_floating_point():
        return x.detach().requires_grad_()
    return x


def in_step(out: Tensor, rows: list[Tensor]) -> Tensor:
    """What experts made of ``rows``. The backward pass comes by at their journey also where no expert used them, and a
    checkpoint computes the journey again also where no expert keeps anything: all workers do the same."""
    return _InStep.apply(out, *rows)


class _InStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, *rows):
        ctx.save_for_backward(out.new_empty(0))
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # where a checkpoint begins
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


@dataclass(eq=False)
class Parcel:
    """Rows under way: a tensor that is filled when the `Pending` arrives; then they are to have a dtype again."""

    rows: Tensor
    flight: "_Flight"
    dtype: torch.dtype


class Route:
    """The journey of the rows of one chunk to the experts' workers (`dispatch`) and back (`combine`).

    Each can be begun (`start_dispatch`, `start_combine`) and finished (`finish_dispatch`, `finish_combine`) apart, so
    that experts compute meanwhile. The backward pass does the same: a row's gradient leaves when the backward pass
    comes by where the row arrived, and is waited for where the row left.
    """

    def __init__(self, stages: Sequence[Stage]):
        self._stages = list(stages)
        self.num_rows = sum(self._stages[0].send)

    def dispatch(self, rows_MD: Tensor) -> Tensor:
        """Rows sorted by expert -> the rows of this worker's experts, sorted by expert: [R, D]."""
        dtype = rows_MD.dtype
        for stage in self._stages:
            rows_MD = stage.wanted(_Travel.apply(stage.packed(rows_MD), stage, False), dtype)
        return rows_MD

    def combine(self, rows_RD: Tensor) -> Tensor:
        """Outputs of the experts -> where their rows came from, in the order they had there: [M, D]."""
        dtype = rows_RD.dtype
        for stage in self._stages[::-1]:
            rows_RD = _Travel.apply(stage.arrived(rows_RD), stage, True).to(dtype)
        return rows_RD

    def start_dispatch(self, rows_MD: Tensor) -> Parcel:
        """Begins `dispatch`: its first stage."""
        return _start(self._stages[0].packed(rows_MD), self._stages[0], False, rows_MD.dtype)

    def finish_dispatch(self, parcel: Parcel) -> Tensor:
        """Ends `dispatch`."""
        rows = self._stages[0].wanted(_Finish.apply(parcel.rows, parcel.flight), parcel.dtype)
        for stage in self._stages[1:]:
            rows = stage.wanted(_Travel.apply(stage.packed(rows), stage, False), parcel.dtype)
        return rows

    def start_combine(self, rows_RD: Tensor) -> Parcel:
        """Begins `combine`: all but the end of its last stage."""
        dtype = rows_RD.dtype
        for stage in self._stages[:0:-1]:
            rows_RD = _Travel.apply(stage.arrived(rows_RD), stage, True).to(dtype)
        return _start(self._stages[0].arrived(rows_RD), self._stages[0], True, dtype)

    def finish_combine(self, parcel: Parcel) -> Tensor:
        """Ends `combine`."""
        return _Finish.apply(parcel.rows, parcel.flight).to(parcel.dtype)


def _launch(rows: Tensor, stage: Stage, is_back: bool) -> Pending:
    send, receive = (stage.receive, stage.send) if is_back else (stage.send, stage.receive)
    return all_to_all(stage.group, rows, receive, send)


class _Travel(torch.autograd.Function):
    """There and wait; gradients travel the other way."""

    @staticmethod
    def forward(ctx, rows, stage: Stage, is_back: bool):
        ctx.stage, ctx.is_back = stage, is_back
        return _launch(rows, stage, is_back).wait()

    @staticmethod
    def backward(ctx, grad):
        return _Travel.apply(grad, ctx.stage, not ctx.is_back), None, None


@dataclass(eq=False)
class _Flight:
    """What start and finish of one journey share, forward and backward."""

    stage: Stage
    is_back: bool
    there: Pending | None = None
    back: list[Pending] = field(default_factory=list)


def _start(rows: Tensor, stage: Stage, is_back: bool, dtype: torch.dtype) -> Parcel:
    flight = _Flight(stage, is_back)
    return Parcel(_Start.apply(rows, flight), flight, dtype)


class _Start(torch.autograd.Function):
    """Lets rows go. What it returns stands for them in the graph and must not be read: `_Finish` has them."""

    @staticmethod
    def forward(ctx, rows, flight: _Flight):
        ctx.flight = flight
        flight.there = _launch(rows, flight.stage, flight.is_back)
        # In the rows' dtype, so that autograd lets their gradient pass as it is.
        size = sum(flight.stage.send if flight.is_back else flight.stage.receive)
        return rows.new_empty(()).expand(size, *rows.shape[1:])

    @staticmethod
    def backward(ctx, grad):
        flight = ctx.flight
        if torch.is_grad_enabled():  # for second derivatives (create_graph) `_Finish` left the journey to this
            return _Travel.apply(grad, flight.stage, not flight.is_back), None
        return flight.back.pop().wait(), None


class _Finish(torch.autograd.Function):
    """Waits for rows; in the backward pass lets their gradients go."""

    @staticmethod
    def forward(ctx, rows, flight: _Flight):
        ctx.flight = flight
        pending, flight.there = flight.there, None
        return pending.wait()

    @staticmethod
    def backward(ctx, grad):
        flight = ctx.flight
        if torch.is_grad_enabled():
            return grad, None
        flight.back.append(_launch(grad, flight.stage, not flight.is_back))
        return grad.new_zeros(()).expand(grad.shape), None
