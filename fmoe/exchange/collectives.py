"""Collectives in flight, which `GroupMonitor` watches."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.exchange.monitor import GroupMonitor, monitor_of
from fmoe.kernels import memory
from fmoe.runtime import collectives
from fmoe.runtime.phases import phase

_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13

Splits = list[int] | None


class Pending:
    """A collective in flight, watched by its group's monitor; keeps its tensors alive."""

    def __init__(
        self,
        monitor: GroupMonitor,
        work: collectives.Started,
        what: str,
        sent: int,
        result: Tensor,
        read: object,
    ):
        monitor.started += 1
        monitor.traffic.sent += sent
        self._monitor = monitor
        self._work = work
        self._what = what
        self._number = monitor.started
        self._result = result
        self._read = read

    def wait(self, for_host: bool = False) -> Tensor:
        """Return the result.

        Args:
            for_host: whether the host reads the result next. If so, a result on a GPU is complete on return; otherwise
                only the current stream waits for it.
        """
        with phase("exchange"):
            if self._result.device.type == "cpu":
                self._monitor.wait(self._work, self._what, self._number)
            else:
                self._work.wait()
                if for_host:
                    self._monitor.wait_on_device(self._work, self._what, self._number)
        del self._work, self._read
        return self._result


def all_to_all(
    group: dist.ProcessGroup, rows: Tensor, receive: Splits = None, send: Splits = None, what: str = "exchange of rows"
) -> Pending:
    """Start ``all_to_all_single``. `Pending.wait` returns the rows or raises a `PeerError` that names missing ranks.

    Args:
        rows: rows sorted by destination rank.
        receive, send: number of rows from and to each rank; None for equal parts.
        what: name of the collective in errors.
    """
    rows = rows.contiguous()
    out = memory.empty((rows.shape[0] if receive is None else sum(receive), *rows.shape[1:]), rows)
    num_rows = rows.shape[0]
    kept = num_rows // group.size() if send is None else send[group.rank()]
    sent = rows.nbytes // num_rows * (num_rows - kept) if num_rows else 0
    return _start(group, what, sent, dist.all_to_all_single, out, rows, receive, send)


def all_gather(group: dist.ProcessGroup, part: Tensor, what: str = "gathering of rows") -> Pending:
    """Start ``all_gather_into_tensor``: [n, ...] on each of W ranks -> [W * n, ...]. Errors as in `all_to_all`."""
    part = part.contiguous()
    out = memory.empty((group.size() * part.shape[0], *part.shape[1:]), part)
    return _start(group, what, part.nbytes * (group.size() - 1), _gather_into, out, part)


def all_reduce(
    group: dist.ProcessGroup, value: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, what: str = "reduction"
) -> Pending:
    """Start ``all_reduce`` in place. Errors as in `all_to_all`."""
    return _start(group, what, 2 * value.nbytes * (group.size() - 1) // group.size(), dist.all_reduce, value, op)


def broadcast(group: dist.ProcessGroup, value: Tensor, source: int, what: str = "broadcast") -> Pending:
    """Start ``broadcast`` in place from rank ``source`` of the group. Errors as in `all_to_all`."""
    others = group.size() - 1 if group.rank() == source else 0
    return _start(group, what, value.nbytes * others, dist.broadcast, value, dist.get_global_rank(group, source))


def reduce(group: dist.ProcessGroup, value: Tensor, target: int, what: str = "reduction") -> Pending:
    """Start ``reduce`` in place to rank ``target`` of the group. Errors as in `all_to_all`.

    On other ranks, ``value`` is undefined afterwards.
    """
    sent = 0 if group.rank() == target else value.nbytes
    return _start(group, what, sent, dist.reduce, value, dist.get_global_rank(group, target))


def fence(group: dist.ProcessGroup, device: torch.device, for_host: bool = False) -> None:
    """Wait until all ranks have finished the work that they started before this call.

    Args:
        for_host: whether the host waits; otherwise only the current stream does. On the CPU, the host always waits.

    Raises:
        PeerError: another rank failed, is gone or does not respond.
    """
    all_reduce(group, torch.zeros(1, dtype=torch.int32, device=device), what="fence").wait(for_host)


def _start(
    group: dist.ProcessGroup, what: str, sent: int, collective: Callable[..., Any], result: Tensor, *arguments: Any
) -> Pending:
    """Start ``collective(result, *arguments)``. Raise a PeerError if a connection broke earlier."""
    monitor = monitor_of(group)
    try:
        work = collectives.start(collective, result, *arguments, group=group)
    except RuntimeError as error:
        is_broken = "onnection" in str(error) or "imed out" in str(error)
        if not is_broken and not isinstance(error, dist.DistBackendError):
            raise
        raise monitor.broken(error, what, monitor.started + 1, time.monotonic()) from error
    return Pending(monitor, work, what, sent, result, arguments)
