"""Shadowing: send the weights of a hot expert to all ranks, instead of rows to the expert (FasterMoE, PPoPP'22, 4.1).

Every rank then computes its own rows of that expert. The expert's gradient is summed on its owner. Shadowing is faster
if sending the weights takes less time than sending all rows and computing them on the owner. Every rank has the loads
of all ranks, so `choose` makes the same decision on each.

Shape letters: W ranks, E experts of all ranks, L experts of a rank. ``loads_WE`` holds the number of rows that each
rank has for each expert.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from fmoe.exchange.collectives import all_reduce, all_to_all, broadcast, reduce
from fmoe.experts.call import ExpertCall


@dataclass(frozen=True)
class Cost:
    """Cost model of a layer's forward and backward pass.

    Attributes:
        row_seconds: time of an expert's GEMMs for one row, forward and backward.
        row_bytes: size of one row on the wire.
        expert_bytes: size of an expert's parameters.
        bandwidth: bytes per second that a rank sends while it receives at the same rate.
    """

    row_seconds: float
    row_bytes: float
    expert_bytes: float
    bandwidth: float

    def seconds(self, loads_WE: Tensor | Sequence[Sequence[int]], num_local: int, shadows: Sequence[int]) -> float:
        """Estimate the seconds of a forward and backward pass in which all ranks get the weights of ``shadows``.

        The estimate is the sum of three terms. The first is the time of the GEMMs of the rank that computes the most
        rows. The second is 4 transfers of the largest number of rows that a rank sends or receives: rows and
        gradients, there and back. The third is 2 transfers of each shadowed expert: parameters and gradients.

        Args:
            loads_WE: number of rows that each of W ranks has for each of E experts.
            num_local: number of experts per rank.
            shadows: ids of experts.
        """
        loads_WE = torch.as_tensor(loads_WE, dtype=torch.int64, device="cpu")
        home_W = loads_WE[:, shadows].sum(1)
        sent_WE = loads_WE.index_fill(1, torch.tensor(shadows, dtype=torch.int64, device="cpu"), 0)
        sent_WW = sent_WE.unflatten(1, (-1, num_local)).sum(2)
        received_W = sent_WW.sum(0)
        own_W = sent_WW.diagonal()
        computed = int((home_W + received_W).max())
        wire = int((torch.maximum(sent_WW.sum(1), received_W) - own_W).max())
        rows = computed * self.row_seconds + 4 * wire * self.row_bytes / self.bandwidth
        return rows + 2 * len(shadows) * self.expert_bytes / self.bandwidth


def choose(loads_WE: Sequence[Sequence[int]], num_local: int, most: int, cost: Cost) -> list[int]:
    """Choose the experts to shadow: those whose weights are sent to all ranks.

    They are the n experts with the most rows, where n minimizes `Cost.seconds`.

    Args:
        loads_WE: number of rows that each of W ranks has for each of E experts.
        num_local: number of experts per rank.
        most: upper bound on n.
    """
    load_WE = torch.tensor(loads_WE, dtype=torch.int64, device="cpu")
    hottest = load_WE.sum(0).sort(descending=True, stable=True).indices[:most].tolist()
    # All counts are tried, because shadowing one expert saves no time if two ranks are equally slow.
    count = min(range(len(hottest) + 1), key=lambda n: cost.seconds(load_WE, num_local, hottest[:n]))
    return hottest[:count]


def measure(group: dist.ProcessGroup, expert: Sequence[Tensor], row_width: int, device: torch.device) -> Cost:
    """Measure the cost model for this group and for experts like ``expert``. Every rank must call it.

    The result is equal on all ranks.

    Args:
        expert: parameters of one expert.
        row_width: elements of a row.
    """
    size = sum(p.numel() for p in expert)
    dtype = expert[0].dtype
    itemsize = expert[0].element_size()
    payload = torch.zeros(group.size() * (1 << 16), dtype=torch.float32, device=device)
    matrix = torch.zeros(256, 256, dtype=dtype, device=device)

    def seconds_of(run: Callable[[], object], repeats: int = 3) -> float:
        run()  # the first run connects and warms up
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        _synchronize(device)
        return (time.perf_counter() - begin) / repeats

    wire = seconds_of(lambda: all_to_all(group, payload, what="measurement").wait(for_host=True))
    gemm = seconds_of(lambda: matrix @ matrix)
    sums = torch.tensor([wire, gemm], dtype=torch.float64, device="cpu").to(device)
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


@dataclass(frozen=True, eq=False)
class Shadowed:
    """The shadowed experts of one forward pass: their weights are sent to all ranks.

    Attributes:
        group: the expert parallel group.
        num_local: number of experts per rank.
        counts: global id of each shadowed expert, and the number of this rank's rows for it.
        is_trained: whether the backward pass of any rank reaches the experts.
    """

    group: dist.ProcessGroup
    num_local: int
    counts: list[tuple[int, int]]
    is_trained: bool

    @property
    def num_rows(self) -> int:
        """Number of this rank's rows for shadowed experts."""
        return sum(count for _, count in self.counts)

    def run(self, rows: list[Tensor], experts: ExpertCall, weight_R: Tensor | None = None) -> list[Tensor]:
        """Return the shadowed experts' outputs for this rank's rows, computed on this rank."""
        parameters = []
        for expert, _ in self.counts:
            owner, local = divmod(expert, self.num_local)
            # Ranks other than the owner take only the shapes, from their first expert.
            ours = experts.module.shadow(local if owner == self.group.rank() else 0)
            parameters.append(broadcast_parameters(self.group, owner, ours, self.is_trained))
        return experts.rows(rows, [count for _, count in self.counts], weight_R, parameters)


def broadcast_parameters(
    group: dist.ProcessGroup, owner: int, tensors: Sequence[Tensor], is_trained: bool = True
) -> list[Tensor]:
    """Return the tensors of rank ``owner`` on every rank; differentiable, with gradients summed on the owner.

    Every rank of the group must call it. On the other ranks, only the shapes and dtypes of ``tensors`` are used.

    Args:
        is_trained: whether the backward pass of any rank reaches the tensors.
    """
    parameters = tensors if owner == group.rank() else [t.detach() for t in tensors]
    # All ranks join the backward pass, even those whose own experts are not trained.
    joins = torch.empty(0, requires_grad=is_trained, dtype=torch.float32, device="cpu")
    return list(_Broadcast.apply(group, owner, joins, *parameters))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, owner: int, joins: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.owner = owner
        flat = torch.cat([t.reshape(-1) for t in tensors])
        broadcast(group, flat, owner, "broadcast of a shadowed expert").wait()
        ctx.like = [(t.shape, t.dtype) for t in tensors]
        return tuple(_unflatten(flat, ctx.like))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UserError("exchange_options.shadow has no second derivatives (create_graph=True): use shadow=0")
        flat = torch.cat([g.reshape(-1) for g in grads])
        reduce(ctx.group, flat, ctx.owner, "sum of a shadowed expert's gradients").wait()
        return None, None, None, *_unflatten(flat, ctx.like)


def _unflatten(flat: Tensor, like: list[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    parts = flat.split([shape.numel() for shape, _ in like])
    return [part.view(shape).to(dtype) for part, (shape, dtype) in zip(parts, like, strict=True)]
