"""CPU memory that is reused from step to step, for rows and for the gradients of stacked weights.

glibc returns a large block to the system as soon as it is freed. The system maps and clears the pages of a new block
when they are first written. Gathering 32 MB of rows takes 35 ms into new memory and 10 ms into reused memory. Writing
256 MiB of gradients takes 112 ms into new memory and 9 ms into reused memory. Therefore blocks for rows are kept for
the next caller, and the memory of a gradient is kept with its parameter.

Memory is reused only under three conditions. Nothing else refers to its storage, no other process can see it, and its
storage is still the one allocated here. Exporting a tensor (numpy, DLPack, a storage object) adds a reference.
"""

import math
import os
import sys
import threading

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_SMALLEST = 1 << 20  # bytes; malloc keeps smaller blocks itself
_PATIENCE = 64  # a free block last taken more requests ago than this returns to the system at the next new block

_lock = threading.Lock()  # guards the variables below: two threads must not take the same memory
_blocks: dict[Tensor, int] = {}  # blocks, with `_taken` at the time each was last taken
_gradients = WeakTensorKeyDictionary()  # memory of each parameter's last gradient
_taken = 0  # number of blocks taken so far


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return ``like.new_empty(shape)``, in reused memory if possible.

    The memory is not reused again as long as anything refers to it.
    """
    num_bytes = math.prod(shape, start=like.element_size())
    if num_bytes < _SMALLEST or not is_plain(like):
        return like.new_empty(shape)
    block = _take(num_bytes)
    return block[:num_bytes].view(like.dtype).view(shape)


def empty_gradient(parameter: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor like ``parameter``, in the memory of its last gradient if that is free.

    The memory is free after ``zero_grad(set_to_none=True)``, or once Megatron has added the gradient to
    ``main_grad``.
    """
    if parameter.device.type != "cpu" or parameter.nbytes < _SMALLEST or not parameter.is_contiguous():
        return torch.empty_like(parameter, memory_format=torch.contiguous_format)
    with _lock:
        block = _gradients.get(parameter)
        if block is None or block.shape != parameter.shape or block.dtype != parameter.dtype or not _is_free(block):
            block = _gradients[parameter] = torch.empty_like(parameter, requires_grad=False)
        return block.detach()  # a reference to the memory, taken under the lock, keeps it from other threads


def gather(rows: Tensor, index: Tensor) -> Tensor:
    """Return ``rows[index]``. If autograd is off and the rows are plain (`is_plain`), use memory from `empty`."""
    if torch.is_grad_enabled() or not is_plain(rows):
        return rows.index_select(0, index)
    return torch.index_select(rows, 0, index, out=empty((index.shape[0], *rows.shape[1:]), rows))


def is_plain(tensor: Tensor) -> bool:
    """Return whether this is a plain CPU tensor outside torch.compile.

    Subclasses of `torch.Tensor` (parameters, fake tensors, DTensors) are not plain.
    """
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _take(num_bytes: int) -> Tensor:
    """Return the smallest free block of at least ``num_bytes`` and less than twice that, or a new block."""
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
            # Sizes vary from step to step with the routing: some extra bytes make the block fit the next step too.
            block = torch.empty(num_bytes + num_bytes // 8, dtype=torch.uint8, device="cpu")
        _blocks[block] = _taken
        return block.detach()


def _is_free(block: Tensor) -> bool:
    return _references(block) == _ALONE and _is_own(block)


def _is_own(block: Tensor) -> bool:
    """Return whether the block still has its original memory, neither resized nor shared with another process."""
    storage = block.untyped_storage()
    return storage.nbytes() == block.nbytes and not storage.is_shared()


def _references(block: Tensor) -> tuple[int, int]:
    """Return the number of references to the block's storage, by torch and by Python."""
    storage = block.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _after_fork() -> None:
    """Replace the lock in a forked child, which lacks the thread that may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
_ALONE = _references(torch.empty(0, dtype=torch.uint8, device="cpu"))
