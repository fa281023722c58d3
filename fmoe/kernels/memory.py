"""Memory of the CPU that is used again from step to step: for rows, and for the gradients of stacked weights.

glibc takes every large block from the system and gives it back, and the pages of a fresh one are mapped and cleared as
they are first written. 32 MB of rows are gathered in 35 ms into fresh memory and in 10 ms into memory used before; a
gradient of 256 MiB costs 112 ms fresh and 9 ms reused. A layer has a dozen blocks of rows, of much the same sizes in
every step, so some are kept for the next caller. A gradient's memory is kept with its parameter.

One rule holds for both (`_is_free`): memory is handed out again once nothing else refers to its storage, no other
process can see it, and it still is as allocated here. Exporting a tensor (numpy, DLPack, a storage object) adds a
reference; sharing it with another process takes its memory out of here for good.
"""

import math
import os
import sys
import threading

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_SMALLEST = 1 << 20  # bytes; malloc keeps smaller blocks itself
_PATIENCE = 64  # blocks taken since one was last of use: then it goes back to the system

_lock = threading.Lock()  # of all below: threads must not find the same memory free
_blocks: dict[Tensor, int] = {}  # and when it was last taken
_gradients = WeakTensorKeyDictionary()  # of each parameter the last one
_taken = 0


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """As ``like.new_empty(shape)``, if it can be in memory used before.

    The result is the caller's to give away: as long as anything refers to its memory it is not handed out again.
    """
    num_bytes = math.prod(shape, start=like.element_size())
    if num_bytes < _SMALLEST or not is_plain(like):
        return like.new_empty(shape)
    block = _take(num_bytes)
    return block[:num_bytes].view(like.dtype).view(shape)


def empty_gradient(parameter: Tensor) -> Tensor:
    """As ``torch.empty_like(parameter)``, contiguous, in the memory of its last gradient if that memory is free:
    after ``zero_grad(set_to_none=True)``, or once Megatron's main_grad has let go of it."""
    if parameter.device.type != "cpu" or parameter.nbytes < _SMALLEST or not parameter.is_contiguous():
        return torch.empty_like(parameter, memory_format=torch.contiguous_format)
    with _lock:
        block = _gradients.get(parameter)
        if block is None or block.shape != parameter.shape or block.dtype != parameter.dtype or not _is_free(block):
            block = _gradients[parameter] = torch.empty_like(parameter, requires_grad=False)
        return block.detach()  # another tensor over the same memory before the lock is let go


def gather(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]`` into `empty` memory, where autograd does not look on."""
    if torch.is_grad_enabled() or not is_plain(rows):
        return rows.index_select(0, index)
    return torch.index_select(rows, 0, index, out=empty((index.shape[0], *rows.shape[1:]), rows))


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor is plain memory of the CPU: not a fake tensor, a traced one or a shard."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _take(num_bytes: int) -> Tensor:
    """The smallest free block that is large enough and not twice that, or a new one."""
    global _taken
    with _lock:
        _taken += 1
        free = [block for block in _blocks if _is_free(block)]
        fitting = [block for block in free if num_bytes <= block.nbytes < 2 * num_bytes]
        block = min(fitting, key=lambda b: b.nbytes, default=None)
        if block is None:
            for old in list(_blocks):
                if _taken - _blocks[old] > _PATIENCE and (_is_free(old) or not _is_own(old)):
                    del _blocks[old]
            # Sizes change from step to step by what the router decides: a little more fits the next one too.
            block = torch.empty(num_bytes + num_bytes // 8, dtype=torch.uint8, device="cpu")
        _blocks[block] = _taken
        return block.detach()


def _is_free(block: Tensor) -> bool:
    return _references(block) == _ALONE and _is_own(block)


def _is_own(block: Tensor) -> bool:
    """Return whether the block still has its first memory: sharing moves it to where other processes write, without a
    count of them, and resizing replaces it."""
    storage = block.untyped_storage()
    return storage.nbytes() == block.nbytes and not storage.is_shared()


def _references(block: Tensor) -> tuple[int, int]:
    """To the block's storage, by torch and by Python: a storage object adds one of torch's, however often it is
    referred to."""
    storage = block.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _after_fork() -> None:
    """Another thread of the parent may hold the lock, and the child has no such thread to release it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
_ALONE = _references(torch.empty(0, dtype=torch.uint8, device="cpu"))
