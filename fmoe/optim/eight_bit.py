"""torchao's AdamW with 8-bit moments (arXiv 2110.02861), for CPUs and GPUs.

Shape letters: B blocks, S elements per block.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fmoe.errors import require
from fmoe.optim.checks import check
from fmoe.optim.layout import Shards, gradient_of, loss_of
from fmoe.runtime import collectives

BLOCK = 256
SMALLEST = 4096
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class CutMoment:
    """A moment of a range of a parameter that begins or ends within a block.

    Attributes:
        head, tail: float32 values of the parts of blocks, rounded to 8 bits together with the rest of the block.
        blocks: 8-bit moment of the whole blocks between them.
    """

    head: Tensor
    blocks: Tensor
    tail: Tensor

    def dequantize(self) -> Tensor:
        """Return the values of the whole range."""
        return torch.cat([self.head, self.blocks.dequantize(), self.tail])


@dataclass(frozen=True)
class _Edge:
    """The part ``elements`` of a tensor that is in a block of several tensors: in ``columns`` of row ``row``."""

    tensor: Tensor
    name: str  # of the part in `CutMoment`
    elements: slice
    row: int
    columns: slice


class AdamW8bit(Optimizer):
    """AdamW with 8-bit moments: indices into a map of 256 values, and a float32 scale per 256 consecutive elements.

    A tensor has moments in its own dtype if it has fewer than 4,096 elements, or their number is not a multiple of 256.
    If all parameters are on a CPU, the update runs eagerly. Otherwise torchao compiles it. The state is ``step`` and
    the moments ``exp_avg`` and ``exp_avg_sq``. 8-bit moments are torchao's tensors with ``codes`` and ``scale``.

    Raises:
        MissingPackageError: torchao is not installed.
        UserError: a number is out of range.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        check(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        torchao = require("torchao.optim", "adamw8bit", "AdamW8bit")
        self._shards: Shards | None = None
        self._edges: tuple[list[_Edge], int] | None = None
        # Wrapped, not inherited: torchao needs the learning rate as a tensor, but schedulers assign numbers.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        groups = [dict(group) for group in self.param_groups]
        self._torchao = torchao.AdamW8bit(groups, lr=lr, betas=betas, eps=eps, block_size=BLOCK)

    def set_shards(self, shards: Shards) -> None:
        """Set which range of a parameter each optimized tensor holds. The tensors are flat.

        Blocks are those of whole parameters, so that moments do not depend on the ranges. Ranks with parts of a block
        step the whole block. All ranks of the process group in ``shards`` must take the same steps from then on.
        """
        self._shards = shards
        self._edges = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, together with all ranks of the process group given to `set_shards`."""
        loss = loss_of(closure)
        inner = self._torchao
        inner.state = {}
        inner.param_groups = []
        if self._edges is None:
            self._edges = ([], 0) if self._shards is None else self._edges_of(self._shards)
        edges, num_rows = self._edges
        values = self._gather(edges, num_rows) if num_rows else None
        stepped = []
        for group in self.param_groups:
            tensors = []
            for tensor in group["params"]:
                if tensor.grad is not None:
                    tensors += self._whole_blocks(tensor)
            of_group = set(group["params"])
            mine = [edge for edge in edges if edge.tensor in of_group]
            if values is not None and mine:
                mine, blocks = self._cut_blocks(mine, values)
                stepped.append((mine, blocks))
                tensors.append(blocks)
            lr = group["lr"]
            lr = lr.float() if isinstance(lr, Tensor) else torch.tensor(lr, dtype=torch.float32, device="cpu")
            inner.param_groups.append({**group, "params": tensors, "amsgrad": False, "lr": lr})
        on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        with torch.compiler.set_stance("force_eager" if on_cpu else "default"), _float32_by_default():
            inner.step()
        for mine, blocks in stepped:
            self._scatter(mine, blocks)
        for state in self.state.values():
            if isinstance(state.get("exp_avg"), CutMoment):
                state["step"] += 1
        inner.state = {}  # views of gradients would keep their memory
        inner.param_groups = []
        return loss

    def cut(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the number of elements before and after the whole blocks of a tensor; None if moments are floats."""
        parameter, start = (tensor, 0) if self._shards is None else self._shards.parts.get(tensor, (tensor, 0))
        if parameter.numel() < SMALLEST or parameter.numel() % BLOCK:
            return None
        head = min(-start % BLOCK, tensor.numel())
        return head, (tensor.numel() - head) % BLOCK

    def moment_of(self, parameter: Tensor, name: str, values: Tensor) -> Any:
        """Return ``values`` in the format of the parameter's moment ``name``: 8-bit, or in the parameter's dtype.

        Values that come from ``.dequantize()`` of a moment with the same blocks are reproduced exactly.
        """
        cut = self.cut(parameter)
        if cut is None:
            return torch.empty_like(parameter).copy_(values)
        if cut == (0, 0):
            return self._quantized(name, values.to(parameter).view_as(parameter))
        head, tail = cut
        parts = values.to(parameter).split([head, parameter.numel() - head - tail, tail])
        return CutMoment(parts[0].clone(), self._quantized(name, parts[1]), parts[2].clone())

    def _quantized(self, name: str, values: Tensor) -> Tensor:
        moment: Any = self._new(name, values)
        moment.copy_(values)
        if values.any():
            _find_scales(moment, values.float().view(-1, BLOCK))
        return moment

    def _new(self, name: str, like: Tensor) -> Tensor:
        """Return an 8-bit moment with zeros; a plain tensor if there are no elements, which torchao cannot divide."""
        if not like.numel():
            return torch.empty_like(like)
        with _float32_by_default():
            return self._torchao._subclass_zeros(like, name == "exp_avg", BLOCK)

    def _whole_blocks(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor, or the part with its whole blocks, and give torchao the state; none if there are none."""
        state = self.state[tensor]
        if isinstance(tensor, DTensor) or self._shards is None:  # torchao creates the state
            self._torchao.state[tensor] = state
            return [tensor]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state |= {name: self.moment_of(tensor, name, torch.zeros_like(tensor)) for name in _MOMENTS}
        if not isinstance(state["exp_avg"], CutMoment):
            self._torchao.state[tensor] = state
            if tensor.numel():
                return [tensor]
            state["step"] += 1
            return []
        moments = {name: state[name].blocks for name in _MOMENTS}
        first = state["exp_avg"].head.numel()
        last = tensor.numel() - state["exp_avg"].tail.numel()
        if first == last:
            return []
        piece = tensor.detach()[first:last]
        piece.grad = gradient_of(tensor)[first:last]
        self._torchao.state[piece] = {"step": state["step"].clone(), **moments}
        return [piece]

    def _edges_of(self, shards: Shards) -> tuple[list[_Edge], int]:
        """Return this rank's parts of blocks that ranges cut, and the number of these blocks on all ranks."""
        blocks: set[tuple[int, int]] = set()
        for of_rank in shards.ranges():
            for number, (parameter, ranges) in enumerate(zip(shards.parameters, of_rank, strict=True)):
                if self.cut(parameter) is not None:
                    bounds = itertools.chain.from_iterable(ranges)
                    blocks.update((number, bound // BLOCK) for bound in bounds if bound % BLOCK)
        rows = {block: row for row, block in enumerate(sorted(blocks))}
        numbers = {parameter: number for number, parameter in enumerate(shards.parameters)}
        edges = []
        for tensor, (parameter, start) in shards.parts.items():
            head, tail = self.cut(tensor) or (0, 0)
            size = tensor.numel()
            for name, elements in (("head", slice(0, head)), ("tail", slice(size - tail, size))):
                block, column = divmod(start + elements.start, BLOCK)
                length = elements.stop - elements.start
                if length:
                    row = rows[numbers[parameter], block]
                    edges.append(_Edge(tensor, name, elements, row, slice(column, column + length)))
        return edges, len(rows)

    def _gather(self, edges: list[_Edge], num_rows: int) -> Tensor:
        """Return the cut blocks of weights, gradients and both moments, [4, rows, 256]. Collective."""
        assert self._shards is not None
        values = torch.zeros(4, num_rows, BLOCK, dtype=torch.float32, device=self._shards.parameters[0].device)
        for edge in edges:
            target = values[:, edge.row, edge.columns]
            target[0] = edge.tensor[edge.elements]
            target[1] = gradient_of(edge.tensor)[edge.elements]
            for number, name in enumerate(_MOMENTS, start=2):
                moment = self.state[edge.tensor].get(name)
                target[number] = 0.0 if moment is None else getattr(moment, edge.name)
        collectives.run(dist.all_reduce, values, group=self._shards.group)  # other ranks have zeros there
        return values

    def _cut_blocks(self, edges: list[_Edge], values: Tensor) -> tuple[list[_Edge], Tensor]:
        """Return edges of a group with the rows of their own blocks, and these blocks, and give them the state."""
        rows = sorted({edge.row for edge in edges})
        weights, gradients, averages, squares = values[:, rows]
        weights.grad = gradients
        step = self.state[edges[0].tensor]["step"].clone()
        self._torchao.state[weights] = {"step": step, "exp_avg": averages, "exp_avg_sq": squares}
        return [replace(edge, row=rows.index(edge.row)) for edge in edges], weights

    def _scatter(self, edges: list[_Edge], weights: Tensor) -> None:
        """Write stepped blocks back to their tensors, with moments rounded to 8 bits."""
        state = self._torchao.state[weights]
        for name in _MOMENTS:
            rounded = self._new(name, weights)
            rounded.copy_(state[name])
            values = rounded.dequantize()
            for edge in edges:
                getattr(self.state[edge.tensor][name], edge.name).copy_(values[edge.row, edge.columns])
        for edge in edges:
            edge.tensor.detach()[edge.elements] = weights[edge.row, edge.columns]


@contextlib.contextmanager
def _float32_by_default() -> Iterator[None]:
    """Set torch's default dtype to float32 within this context."""
    # torchao makes maps, scales and steps in the default dtype.
    before = torch.get_default_dtype()
    if before == torch.float32:
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _find_scales(moment, values_BS: Tensor) -> None:
    """Set scale and codes of each block of ``moment`` that can hold ``values_BS`` exactly; keep the other blocks."""
    # The largest magnitude of a block was quantized to q = 1 or, because the map has no -1, to the map's lowest value
    # q < 0. The scale is this magnitude divided by abs(q), up to two units in the last place.
    largest_B = values_BS.abs().amax(1)
    order = moment.qmap.argsort()
    midpoints = (moment.qmap[order][1:] + moment.qmap[order][:-1]) / 2
    codes_BS = moment.codes.view(-1, BLOCK)
    is_found_B = torch.zeros_like(largest_B, dtype=torch.bool)
    for extreme in (moment.qmap.max(), -moment.qmap.min()):
        for bits in range(-2, 3):
            if extreme <= 0:
                continue  # exp_avg_sq: its map has no negative values
            tried_B = ((largest_B / extreme).view(torch.int32) + bits).clamp(min=1).view(torch.float32)
            tried_BS = order[torch.bucketize(values_BS / tried_B.unsqueeze(1), midpoints)]
            fits_B = (moment.qmap[tried_BS] * tried_B.unsqueeze(1) == values_BS).all(1) & ~is_found_B
            codes_BS[fits_B] = tried_BS[fits_B].to(codes_BS.dtype)
            moment.scale[fits_B] = tried_B[fits_B]
            is_found_B |= fits_B
