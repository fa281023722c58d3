"""Memory for rows under way, used again on the CPU.

glibc takes every large block from the system and gives it back, and the pages of a fresh one are mapped and cleared as
they are first written: 32 MB of rows are gathered in 35 ms into fresh memory and in 10 ms into memory used before. A
layer has a dozen such blocks, of much the same sizes in every step. So some are kept, and handed out again once no
tensor is over them.
"""

import threading

import torch
from torch import Tensor

_SMALLEST = 1 << 20  # bytes; malloc keeps smaller blocks itself
_PATIENCE = 64  # blocks taken since one was last of use: then it goes back to the system

_lock = threading.Lock()
_blocks: dict[Tensor, int] = {}  # and when it was last taken
_taken = 0


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """As ``like.new_empty(shape)``, if it can be in memory used before.

    The result is the caller's to give away: as long as anything refers to its memory it is not handed out again.
    """
    num_bytes = like.element_size()
    for length in shape:
        num_bytes *= length
    if num_bytes < _SMALLEST or not is_plain(like):
        return like.new_empty(shape)
    block = _take(num_bytes)
    return block[:num_bytes].view(like.dtype).view(shape)


def gather(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]`` into `empty` memory, where autograd does not look on."""
    if torch.is_grad_enabled() or not is_plain(rows):
        return rows.index_select(0, index)
    return torch.index_select(rows, 0, index, out=empty((index.shape[0], *rows.shape[1:]), rows))


def is_plain(tensor: Tensor) -> bool:
    """Whether it is memory of the CPU and nothing that stands for it: a fake one, a traced one, a shard."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _take(num_bytes: int) -> Tensor:
    """The smallest free block that is large enough and not twice that, or a new one."""
    global _taken
    with _lock:
        _taken += 1
        free = [block for block in _blocks if _users(block) == 1]
        fitting = [block for block in free if num_bytes <= block.nbytes < 2 * num_bytes]
        block = min(fitting, key=lambda b: b.nbytes, default=None)
        if block is None:
            for old in free:
                if _taken - _blocks[old] > _PATIENCE:
                    del _blocks[old]
            # Sizes change from step to step by what the router decides: a little more fits the next one too.
            block = torch.empty(num_bytes + num_bytes // 8, dtype=torch.uint8, device="cpu")
        _blocks[block] = _taken
        return block.detach()  # another user of its memory before the lock is let go


def _users(block: Tensor) -> int:
    """Tensors over the block's memory, itself included."""
    storage = block.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # less the storage object of this look
