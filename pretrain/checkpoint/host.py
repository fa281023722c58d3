"""Host memory for snapshots, reused from save to save: mapping fresh pages takes longer than copying into them."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostBuffers:
    """Reusable host copies of tensors, one buffer per tensor.

    The copies between two calls of `finish` form a snapshot. They overwrite the previous snapshot, which must be on
    disk already.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple, Tensor] = {}
        self._used: set[tuple] = set()
        self._devices: set[torch.device] = set()

    def reserve(self, tensors: Iterable[tuple[tuple, Tensor]]) -> None:
        """Allocate buffers for (key, tensor) pairs and touch their pages. May run in a thread during training."""
        for key, data in tensors:
            self._buffers[key] = _memory(data).zero_()

    def copy(self, key: tuple, data: Tensor) -> Tensor:
        """Return a contiguous copy of ``data`` on the host, complete after `finish`.

        Args:
            key: key of the buffer; the same in every snapshot, and unique within a snapshot.
        """
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
            buffer = self._buffers[key] = _memory(data)
        buffer.copy_(data, non_blocking=True)
        if data.is_cuda:
            self._devices.add(data.device)
        self._used.add(key)
        return buffer

    def finish(self) -> None:
        """Wait for the copies. Free the buffers of tensors that were not copied since the last call."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()
        for key in self._buffers.keys() - self._used:
            del self._buffers[key]
        self._used.clear()


def _memory(data: Tensor) -> Tensor:
    # A device copy is asynchronous only into pinned memory.
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda, device="cpu")
