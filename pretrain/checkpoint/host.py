"""Host memory for snapshots, used again from save to save: mapping fresh pages takes longer than copying into them."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostBuffers:
    """Copies tensors to the host, each into memory of its own that is kept.

    One snapshot at a time: the next one overwrites it, so whoever writes it has to be done by then.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple, Tensor] = {}
        self._used: set[tuple] = set()
        self._devices: set[torch.device] = set()

    def reserve(self, tensors: Iterable[tuple[tuple, Tensor]]) -> None:
        """Takes the memory for (key, data) in advance and touches its pages. May run in a thread beside training."""
        for key, data in tensors:
            self._buffers[key] = _memory(data).zero_()

    def copy(self, key: tuple, data: Tensor) -> Tensor:
        """A contiguous copy of ``data`` on the host, complete after `finish`.

        Args:
            key: of the memory; the same from snapshot to snapshot, different within one.
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
        """Waits for the copies; frees the memory of tensors that were not copied since the last call."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()
        for key in self._buffers.keys() - self._used:
            del self._buffers[key]
        self._used.clear()


def _memory(data: Tensor) -> Tensor:
    # Only into pinned memory does a device copy while the host goes on to the next tensor.
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda, device="cpu")
