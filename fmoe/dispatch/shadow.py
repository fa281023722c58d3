"""Shadowing: a hot expert is sent to all workers, instead of their rows to it (FasterMoE, PPoPP'22 section 4.2).

Every worker then computes its own rows of that expert, and the expert's gradient is summed on its owner. It pays when
the rows of the hot expert, on the wire and in its owner's queue, cost more than its parameters do: `choose` reckons
that from the loads of all workers, which all of them know, so that all choose alike.

Shape letters: W workers, E experts in all, L experts of a worker.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.dispatch.watch import all_reduce, all_to_all, broadcast, reduce

if TYPE_CHECKING:
    from fmoe.dispatch.exchange import Experts


@dataclass(frozen=True)
class Cost:
    """What a forward and backward pass is made of.

    Attributes:
        row_seconds: of an expert's GEMMs for one row, forward and backward.
        row_bytes: of one row, one way.
        expert_bytes: of an expert's parameters.
        bandwidth: bytes a second that a worker sends while it receives as many.
    """

    row_seconds: float
    row_bytes: float
    expert_bytes: float
    bandwidth: float

    def seconds(self, loads_WE: Sequence[Sequence[int]], num_local: int, shadows: Sequence[int]) -> float:
        """Of the slowest worker: 4 journeys of its rows (there, back, and their gradients), the GEMMs of its rows, and
        2 journeys of each shadowed expert (parameters, gradients)."""
        workers = range(len(loads_WE))
        sent = [[0] * len(loads_WE) for _ in workers]
        home = [sum(loads_WE[w][e] for e in shadows) for w in workers]
        for source in workers:
            for expert, count in enumerate(loads_WE[source]):
                if expert not in shadows:
                    sent[source][expert // num_local] += count
        computed = max(home[w] + sum(row[w] for row in sent) for w in workers)
        wire = max(max(sum(sent[w]) - sent[w][w], sum(row[w] for row in sent) - sent[w][w]) for w in workers)
        rows = computed * self.row_seconds + 4 * wire * self.row_bytes / self.bandwidth
        return rows + 2 * len(shadows) * self.expert_bytes / self.bandwidth


def choose(loads_WE: Sequence[Sequence[int]], num_local: int, most: int, cost: Cost) -> list[int]:
    """Experts to shadow: as many of the hottest, ``most`` at most, as make the pass fastest. One alone may change
    nothing where two workers are as slow as each other, so all numbers are tried."""
    load_E = [sum(column) for column in zip(*loads_WE, strict=True)]
    hottest = sorted(range(len(load_E)), key=lambda e: (-load_E[e], e))[:most]
    count = min(range(len(hottest) + 1), key=lambda n: cost.seconds(loads_WE, num_local, hottest[:n]))
    return hottest[:count]


def measure(group: dist.ProcessGroup, expert: Sequence[Tensor], row_width: int, device: torch.device) -> Cost:
    """The figures of this group and of experts like this one, the same on all workers; takes milliseconds, once."""
    size = sum(p.numel() for p in expert)
    dtype, itemsize = expert[0].dtype, expert[0].element_size()
    payload = torch.zeros(group.size() * (1 << 16), dtype=torch.float32, device=device)
    matrix = torch.zeros(256, 256, dtype=dtype, device=device)

    def seconds_of(run, repeats: int = 3) -> float:
        run()  # the first one connects and warms up
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        _synchronize(device)
        return (time.perf_counter() - begin) / repeats

    wire = seconds_of(lambda: all_to_all(group, payload, what="measurement").wait(for_host=True))
    gemm = seconds_of(lambda: matrix @ matrix)
    sums = torch.tensor([wire, gemm], dtype=torch.float64).to(device)
    all_reduce(group, sums, dist.ReduceOp.MAX, "measurement").wait(for_host=True)
    wire, gemm = sums.tolist()
    remote_bytes = payload.nbytes * (group.size() - 1) / group.size()
    return Cost(
        row_seconds=3 * 2 * size * gemm / (2 * 256**3),
        row_bytes=row_width * itemsize,
        expert_bytes=size * itemsize,
        bandwidth=remote_bytes / max(wire, 1e-9),
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Shadowed:
    """The shadowed experts of one forward pass.

    Args:
        group: the expert parallel group.
        num_local: L.
        ids: global ids.
        counts: this worker's rows of each.
    """

    def __init__(self, group: dist.ProcessGroup, num_local: int, ids: list[int], counts: list[int]):
        self._group, self._num_local = group, num_local
        self.ids, self._counts = ids, counts
        self.num_rows = sum(counts)

    def run(self, rows: list[Tensor], experts: "Experts") -> list[Tensor]:
        """The outputs of this worker's rows, computed here."""
        parameters = [self._borrow(expert, experts) for expert in self.ids]
        return experts.run_with(parameters, rows, self._counts)

    def _borrow(self, expert: int, experts: "Experts") -> list[Tensor]:
        owner, local = divmod(expert, self._num_local)
        # Others take their first expert for the shapes.
        return borrow(self._group, owner, experts.lend(local if owner == self._group.rank() else 0))


def borrow(group: dist.ProcessGroup, owner: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of worker ``owner`` on every worker, differentiable: their gradients are summed on the owner.

    Called by every worker of the group. Of the others' tensors only the shapes matter.
    """
    is_mine = owner == group.rank()
    own = [t if is_mine else t.detach().requires_grad_(t.requires_grad) for t in tensors]
    return list(_Borrow.apply(group, owner, *own))


class _Borrow(torch.autograd.Function):
    """The owner's tensors on every worker; their gradients are summed on the owner."""

    @staticmethod
    def forward(ctx, group, owner, *tensors):
        ctx.group, ctx.owner = group, owner
        flat = torch.cat([t.reshape(-1) for t in tensors])
        broadcast(group, flat, owner, "lending of an expert").wait()
        ctx.shapes = [t.shape for t in tensors]
        return tuple(_unflatten(flat, ctx.shapes))

    @staticmethod
    def backward(ctx, *grads):
        flat = torch.cat([g.reshape(-1) for g in grads])
        reduce(ctx.group, flat, ctx.owner, "return of a lent expert").wait()
        return None, None, *_unflatten(flat, ctx.shapes)


def _unflatten(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
