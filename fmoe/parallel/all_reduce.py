"""All-reduce algorithms over the links of one's choice, in place of the library's choice.

NCCL and gloo choose among rings and trees themselves, and NCCL knows the machine: prefer theirs. A hierarchical sum
helps a library that does not know which ranks share a node.
"""

import math
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from fmoe.exchange.hierarchical import node_groups
from fmoe.parallel.compression import Bucket, Compressor
from fmoe.runtime import collectives


class Ring(Compressor):
    """A ring of all ranks: each sends to the next, twice (N - 1) / N of the bytes (Baidu's ring all-reduce)."""

    def reduce(self, bucket: Bucket) -> None:
        buffer = bucket.buffer()
        buffer.copy_(_ring_gather(_ring_scatter(buffer, self.group), self.group)[: buffer.numel()])
        buffer.div_(self.group.size())


class Hierarchical(Compressor):
    """Sums within nodes, then between them (arXiv 1807.11205): a rank sends 1 / node size of the bytes to other nodes.

    Args:
        group: ranks over which gradients are averaged.
        node_size: number of ranks per node of the machine, whose ranks have adjacent global numbers.

    Raises:
        UserError: nodes have different numbers of ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup, node_size: int):
        super().__init__(group)
        nodes = Counter(rank // node_size for rank in dist.get_process_group_ranks(group))
        sizes = set(nodes.values())
        if len(sizes) > 1:
            raise UserError(f"node_size={node_size} divides the {group.size()} data parallel ranks into unequal nodes")
        self._node, self._peers = node_groups(group, sizes.pop())

    def reduce(self, bucket: Bucket) -> None:
        buffer = bucket.buffer()
        size = self._node.size()
        padded = _padded(buffer, size)
        part = padded.new_empty(padded.numel() // size)
        collectives.run(dist.reduce_scatter_tensor, part, padded, group=self._node)
        collectives.run(dist.all_reduce, part, group=self._peers)
        collectives.run(dist.all_gather_into_tensor, padded, part, group=self._node)
        buffer.copy_(padded[: buffer.numel()]).div_(self.group.size())


class Grid(Compressor):
    """Rings along the rows of a grid of ranks, then along its columns (2-D torus, arXiv 1811.05233).

    A rank makes 2 (rows + columns - 2) transfers, a `Ring` 2 (ranks - 1).
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        size = group.size()
        columns = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
        self._row, self._column = node_groups(group, columns)

    def reduce(self, bucket: Bucket) -> None:
        buffer = bucket.buffer()
        part = _ring_scatter(buffer, self._row)
        part = _ring_gather(_ring_scatter(part, self._column), self._column)[: part.numel()]
        buffer.copy_(_ring_gather(part, self._row)[: buffer.numel()])
        buffer.div_(self.group.size())


def _padded(values: Tensor, ranks: int) -> Tensor:
    """Return a copy of a flat tensor with zeros at the end, which divides among ``ranks``."""
    padded = values.new_zeros(-(-values.numel() // ranks) * ranks)
    padded[: values.numel()] = values
    return padded


def _ring_scatter(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sum of flat tensors over the ranks of a group, in the order of ranks."""
    size = group.size()
    rank = group.rank()
    parts = _padded(values, size).view(size, -1)
    received = torch.empty_like(parts[0])
    for step in range(size - 1):
        _shift(parts[(rank - step - 1) % size], received, group)
        parts[(rank - step - 2) % size] += received
    return parts[rank].clone()


def _ring_gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the parts of all ranks of a group, one after the other."""
    size = group.size()
    rank = group.rank()
    parts = part.new_empty(size, part.numel())
    parts[rank] = part
    for step in range(size - 1):
        _shift(parts[(rank - step) % size], parts[(rank - step - 1) % size], group)
    return parts.view(-1)


def _shift(sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> None:
    """Send a tensor to the next rank of a ring, and receive one from the rank before."""
    size = group.size()
    operations = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=(group.rank() + 1) % size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(group.rank() - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
