"""Memory for the gradients of stacked weights, used again from step to step on the CPU.

A stack of experts is large, and glibc takes every large block from the system and gives it back: the pages of a fresh
gradient are mapped and cleared anew in each backward pass, which can cost as much as the GEMMs that fill it (256 MiB:
112 ms fresh, 9 ms reused). So the last gradient's memory is kept with the parameter, and handed out again once nobody
else holds it, that is, after ``zero_grad(set_to_none=True)`` or Megatron's main_grad has let go of it.
"""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_SMALLEST = 1 << 20  # bytes; malloc keeps smaller blocks itself
_buffers = WeakTensorKeyDictionary()


def reused_like(parameter: Tensor) -> Tensor:
    """An uninitialised tensor of the parameter's shape, dtype and device, if it can be in memory used before.

    The result is the caller's to give away: as long as anything refers to its memory it is not handed out again.
    """
    if parameter.device.type != "cpu" or parameter.nbytes < _SMALLEST or not parameter.is_contiguous():
        return torch.empty_like(parameter, memory_format=torch.contiguous_format)
    buffer = _buffers.get(parameter)
    if buffer is None or buffer.shape != parameter.shape or buffer.dtype != parameter.dtype or _users(buffer) > 1:
        buffer = _buffers[parameter] = torch.empty_like(parameter, requires_grad=False)
    return buffer.detach()  # another tensor over the same memory


def _users(buffer: Tensor) -> int:
    """Tensors over the buffer's memory, itself included."""
    storage = buffer.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # less the storage object of this look
