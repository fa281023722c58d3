"""All-to-all by one-sided copies in torch's symmetric memory (NVSHMEM).

``all_to_all_vdev_2d`` brings rows of a rank, sorted by expert, into the order that the experts need.
``all_to_all_vdev_2d_offset`` brings them back. So neither side reorders rows, and the GPU itself reads how many rows to
copy. Rows pass through two buffers per process group, which all layers share. This module has not run on a GPU yet.

Shape letters: see `fmoe.exchange.base`.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from fmoe.exchange.all_to_all import AllToAllExchange, without_last
from fmoe.exchange.collectives import Pending, all_gather, fence
from fmoe.exchange.hops import Counts, Hop, HopCounts, chunk_of
from fmoe.exchange.monitor import monitor_of


class SymmetricExchange(AllToAllExchange):
    """All-to-all by one-sided copies in torch's symmetric memory, which needs NVSHMEM.

    Args:
        group, num_experts, wire_dtype: see `AllToAllExchange`.
        max_rows: see `AllToAllExchange`. Rows sent in more chunks also need smaller buffers.

    Raises:
        UserError: this torch or this machine has no NVSHMEM, or an option is invalid.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        *,
        max_rows: int | None = None,
        wire_dtype: torch.dtype | None = None,
    ):
        super().__init__(group, num_experts, max_rows=max_rows, wire_dtype=wire_dtype)
        # A dry run, on a fake group, counts the memory of another machine.
        missing = None if dist.get_backend(group) == "fake" else why()
        if missing is not None:
            raise UserError(f"exchange='symmetric' is unavailable: {missing}")

    def _exchange_counts(self, count_E: Tensor, flag: int) -> list[Tensor]:
        # All ranks get all counts, so that they agree on the size of their buffers without another collective.
        head = torch.cat([count_E, torch.full_like(count_E[:1], flag)])
        heads = all_gather(self.group, head, "exchange of counts").wait(for_host=True).view(self.ep_size, -1)
        count_WWL = heads[:, :-1].unflatten(1, (self.ep_size, self.num_local_experts))
        capacity = torch.maximum(count_WWL.sum((1, 2)), count_WWL.sum((0, 2))).max()
        send = torch.cat([count_WWL[self.ep_rank], capacity.expand(self.ep_size, 1)], 1)
        return [send, torch.cat([count_WWL[:, self.ep_rank], heads[:, -1:]], 1)]

    def _hops(self, tensors: list[Tensor], on_host: list[Counts]) -> list[HopCounts]:
        send, receive = (without_last(counts) for counts in on_host)
        sent, received = (counts[:, :-1] for counts in tensors)
        key_WL = torch.arange(received.shape[1], device=received.device, dtype=torch.int64).expand_as(received)
        capacity = on_host[0][0][-1]
        return [_SymmetricCounts(self.group, send, receive, received, key_WL, sent, capacity)]


@dataclass(frozen=True, eq=False)
class _SymmetricCounts(HopCounts):
    """`HopCounts` for symmetric memory."""

    send: Tensor  # ``send_PX`` on the device
    capacity: int  # upper bound on the rows that any rank sends or receives

    def hop(self, wire_dtype: torch.dtype | None = None) -> "_SymmetricHop":
        send = [sum(row) for row in self.send_PX]
        receive = [sum(row) for row in self.receive_PX]
        return _SymmetricHop(self.group, send, receive, None, wire_dtype, counts=self)

    def chunk(self, chunk: int, num_chunks: int) -> "_SymmetricCounts":
        if num_chunks == 1:
            return self
        part = super().chunk(chunk, num_chunks)
        sent = chunk_of(self.send, chunk, num_chunks)
        # Each segment is rounded up once.
        capacity = min(self.capacity, -(-self.capacity // num_chunks) + self.key_PX.numel())
        return _SymmetricCounts(self.group, part.send_PX, part.receive_PX, part.receive, self.key_PX, sent, capacity)


@dataclass(frozen=True, eq=False)
class _SymmetricHop(Hop):
    """`Hop` in symmetric memory, to the experts' ranks and back. Rows arrive there sorted by expert."""

    counts: _SymmetricCounts | None = None

    def launch(self, rows: Tensor, back: bool) -> Pending:
        counts = self.counts
        rank = self.group.rank()
        assert counts is not None
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        sent = (sum(send) - send[rank]) * (rows.nbytes // len(rows) if len(rows) else 0)
        if not counts.capacity or not rows.shape[1:].numel():
            return _Done(rows.new_empty(sum(receive), *rows.shape[1:]))
        workspaces = _workspaces.setdefault(self.group, {})
        workspace = workspaces.setdefault(rows.device, _Workspace(self.group, rows.device))
        out = workspace.move(rows, counts, sum(receive), back)
        monitor_of(self.group).traffic.sent += sent
        return _Done(out)


class _Done(Pending):
    """`Pending` for work on the current stream, for which the host does not wait."""

    def __init__(self, result: Tensor):
        self._result = result

    def wait(self, for_host: bool = False) -> Tensor:
        return self._result


class _Workspace:
    """Symmetric memory of a group: rows to send, rows received, and the splits of both."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group = weakref.ref(group)
        self._device = device
        self._buffers: list[Tensor] = []

    def move(self, rows: Tensor, counts: _SymmetricCounts, num_out: int, back: bool) -> Tensor:
        """Send rows to their experts' ranks or, if ``back``, from there. Return the ``num_out`` rows received."""
        group = self._group()
        assert group is not None
        shape = (counts.capacity, rows.shape[1:].numel())
        num_bytes = shape[0] * shape[1] * rows.element_size()
        num_splits = counts.key_PX.numel()
        if not self._buffers or self._buffers[0].numel() < num_bytes or self._buffers[2].shape[1] < num_splits:
            self._grow(group, num_bytes, num_splits)
        else:  # copies are one-sided: all ranks must have finished the previous ones, which used these buffers
            fence(group, self._device)
        sent, received = (buffer[:num_bytes].view(rows.dtype).view(shape) for buffer in self._buffers[:2])
        splits, splits_out = (buffer.view(-1)[: 2 * num_splits].view(2, num_splits) for buffer in self._buffers[2:])
        sent[: len(rows)].copy_(rows.reshape(len(rows), shape[1]))
        ops = torch.ops.symm_mem
        if back:  # segments are sorted by local expert and then by rank
            splits[0].copy_(counts.receive.t().reshape(-1))
            splits[1].copy_(splits[0].cumsum(0) - splits[0])
            ops.all_to_all_vdev_2d_offset(sent, received, splits, splits_out, group.group_name)
        else:
            splits[0].copy_(counts.send.reshape(-1))
            ops.all_to_all_vdev_2d(sent, received, splits[0], splits_out, group.group_name)
        return received[:num_out].clone().view(num_out, *rows.shape[1:])

    def _grow(self, group: dist.ProcessGroup, num_bytes: int, num_splits: int) -> None:
        """Replace the buffers by larger ones, on every rank at the same time."""
        old = self._buffers
        num_bytes = max(1 << (num_bytes - 1).bit_length(), old[0].numel() if old else 0)
        num_splits = max(num_splits, old[2].shape[1] if old else 0)
        fence(group, self._device, for_host=True)
        self._buffers = []
        del old
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written in training
            rows = [empty(group, (num_bytes,), torch.uint8, self._device) for _ in range(2)]
            splits = [empty(group, (2, num_splits), torch.int64, self._device) for _ in range(2)]
        self._buffers = [*rows, *splits]


_workspaces: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _Workspace]]" = (
    weakref.WeakKeyDictionary()
)


def why() -> str | None:
    """Return the reason why symmetric memory cannot be used on this machine; None if it can."""
    try:
        from torch.distributed import _symmetric_memory as memory
    except ImportError as error:
        return f"torch {torch.__version__} has no symmetric memory ({error})"
    if not hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d_offset"):
        return f"torch {torch.__version__} has no all_to_all_vdev_2d_offset"
    if not torch.cuda.is_available() or not memory.is_nvshmem_available():
        return "torch finds no GPU with NVSHMEM (torch.distributed._symmetric_memory.is_nvshmem_available)"
    return None


def empty(group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor in symmetric memory. Every rank of the group must call it at the same time."""
    from torch.distributed import _symmetric_memory as memory

    if memory.get_backend(device) != "NVSHMEM":
        memory.set_backend("NVSHMEM")
    made: Any = memory.empty(*shape, dtype=dtype, device=device)
    memory.rendezvous(made, group)
    return made
