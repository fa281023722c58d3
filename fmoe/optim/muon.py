"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Moonlight, arXiv 2502.16982).

Shape letters: B blocks (experts of a stack), M rows, N columns.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from fmoe.errors import UserError
from fmoe.optim.checks import check
from fmoe.optim.layout import Blocks, Group, Part, Shards, gradient_of, is_stacked, loss_of, parts_of
from fmoe.optim.matrices import Matrices, orthogonalize
from fmoe.optim.trust import WideOptimizer, floats, stepped_dtype
from fmoe.runtime import collectives

_CHUNK = 1 << 24  # elements of whole matrices that are orthogonalized together: bounds the temporaries

Scale = Literal["rms", "original"]


@dataclass(frozen=True)
class _Piece:
    """A block of a parameter (one matrix [M, N] of `Matrices`), or the part of a block that this rank steps.

    Attributes:
        key: (number of the parameter, number of the block), which orders pieces alike on all ranks.
        begin, end: range of the flattened block.
        others: the range of the block that each other rank steps, if any, keyed by the rank in the group.
    """

    tensor: Tensor
    group: Group
    matrices: Matrices
    part: Part
    key: tuple[int, int]
    begin: int
    end: int
    others: Mapping[int, tuple[int, int]]


@dataclass(frozen=True)
class _Plan:
    hidden: frozenset[Tensor]  # the tensors that have matrices, or parts of them
    chunks: list[list[_Piece]]  # whole blocks of one kind, or one part of a block
    parts: list[_Piece]  # pieces whose block has parts on other ranks, in the order of their keys
    exchanges: bool  # whether any rank of the group has such parts
    dtype: torch.dtype  # of the exchange


class Muon(WideOptimizer):
    """Orthogonalized momentum for hidden matrices, AdamW for all other parameters.

    For a matrix [M, N]::

        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g          with nesterov, else m
        w = w - lr * weight_decay * w - lr * scale * orthogonalize(u)

    Each expert of a stack and each part of a fused weight is a separate matrix (`Matrices`). The Newton-Schulz
    iteration runs in float32 on every device, but in float64 for float64 parameters.

    Args:
        params: parameters or parameter groups.
        lr: learning rate of Muon and AdamW.
        momentum, nesterov, ns_steps: options of Muon; ``ns_steps`` is the number of Newton-Schulz iterations.
        weight_decay: decoupled weight decay of Muon and AdamW; `fmoe.optim.param_groups` sets it to 0 for vectors.
        scale: "rms" for 0.2 sqrt(max(M, N)), which allows AdamW's usual learning rate and decay (Moonlight, equation
            4); "original" for sqrt(max(1, M / N)).
        betas, eps: options of AdamW.
        matrices: the hidden matrices, from `hidden_matrices`. None takes every matrix and every stack of expert
            matrices, and does not divide fused weights. Do not use None with embeddings, output layers or gates.

    Raises:
        UserError: a number is out of range, or ``scale`` is unknown.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        scale: Scale = "rms",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        matrices: Mapping[Tensor, Matrices] | None = None,
    ):
        check(
            lr=lr, momentum=momentum, weight_decay=weight_decay, betas=betas, eps=eps, positive={"ns_steps": ns_steps}
        )
        if scale not in ("rms", "original"):
            raise UserError(f"scale={scale!r} must be 'rms' or 'original'")
        self._matrices = matrices
        self._shards: Shards | None = None
        self._plan_now: _Plan | None = None
        options = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "scale": scale}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps} | options)

    def set_shards(self, matrices: Mapping[Tensor, Matrices], shards: Shards) -> None:
        """Set which parameters hold hidden matrices, and which range of a parameter each optimized tensor holds.

        From then on, all ranks of the process groups in ``matrices`` and ``shards`` must take the same steps.
        """
        self._matrices = matrices
        self._shards = shards
        self._plan_now = None

    def matrices_of(self, parameter: Tensor) -> Matrices | None:
        """Return how a parameter divides into hidden matrices; None if AdamW steps it."""
        if self._matrices is not None:
            return self._matrices.get(parameter)
        is_stacked(parameter)  # refreshes the mark
        return Matrices.of(parameter)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        self._plan_now = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_matrices": self._matrices, "_shards": self._shards}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan_now = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, together with all ranks of the process groups given to `set_shards`."""
        loss = loss_of(closure)
        if self._plan_now is None:
            self._plan_now = self._plan()
        for group in self.param_groups:
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            self._accumulate(group, [tensor for tensor in tensors if tensor in self._plan_now.hidden])
            self._adamw(group, [tensor for tensor in tensors if tensor not in self._plan_now.hidden])
        blocks = self._exchange(self._plan_now)
        for chunk in self._plan_now.chunks:
            pieces = [piece for piece in chunk if piece.tensor.grad is not None]
            if pieces:
                self._move(pieces, blocks)
        return loss

    def _begin(self, tensors: list[Tensor], *names: str) -> list[list[Tensor]]:
        """Create missing state of ``tensors``; return a list of their states for each of ``names``, and for "step"."""
        for tensor in tensors:
            state = self.state[tensor]
            if not state:
                state |= {name: torch.zeros_like(tensor, dtype=stepped_dtype(tensor)) for name in names}
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        states = [self.state[tensor] for tensor in tensors]
        return [[state[name] for state in states] for name in (*names, "step")]

    def _accumulate(self, group: Group, tensors: list[Tensor]) -> None:
        if tensors:
            buffers, steps = self._begin(tensors, "momentum_buffer")
            torch._foreach_lerp_(buffers, floats([gradient_of(t) for t in tensors]), 1 - group["momentum"])
            torch._foreach_add_(steps, 1)

    def _adamw(self, group: Group, tensors: list[Tensor]) -> None:
        if not tensors:
            return
        averages, squares, steps = self._begin(tensors, "exp_avg", "exp_avg_sq")
        weights = floats(tensors)
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        adamw(
            weights,
            floats([gradient_of(tensor) for tensor in tensors]),
            averages,
            squares,
            [],
            steps,
            fused=on_cpu,
            foreach=not on_cpu,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for tensor, weight in zip(tensors, weights, strict=True):
            if tensor is not weight:
                tensor.copy_(weight)

    def _direction(self, piece: _Piece) -> Tensor:
        """Return u of the formula in `Muon`, before orthogonalization, for the elements of ``piece``."""
        gradient = piece.part.of(gradient_of(piece.tensor))
        buffer = piece.part.of(self.state[piece.tensor]["momentum_buffer"])
        return gradient.to(buffer.dtype).lerp(buffer, piece.group["momentum"]) if piece.group["nesterov"] else buffer

    def _exchange(self, plan: _Plan) -> dict[tuple[int, int], Tensor]:
        """Gather the `_direction` of each block that this rank and others step in parts, keyed by `_Piece.key`."""
        if self._shards is None or self._shards.group is None or not plan.exchanges:
            return {}
        ranks = self._shards.group.size()
        directions = [self._direction(piece).to(plan.dtype) for piece in plan.parts]
        device = self._shards.parameters[0].device
        empty = torch.empty(0, dtype=plan.dtype, device=device)
        sends: list[list[Tensor]] = [[] for _ in range(ranks)]
        receives = [0] * ranks
        for piece, direction in zip(plan.parts, directions, strict=True):
            for rank, (begin, end) in piece.others.items():
                sends[rank].append(direction)
                receives[rank] += end - begin
        received = empty.new_empty(sum(receives))
        sent = torch.cat([empty, *itertools.chain.from_iterable(sends)])
        counts = [sum(map(len, to_rank)) for to_rank in sends]
        collectives.run(dist.all_to_all_single, received, sent, receives, counts, group=self._shards.group)
        from_rank = received.split(receives)
        used = [0] * ranks
        blocks = {}
        for piece, direction in zip(plan.parts, directions, strict=True):
            block = blocks[piece.key] = empty.new_empty(piece.matrices.block_size)
            block[piece.begin : piece.end] = direction
            for rank, (begin, end) in piece.others.items():
                block[begin:end] = from_rank[rank][used[rank] : used[rank] + end - begin]
                used[rank] += end - begin
        return blocks

    def _move(self, pieces: list[_Piece], blocks: Mapping[tuple[int, int], Tensor]) -> None:
        matrices = pieces[0].matrices
        group = pieces[0].group
        shape = (matrices.rows, matrices.columns)
        dtype = stepped_dtype(pieces[0].tensor)
        x_BMN = torch.stack(
            [
                (blocks[piece.key].to(dtype) if piece.others else self._direction(piece)).reshape(shape)
                for piece in pieces
            ]
        )
        wholes = [
            orthogonalize(whole, group["ns_steps"]).mul_(_scale(group["scale"], *whole.shape[1:]))
            for whole in matrices.whole(x_BMN)
        ]
        lr = float(group["lr"])
        for piece, update in zip(pieces, matrices.own(wholes), strict=True):
            target = piece.part.of(piece.tensor)
            (weight,) = floats([target])
            part = update.reshape(-1)[piece.begin : piece.end].view(weight.shape)
            weight.mul_(1 - lr * group["weight_decay"]).add_(part, alpha=-lr)
            if weight is not target:
                target.copy_(weight)

    def _plan(self) -> _Plan:
        """Return the pieces to step, and their order. All ranks of the shards' group must make this call."""
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        if any(hasattr(tensor, "placements") for tensor in tensors):
            raise UserError("Muon does not support DTensors, whose shards it would orthogonalize: use AdamW with FSDP")
        parameters = tensors if self._shards is None else self._shards.parameters
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        described = [self.matrices_of(parameter) for parameter in parameters]
        ranges = [] if self._shards is None else self._shards.ranges()
        chunks: dict[tuple, list[list[_Piece]]] = {}
        hidden = set()
        parts = []
        for index, group in enumerate(self.param_groups):
            for tensor in group["params"]:
                parameter, start = (tensor, 0) if self._shards is None else self._shards.parts[tensor]
                number = numbers[parameter]
                matrices = described[number]
                if matrices is None:
                    continue
                hidden.add(tensor)
                for piece in _pieces(tensor, group, matrices, number, start, [of_rank[number] for of_rank in ranges]):
                    if piece.others:
                        parts.append(piece)
                        chunks[piece.key] = [[piece]]
                        continue
                    # Order and chunk sizes are the same on all ranks of a tensor parallel group and on all replicas, so
                    # that their results are equal, bit for bit.
                    alike = chunks.setdefault((index, matrices.kind, tensor.device, stepped_dtype(tensor)), [[]])
                    if alike[-1] and (len(alike[-1]) + 1) * matrices.whole_size > _CHUNK:
                        alike.append([])
                    alike[-1].append(piece)
        return _Plan(
            frozenset(hidden),
            [chunk for alike in chunks.values() for chunk in alike],
            sorted(parts, key=lambda piece: piece.key),
            any(
                bound % matrices.block_size
                for of_rank in ranges
                for matrices, bounds in zip(described, of_rank, strict=True)
                if matrices is not None
                for bound in itertools.chain.from_iterable(bounds)
            ),
            functools.reduce(torch.promote_types, map(stepped_dtype, parameters), torch.float32),
        )


def _pieces(
    tensor: Tensor, group: Group, matrices: Matrices, number: int, start: int, ranges: list[list[list[int]]]
) -> Iterator[_Piece]:
    """Yield the pieces of a tensor that starts at element ``start`` of a parameter, given the ranges each rank steps.

    No two ranges of a rank overlap the same block.
    """
    size = matrices.block_size
    for part in parts_of(tensor, Blocks(matrices.blocks * size, matrices.blocks), 0, start, max_numel=1):
        first = part.block * size
        begin = start - first
        end = begin + part.of(tensor).numel()
        start = first + end
        others = {}
        for rank, of_parameter in enumerate(ranges):
            for low, high in of_parameter:
                of_rank = (max(low - first, 0), min(high - first, size))
                if of_rank[0] < of_rank[1] and of_rank != (begin, end):
                    others[rank] = of_rank
        yield _Piece(tensor, group, matrices, part, (number, part.block), begin, end, others)


def _scale(name: Scale, rows: int, columns: int) -> float:
    return 0.2 * math.sqrt(max(rows, columns)) if name == "rms" else math.sqrt(max(1.0, rows / columns))
