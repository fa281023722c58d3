"""Compressed averages of gradients: communication hooks with memories of what they have not sent.

A compressor is a hook of torch's DDP (``model.register_comm_hook(compressor, compress)``) or of a recipe's run
(``parallel.grad_compress``). It sends less than an all-reduce of a bucket of gradients would, and adds what it did not
send to the next step's gradient (error feedback). `DGC` and `OneBit` follow their papers; `PowerSGD` is torch's.

Links between nodes at hundreds of Gbit/s have made these methods unnecessary for most clusters. There, prefer
``parallel.shard`` with overlapped reductions.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.bits import pack_bits, unpack_bits
from fmoe.errors import UserError
from fmoe.parallel.buckets import copy_back
from fmoe.parallel.gradients import has_mark
from fmoe.runtime import collectives, ownership

Numbers = dict[str, Any]  # numbers, strings and tensors in dicts


class Bucket(Protocol):
    """Gradients that are reduced together; torch's ``dist.GradBucket`` has these methods."""

    def buffer(self) -> Tensor:
        """Return the flat tensor of which the gradients are views."""

    def gradients(self) -> list[Tensor]:
        """Return the gradients."""

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the gradients."""

    def index(self) -> int:
        """Return the number of the bucket."""

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""


class Memory(NamedTuple):
    """What a compressor remembers of elements of a parameter.

    Attributes:
        name: kind of memory, such as ``unsent``.
        parameter: the parameter.
        start: offset of the first element in the flattened parameter.
        values: flat tensor, a view of the memory.
        is_shared: True if ranks remember no different values of an element; False if each rank has its own.
        is_saved: True if this rank saves it: False on all ranks but one if all have the same values.
    """

    name: str
    parameter: Tensor
    start: int
    values: Tensor
    is_shared: bool = False
    is_saved: bool = True


class Compressor:
    """Base class of compressors.

    Args:
        group: ranks over which gradients are averaged.
        warmup: number of steps in which gradients are averaged without compression.

    Attributes:
        step: number of steps made.
    """

    min_warmup = 0

    def __init__(self, group: dist.ProcessGroup, warmup: int = 0):
        if warmup < self.min_warmup:
            raise UserError(f"warmup={warmup} must be at least {self.min_warmup}")
        self.group = group
        self.warmup = warmup
        self.step = 0
        self._step_before = 0
        self._values: dict[tuple[str, Tensor], Tensor] = {}
        self._before: dict[tuple[str, Tensor], Tensor] = {}

    def reduce(self, bucket: Bucket) -> None:
        """Replace the gradients of a bucket by their mean over the ranks of the group. Collective."""
        raise NotImplementedError

    def __call__(self, bucket: Bucket) -> None:
        """Reduce a bucket, and count the step after its last bucket. Collective."""
        if self.group.size() > 1:
            if self.step < self.warmup:
                average(bucket.buffer(), self.group)
                self.observe(bucket)
            else:
                self.reduce(bucket)
        if bucket.is_last():
            self.step += 1

    def observe(self, bucket: Bucket) -> None:
        """Follow a bucket that was averaged without compression."""

    def allocate(self, bucket: Bucket) -> None:
        """Allocate the memories of a bucket, so that a checkpoint can be loaded before the first step."""

    def memories(self) -> Iterator[Memory]:
        """Yield all memories."""
        for (name, parameter), values in self._values.items():
            yield Memory(name, parameter, 0, values.view(-1))

    def numbers(self) -> Numbers:
        """Return the rest of the state, equal on all ranks of the group: numbers, strings and tensors in dicts."""
        return {"step": self.step}

    def set_numbers(self, numbers: Numbers) -> None:
        """Restore the result of `numbers`."""
        self.step = numbers["step"]

    def begin(self) -> None:
        """Begin a step that `undo` can take back."""
        self._before = {}
        self._step_before = self.step

    def undo(self) -> None:
        """Restore the state of the time of `begin`, for a step that is skipped or computed again."""
        self.step = self._step_before
        for key, values in self._before.items():
            self._values[key].copy_(values)
        self._before = {}

    def _memory(self, name: str, parameter: Tensor) -> Tensor:
        """Return a float32 memory of a parameter's shape, to be changed in place; first zeros."""
        key = (name, parameter)
        if key not in self._values:
            self._values[key] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        if key not in self._before:
            self._before[key] = self._values[key].clone()
        return self._values[key]


def compress(compressor: Compressor, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Call a compressor as a communication hook of torch's DDP."""
    if bucket.index() == 0:
        compressor.begin()
    compressor(bucket)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _parts(bucket: Bucket) -> list[tuple[Tensor, Tensor, slice]]:
    """Return each parameter of a bucket with its gradient, and the gradient's range of the bucket's buffer."""
    parts = []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        begin = int(gradient.storage_offset()) - int(bucket.buffer().storage_offset())
        parts.append((parameter, gradient, slice(begin, begin + gradient.numel())))
    return parts


def _gathered(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows [1, n] of all ranks of a group, [ranks, n]."""
    rows = row.new_empty(group.size(), row.shape[1])
    collectives.run(dist.all_gather_into_tensor, rows, row, group=group)
    return rows


def average(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Average a tensor over the ranks of a group, in place."""
    collectives.run(dist.all_reduce, buffer, group=group)
    buffer.div_(group.size())


class DGC(Compressor):
    """Deep Gradient Compression (Lin et al., arXiv 1712.01887): the largest accumulated elements of each parameter.

    With momentum correction, momentum factor masking, local clipping, and a density that falls in a warm-up. The k
    largest elements are chosen exactly, not from a sample. The momentum is the compressor's: use an optimizer without
    momentum.

    Args:
        group: ranks over which gradients are averaged.
        density: share of a parameter's elements that a rank sends per step (at least one element).
        momentum: coefficient of the local momentum; 0 for none.
        warmup: number of steps in which the share falls exponentially from 1/4 to ``density``.
        clip: bound on the norm of a bucket's gradients over all ranks, of which a rank may have the share
            1/sqrt(ranks); None for no bound.
        min_numel: parameters with fewer elements are averaged whole.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        density: float = 0.001,
        momentum: float = 0.9,
        warmup: int = 0,
        clip: float | None = None,
        min_numel: int = 0,
    ):
        super().__init__(group)
        if not 0 < density <= 1:
            raise UserError(f"density={density} must be above 0 and at most 1")
        if not 0 <= momentum < 1:
            raise UserError(f"momentum={momentum} must be at least 0 and below 1")
        if warmup < 0:
            raise UserError(f"warmup={warmup} must be at least 0")
        if clip is not None and clip <= 0:
            raise UserError(f"clip={clip} must be above 0")
        self.density = density
        self.momentum = momentum
        self.falling = warmup
        self.clip = clip
        self.min_numel = min_numel

    @property
    def current_density(self) -> float:
        """Share of the elements in this step."""
        left = max(0.0, 1 - self.step / self.falling) if self.falling else 0.0
        return self.density * (0.25 / self.density) ** left

    def allocate(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters():
            if parameter.numel() >= self.min_numel:
                self._memory("velocity", parameter)
                self._memory("unsent", parameter)

    def reduce(self, bucket: Bucket) -> None:
        buffer = bucket.buffer()
        if self.clip is not None:
            limit = self.clip / math.sqrt(self.group.size())
            buffer.mul_((limit / (torch.linalg.vector_norm(buffer) + 1e-6)).clamp(max=1.0))
        values: list[Tensor] = []
        indices: list[Tensor] = []
        whole: list[Tensor] = []
        for parameter, gradient, where in _parts(bucket):
            if parameter.numel() < self.min_numel:
                whole.append(gradient)
                continue
            own, chosen = self._take(parameter, gradient)
            values.append(own)
            indices.append(chosen + where.start)
        means = torch.cat([gradient.reshape(-1) for gradient in whole]) if whole else None
        if means is not None:
            average(means, self.group)
        buffer.zero_()
        if values:
            chosen = torch.cat(indices).view(1, -1)
            if buffer.numel() < 1 << 31:
                chosen = chosen.int()
            all_values = _gathered(torch.cat(values).view(1, -1), self.group)
            all_indices = _gathered(chosen, self.group)
            total = buffer.float()
            for of_rank, indices_of_rank in zip(all_values, all_indices, strict=True):
                # One rank after the other: a GPU adds values of one index in any order.
                total.index_add_(0, indices_of_rank, of_rank, alpha=1 / self.group.size())
            buffer.copy_(total)
        if means is not None:
            copy_back(means, whole)

    def _take(self, parameter: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Accumulate a gradient; return values and flat indices of the elements to send, and reset these."""
        u = self._memory("velocity", parameter).view(-1)
        v = self._memory("unsent", parameter).view(-1)
        u.mul_(self.momentum).add_(gradient.reshape(-1))
        v.add_(u)
        count = min(v.numel(), math.ceil(self.current_density * v.numel()))
        indices = v.abs().topk(count, sorted=False).indices
        values = v[indices]
        u[indices] = 0.0
        v[indices] = 0.0
        return values, indices


class OneBit(Compressor):
    """Signs of the momentum (1-bit Adam, arXiv 2102.02888; 1-bit LAMB, arXiv 2104.06069).

    Each rank sends the signs of its momentum plus error, with a mean magnitude per 1,024 elements, to the rank that
    averages this part of the bucket, which sends the signs of the mean plus its own error to all. The gradient passed
    on is the one for which an optimizer's momentum becomes this mean: ``(m - beta1 m_before) / (1 - beta1)``. Do not
    clip it. Use an optimizer with the same ``beta1`` whose second moments stay as they are after the warm-up
    (`fmoe.optim.OneBitAdam`).

    Args:
        group: ranks over which gradients are averaged.
        warmup: number of steps without compression, at least 2.
        beta1: decay rate of the momentum.
    """

    min_warmup = 2

    def __init__(self, group: dist.ProcessGroup, warmup: int = 100, beta1: float = 0.9):
        super().__init__(group, warmup)
        if not 0 <= beta1 < 1:
            raise UserError(f"beta1={beta1} must be at least 0 and below 1")
        self.beta1 = beta1
        self._server: dict[int, tuple[Tensor, list[tuple[Tensor, int, slice]]]] = {}
        self._server_before: dict[int, Tensor] = {}

    def observe(self, bucket: Bucket) -> None:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._memory("momentum", parameter).lerp_(gradient.float(), 1 - self.beta1)

    def allocate(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters():
            self._memory("momentum", parameter)
            self._memory("error", parameter)
        self._server_error(bucket)

    def memories(self) -> Iterator[Memory]:
        for memory in super().memories():
            if memory.name == "momentum":  # the mean, which all ranks have
                yield memory._replace(is_shared=True, is_saved=self.group.rank() == 0)
            else:
                yield memory
        for error, ranges in self._server.values():
            for parameter, start, where in ranges:
                yield Memory("server_error", parameter, start, error[where], is_shared=True)

    def begin(self) -> None:
        super().begin()
        self._server_before = {index: error.clone() for index, (error, _) in self._server.items()}

    def undo(self) -> None:
        super().undo()
        for index, error in self._server_before.items():
            self._server[index][0].copy_(error)

    def reduce(self, bucket: Bucket) -> None:
        size = self.group.size()
        buffer = bucket.buffer()
        chunk = _chunk(buffer.numel(), size)
        sent = torch.zeros(chunk * size, dtype=torch.float32, device=buffer.device)
        parts = _parts(bucket)
        for parameter, gradient, where in parts:
            momentum = self._memory("momentum", parameter).lerp(gradient.float(), 1 - self.beta1)
            sent[where] = (momentum + self._memory("error", parameter)).view(-1)
        # To the rank that averages a part: signs and magnitudes of all ranks.
        bits, scales, rounded = _signs(sent.view(size, chunk))
        for parameter, _, where in parts:
            self._memory("error", parameter).view(-1).copy_(sent[where] - rounded.view(-1)[where])
        own_bits = torch.empty_like(bits)
        own_scales = torch.empty_like(scales)
        collectives.run(dist.all_to_all_single, own_bits, bits, group=self.group)
        collectives.run(dist.all_to_all_single, own_scales, scales, group=self.group)
        mean = _values(own_bits, own_scales).mean(0)
        # And back to all ranks.
        server_error, ranges = self._server_error(bucket)
        mean.add_(server_error)
        bits, scales, rounded = _signs(mean.view(1, chunk))
        for _, _, where in ranges:  # not of the padding
            server_error[where] = mean[where] - rounded.view(-1)[where]
        result = _values(_gathered(bits, self.group), _gathered(scales, self.group)).view(-1)
        for parameter, gradient, where in parts:
            momentum = self._memory("momentum", parameter)
            new = result[where].view(momentum.shape)
            gradient.copy_((new - self.beta1 * momentum) / (1 - self.beta1))
            momentum.copy_(new)

    def _server_error(self, bucket: Bucket) -> tuple[Tensor, list[tuple[Tensor, int, slice]]]:
        """Return the error of the part of a bucket that this rank averages, and the ranges of parameters in it."""
        index = bucket.index()
        if index not in self._server:
            buffer = bucket.buffer()
            chunk = _chunk(buffer.numel(), self.group.size())
            first = self.group.rank() * chunk
            error = torch.zeros(chunk, dtype=torch.float32, device=buffer.device)
            ranges = []
            for parameter, _, where in _parts(bucket):
                low = max(where.start, first)
                high = min(where.stop, first + chunk)
                if low < high:
                    ranges.append((parameter, low - where.start, slice(low - first, high - first)))
            self._server[index] = (error, ranges)
        return self._server[index]


_BLOCK = 1024  # elements with a common magnitude


def _chunk(numel: int, ranks: int) -> int:
    """Return the number of elements that each of ``ranks`` averages, a multiple of `_BLOCK`."""
    return _BLOCK * -(-numel // (_BLOCK * ranks))


def _signs(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round rows of values to their signs, times the mean magnitude of a block.

    Returns:
        Bits [rows, columns / 8], uint8; magnitudes [rows, columns / 1024]; rounded values [rows, columns].
    """
    blocks = values.view(len(values), -1, _BLOCK)
    scales = blocks.abs().mean(2)
    is_positive = blocks >= 0
    bits = pack_bits(is_positive.flatten(1))
    rounded = torch.where(is_positive, scales.unsqueeze(2), -scales.unsqueeze(2))
    return bits, scales, rounded.view_as(values)


def _values(bits: Tensor, scales: Tensor) -> Tensor:
    """Return the rounded values of `_signs`."""
    is_positive = unpack_bits(bits, 8 * bits.shape[1]).view(len(bits), -1, _BLOCK)
    return torch.where(is_positive, scales.unsqueeze(2), -scales.unsqueeze(2)).view(len(bits), -1)


class PowerSGD(Compressor):
    """torch's PowerSGD hook (Vogels et al., arXiv 1905.13727): factors of low rank, warm-started.

    Args:
        group: ranks over which gradients are averaged.
        rank: rank of the factors.
        warmup: number of steps without compression, at least 2.
        options: further arguments of torch's ``PowerSGDState``.
    """

    min_warmup = 2

    def __init__(self, group: dist.ProcessGroup, rank: int = 1, warmup: int = 10, **options: Any):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook

        super().__init__(group, warmup)
        if rank < 1:
            raise UserError(f"rank={rank} must be at least 1")
        self._hook = torch_hook.powerSGD_hook
        options.setdefault("orthogonalization_epsilon", 1e-8)  # a gradient may be zero, as that of an unused expert
        options.setdefault("compression_stats_logging_frequency", 1 << 60)
        self._state = torch_hook.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2, **options)
        self._state.iter = 2  # the warm-up is that of `Compressor`
        self._ranges: dict[int, list[tuple[Tensor, slice]]] = {}
        state = self._state
        self._tables: tuple[dict[int, Tensor], ...] = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
        self._tables_before: tuple[dict[int, Tensor], ...] = ({}, {}, {})

    def allocate(self, bucket: Bucket) -> None:
        self._ranges[bucket.index()] = [(parameter, where) for parameter, _, where in _parts(bucket)]
        self._state.error_dict.setdefault(bucket.index(), torch.zeros_like(bucket.buffer()))

    def memories(self) -> Iterator[Memory]:
        for index, ranges in self._ranges.items():
            for parameter, where in ranges:
                yield Memory("error", parameter, 0, self._state.error_dict[index][where])

    def numbers(self) -> Numbers:
        factors = {}
        for name, tensors in zip("pq", self._tables[1:], strict=True):
            factors[name] = {str(index): tensor.clone() for index, tensor in tensors.items()}
        return super().numbers() | factors

    def set_numbers(self, numbers: Numbers) -> None:
        super().set_numbers(numbers)
        for name, tensors in zip("pq", self._tables[1:], strict=True):
            tensors.clear()
            for index, tensor in numbers[name].items():
                tensors[int(index)] = tensor.to(self._state.error_dict[int(index)].device, copy=True)

    def begin(self) -> None:
        super().begin()
        self._tables_before = tuple(map(_cloned, self._tables))

    def undo(self) -> None:
        super().undo()
        for now, before in zip(self._tables, self._tables_before, strict=True):
            now.clear()
            now.update(before)

    def reduce(self, bucket: Bucket) -> None:
        if bucket.index() not in self._ranges:
            self.allocate(bucket)
        by_expert: Any = _ByExpert(bucket)
        bucket.buffer().copy_(self._hook(self._state, by_expert).wait())


def _cloned(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    return {index: tensor.clone() for index, tensor in tensors.items()}


class _ByExpert:
    """A bucket in which each expert of a stack is a gradient."""

    def __init__(self, bucket: Bucket):
        self._bucket = bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def gradients(self) -> list[Tensor]:
        ownership.refresh()
        found: list[Tensor] = []
        for parameter, gradient in zip(self._bucket.parameters(), self._bucket.gradients(), strict=True):
            found += gradient.unbind(0) if has_mark(parameter) else [gradient]
        return found
