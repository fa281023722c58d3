"""Fused LAMB step on a GPU, with a few launches of the kernels in ``cuda/lamb.cu`` for any number of tensors.

Shape letters: C chunks, O blocks (matrices, experts of a stack).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmoe.kernels import backends
from fmoe.kernels.cuda import launch
from fmoe.kernels.cuda.instances import DTYPES
from fmoe.kernels.cuda.launch import Geometry

Slot = Any  # `fmoe.optim.trust.Slot`, which is on a higher level
States = dict[Tensor, dict[str, Any]]  # of tensors, as in a torch.optim.Optimizer

CHUNK = 1 << 16  # elements per thread block

_WORDS = 6  # of struct Chunk in cuda/lamb.cu


def takes(slots: Sequence[Slot], state: States) -> bool:
    """Return whether the kernels are loaded for the slots' device, and support their tensors, gradients and moments."""
    device = slots[0].tensor.device
    if not backends.cuda_is_loaded(device):
        return False
    for tensor in {slot.tensor: None for slot in slots}:
        gradient = tensor.grad
        moments = [state[tensor][name] for name in ("exp_avg", "exp_avg_sq")]
        if gradient is None or tensor.dtype not in DTYPES or gradient.dtype not in (tensor.dtype, torch.float32):
            return False
        if any(m.dtype != torch.float32 for m in moments):
            return False
        if any(t.device != device or not t.is_contiguous() for t in (tensor, gradient, *moments)):
            return False
    return True


@dataclass(frozen=True)
class _Table:
    """Pieces of tensors (`Slot`) that share dtype and gradient dtype, as the kernels read them.

    Attributes:
        slots: pieces in the order of their blocks (`fmoe.optim.Blocks`), those without blocks last.
        chunks: int64 [C, 6], a ``struct Chunk`` of ``cuda/lamb.cu`` per row.
        first: int64 [O + 1] for O blocks; block o has the chunks ``first[o]`` to ``first[o + 1]``, end excluded.
    """

    dtype: torch.dtype
    grad_dtype: torch.dtype
    slots: list[Slot]
    chunks: Tensor
    first: Tensor


class FusedLamb:
    """Fused CUDA kernels that take the steps of one LAMB optimizer."""

    def __init__(self):
        self._key: tuple = ()
        self._tables: list[_Table] = []

    def step(
        self,
        slots: Sequence[Slot],
        state: States,
        squares: Tensor,
        ratios: Tensor,
        reduce: Callable[[], None],
    ) -> None:
        """Update the tensors of ``slots`` and their moments in ``state``.

        Args:
            slots: pieces of tensors that have gradients.
            squares: float64 [2, O] for O blocks (`fmoe.optim.Blocks`); output for the squared norms of weights and of
                updates.
            ratios: float32 [O], output for the trust ratios of stepped blocks.
            reduce: function that sums ``squares`` over ranks, in place.

        Raises:
            RuntimeError: the kernels are not loaded for the device.
        """
        device = squares.device
        start = launch.launcher(device)
        if start is None:
            raise RuntimeError(f"no kernels are loaded for {device}")
        num_blocks = squares.shape[1]
        self._update_tables(slots, state, num_blocks)
        options = [_to(_options(table.slots, state), device) for table in self._tables]
        for number, (table, rows) in enumerate(zip(self._tables, options, strict=True)):
            count = len(table.chunks)
            partial = squares.new_empty(count, 2)
            name = f"fmoe::lamb_measure<{DTYPES[table.dtype]}, {DTYPES[table.grad_dtype]}>"
            start(name, _blocks_of(count, 512, 256), (table.chunks, rows, partial), device)
            if num_blocks:
                sums = squares if number == 0 else torch.empty_like(squares)
                arguments = (partial, table.first, num_blocks, sums)
                start("fmoe::lamb_norms", _blocks_of(-(-num_blocks // 8), 256), arguments, device)
                if number:  # the sums of this table are zero for blocks of other tables
                    squares += sums
        reduce()
        for table, rows in zip(self._tables, options, strict=True):
            geometry = _blocks_of(len(table.chunks), 512)
            inputs = (table.chunks, rows, squares, num_blocks, ratios)
            start(f"fmoe::lamb_update<{DTYPES[table.dtype]}>", geometry, inputs, device)

    def _update_tables(self, slots: Sequence[Slot], state: States, num_blocks: int) -> None:
        addresses = []
        for slot in slots:
            moments = state[slot.tensor]
            tensors = (slot.tensor, slot.gradient, moments["exp_avg"], moments["exp_avg_sq"])
            addresses.append([slot.part.of(tensor).data_ptr() for tensor in tensors])
        key = tuple((id(slot), *pointers) for slot, pointers in zip(slots, addresses, strict=True))
        if key == self._key:
            return
        self._key = key
        self._tables = []
        alike = defaultdict(list)
        for slot, pointers in zip(slots, addresses, strict=True):
            alike[slot.tensor.dtype, slot.gradient.dtype].append((slot, pointers))
        for (dtype, grad_dtype), members in alike.items():
            members.sort(key=lambda member: (not member[0].part.count, member[0].part.block))
            sizes = torch.tensor([dtype.itemsize, grad_dtype.itemsize, 4, 4], dtype=torch.int64, device="cpu")
            rows = []
            per_block = torch.zeros(num_blocks + 1, dtype=torch.int64, device="cpu")
            for number, (slot, pointers) in enumerate(members):
                rows.append(_chunks(slot, number, torch.tensor(pointers, dtype=torch.int64, device="cpu"), sizes))
                if slot.part.count:
                    per_block[1 + slot.part.block :][: slot.part.count] += len(rows[-1]) // slot.part.count
            device = members[0][0].tensor.device
            made = (_to(torch.cat(rows), device), _to(per_block.cumsum(0), device))
            self._tables.append(_Table(dtype, grad_dtype, [slot for slot, _ in members], *made))


def _chunks(slot: Slot, number: int, pointers_4: Tensor, sizes_4: Tensor) -> Tensor:
    """Return the rows of `_Table.chunks` for a slot, block by block: int64 [n, 6]."""
    count = max(slot.part.count, 1)
    length = slot.part.of(slot.tensor).numel() // count
    begin_n = torch.arange(0, length, CHUNK, dtype=torch.int64, device="cpu")
    block_n = torch.arange(count, dtype=torch.int64, device="cpu").repeat_interleave(len(begin_n))
    begin_n = begin_n.repeat(count)
    words = torch.empty(len(begin_n), _WORDS, dtype=torch.int64, device="cpu")
    words[:, :4] = pointers_4 + (block_n * length + begin_n).unsqueeze(1) * sizes_4
    words[:, 4] = (length - begin_n).clamp(max=CHUNK)
    owner_n = block_n + slot.part.block if slot.part.count else torch.full_like(block_n, -1)
    words[:, 5] = (owner_n << 32) | number
    return words


def _options(slots: Sequence[Slot], state: States) -> Tensor:
    rows = []
    for slot in slots:
        group = slot.group
        step = float(state[slot.tensor]["step"])
        beta1, beta2 = group["betas"]
        root = math.sqrt(1 - beta2**step)
        factor = root / (1 - beta1**step)
        trust = group["max_trust"]
        rows.append(
            [
                1 - beta1,
                beta2,
                group["eps"] * root,
                factor,
                group["weight_decay"],
                float(group["lr"]),
                math.inf if trust is None else trust,
                1 - beta2,
            ]
        )
    return torch.tensor(rows, dtype=torch.float32, device="cpu")


def _to(table: Tensor, device: torch.device) -> Tensor:
    # A copy from pinned memory is asynchronous.
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def _blocks_of(count: int, threads: int, shared: int = 0) -> Geometry:
    return Geometry((max(1, count), 1, 1), (threads, 1, 1), shared)
