"""A step of Adafactor over tensors that are ranges of parameters (`fmoe.optim.Shards`).

Every rank adds the squares of its elements to the sums of rows, columns and weights, which are then reduced. Ranks with
a part of a matrix keep its whole row and column factors, with the same values.

Shape letters: B matrices of a parameter, M rows and N columns of a matrix, R rows that a piece has elements of, U
separately scaled tensors of a parameter.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import Optimizer

from fmoe.optim.layout import Blocks, Group, Part, Shards, State, gradient_of, is_matrix, is_stacked, parts_of
from fmoe.routing import sum_dtype
from fmoe.runtime import collectives


@dataclass(frozen=True)
class _Parameter:
    """Form of a parameter, and sums of squares over all its elements, on any rank."""

    shape: torch.Size
    rows: int  # 0 for a vector
    columns: int
    blocks: int  # matrices; for vectors, those of the experts of a stack, or 1
    units: int  # experts of a stack, or 1
    weights_U: Tensor
    updates_U: Tensor
    rows_BM: Tensor
    columns_BN: Tensor


@dataclass(frozen=True)
class _Piece:
    """A part of one block of a parameter, with elements from ``begin`` on."""

    tensor: Tensor
    group: Group
    parameter: _Parameter
    part: Part
    begin: int

    @property
    def unit(self) -> int:
        return self.part.block // (self.parameter.blocks // self.parameter.units)

    def as_rows(self, values: Tensor) -> Tensor:
        """Return the values of the piece as rows [R, N], with zeros for elements of other pieces."""
        columns = self.parameter.columns
        before = self.begin % columns
        after = -(before + values.numel()) % columns
        return pad(values.reshape(-1), (before, after)).view(-1, columns)

    def update(self, state: State, factors: State) -> Tensor:
        """Return the update of the piece before clipping.

        Args:
            state: state of the tensor.
            factors: state of the tensor with the factors of the parameter.
        """
        gradient = self.part.of(gradient_of(self.tensor))
        tiny = self.group["eps"][0]
        if tiny is None:
            tiny = torch.finfo(self.tensor.dtype).eps
        form = self.parameter
        if not form.rows:
            variance = self.part.of(state["variance"])
        else:
            rows_M = factors["row_var"].view(-1, form.rows)[self.part.block]
            columns_N = factors["col_var"].view(-1, form.columns)[self.part.block]
            first = self.begin // form.columns
            last = -(-(self.begin + gradient.numel()) // form.columns)
            variance_RN = torch.outer(rows_M[first:last], columns_N) / rows_M.mean().clamp(min=tiny)
            before = self.begin % form.columns
            variance = variance_RN.view(-1)[before : before + gradient.numel()].view_as(gradient)
        return variance.clamp(min=tiny * tiny).rsqrt_().mul_(gradient)


class ShardedAdafactor:
    """Steps of an Adafactor whose tensors are ranges of parameters."""

    def __init__(self, shards: Shards):
        self._shards = shards
        self._parameters, self._sums, self._updates = _parameters(shards)
        # The state of this rank's first tensor of a parameter has the factors.
        self._first: dict[Tensor, Tensor] = {}
        for tensor, (parameter, _) in shards.parts.items():
            self._first.setdefault(parameter, tensor)

    def keeps_factors(self, tensor: Tensor) -> bool:
        """Return whether the state of ``tensor`` has the factors of its parameter, if that is a matrix."""
        if tensor not in self._shards.parts:
            return True
        parameter, _ = self._shards.parts[tensor]
        return self._first[parameter] is tensor

    def step(self, optimizer: Optimizer) -> None:
        """Take one step with all tensors of the optimizer. Collective over the group of the shards."""
        self._sums.zero_()
        self._updates.zero_()
        pieces = list(_pieces(optimizer, self._shards, self._parameters))
        for piece in pieces:
            form = piece.parameter
            form.weights_U[piece.unit] += _square(piece.part.of(piece.tensor), self._sums.dtype)
            if form.rows:
                squares_RN = piece.as_rows(piece.part.of(gradient_of(piece.tensor))).square()
                row = piece.begin // form.columns
                form.rows_BM[piece.part.block, row : row + len(squares_RN)] += squares_RN.sum(1)
                form.columns_BN[piece.part.block] += squares_RN.sum(0)
        self._reduce(self._sums)
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                parameter, _ = self._shards.parts[tensor]
                form = self._parameters[parameter]
                _advance(optimizer.state[tensor], tensor, group, form, self._first[parameter] is tensor)
        for piece in pieces:
            update = piece.update(*self._states(optimizer, piece))
            piece.parameter.updates_U[piece.unit] += _square(update, self._updates.dtype)
        self._reduce(self._updates)
        for piece in pieces:
            update = piece.update(*self._states(optimizer, piece))
            _move(piece, update, float(optimizer.state[piece.tensor]["step"]))

    def _states(self, optimizer: Optimizer, piece: _Piece) -> tuple[State, State]:
        parameter, _ = self._shards.parts[piece.tensor]
        return optimizer.state[piece.tensor], optimizer.state[self._first[parameter]]

    def _reduce(self, sums: Tensor) -> None:
        if self._shards.group is not None and sums.numel():
            collectives.run(dist.all_reduce, sums, group=self._shards.group)


def _parameters(shards: Shards) -> tuple[dict[Tensor, _Parameter], Tensor, Tensor]:
    """Return the form of each parameter, and the two tensors that hold all sums: before, and of the updates."""
    sizes = []
    for parameter in shards.parameters:
        stack = parameter.shape[0] if is_stacked(parameter) else 1
        rows, columns = parameter.shape[-2:] if is_matrix(parameter) else (0, 0)
        blocks = parameter.numel() // (rows * columns) if rows * columns else stack
        sizes.append((stack, blocks, rows, columns))
    device = shards.parameters[0].device if shards.parameters else torch.device("cpu")
    dtype = sum_dtype(device)
    updates = torch.zeros(sum(stack for stack, *_ in sizes), dtype=dtype, device=device)
    lengths: list[int] = []
    for stack, blocks, rows, columns in sizes:
        lengths += (stack, blocks * rows, blocks * columns)
    sums = torch.zeros(sum(lengths), dtype=dtype, device=device)
    views = iter(sums.split(lengths))
    of_updates = updates.split([stack for stack, *_ in sizes])
    forms = {}
    for parameter, (stack, blocks, rows, columns), updates_U in zip(shards.parameters, sizes, of_updates, strict=True):
        forms[parameter] = _Parameter(
            parameter.shape,
            rows,
            columns,
            blocks,
            stack,
            weights_U=next(views),
            updates_U=updates_U,
            rows_BM=next(views).view(blocks, rows),
            columns_BN=next(views).view(blocks, columns),
        )
    return forms, sums, updates


def _pieces(optimizer: Optimizer, shards: Shards, parameters: dict[Tensor, _Parameter]) -> Iterator[_Piece]:
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            parameter, start = shards.parts[tensor]
            form = parameters[parameter]
            if not tensor.numel():
                continue
            size = form.shape.numel() // form.blocks
            for part in parts_of(tensor, Blocks(form.shape.numel(), form.blocks), 0, start, max_numel=1):
                yield _Piece(tensor, group, form, part, start - part.block * size)
                start += part.of(tensor).numel()


def _advance(state: State, tensor: Tensor, group: Group, form: _Parameter, keeps_factors: bool) -> None:
    """Advance the step count and the second moments of a tensor; create its state if needed."""
    if "step" not in state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        if not form.rows:
            state["variance"] = torch.zeros_like(tensor)
        elif keeps_factors:
            state["row_var"] = tensor.new_zeros(*form.shape[:-1], 1)
            state["col_var"] = tensor.new_zeros(*form.shape[:-2], 1, form.columns)
    state["step"] += 1
    weight = float(state["step"]) ** group["beta2_decay"]
    if not form.rows:
        if tensor.numel():
            state["variance"].lerp_(gradient_of(tensor).square(), weight)
    elif keeps_factors:
        for name, sums, count in (("row_var", form.rows_BM, form.columns), ("col_var", form.columns_BN, form.rows)):
            means = (sums / count).to(state[name].dtype)
            state[name].lerp_(means.view_as(state[name]), weight)


def _move(piece: _Piece, update: Tensor, step: float) -> None:
    group = piece.group
    lr = float(group["lr"])
    size = piece.parameter.shape.numel() // piece.parameter.units
    scale = (piece.parameter.weights_U[piece.unit] / size).sqrt().clamp(min=group["eps"][1])
    clip = ((piece.parameter.updates_U[piece.unit] / size).sqrt() / group["d"]).clamp(min=1.0)
    factor = scale / clip * -min(lr, 1 / math.sqrt(step))
    weight = piece.part.of(piece.tensor)
    weight.mul_(1 - lr * group["weight_decay"]).add_(update.mul_(factor.to(update.dtype)))


def _square(values: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linalg.vector_norm(values, dtype=dtype).square()
