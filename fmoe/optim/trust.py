"""Base class of layer-wise adaptive optimizers: norms of blocks, their reduction over ranks, multi-tensor steps."""

import functools
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fmoe.errors import UserError
from fmoe.optim.layout import Group, Layout, Part, State, loss_of, parts_of
from fmoe.routing import sum_dtype
from fmoe.runtime import collectives

# Elements stepped together: enough to hide kernel launches, but few enough that temporaries fit a CPU's cache.
_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}


@dataclass(frozen=True)
class Slot:
    """A piece of a tensor, with its parameter group and the indices of its blocks (`fmoe.optim.Blocks`)."""

    tensor: Tensor
    group: Group
    part: Part
    blocks: Tensor

    @property
    def gradient(self) -> Tensor:
        """The gradient of the tensor; raises a RuntimeError if it has none."""
        if self.tensor.grad is None:
            raise RuntimeError(f"a tensor of shape {list(self.tensor.shape)} has no gradient: callers must skip it")
        return self.tensor.grad


@dataclass(frozen=True)
class Plan:
    """The order in which an optimizer steps its tensors, and buffers for norms and trust ratios.

    ``squares`` is [2, O] and ``ratios`` is [O], with O blocks (`fmoe.optim.Blocks`) in all parameters together.
    """

    chunks: list[list[Slot]]  # each of one group, device, dtype and kind
    squares: Tensor  # [2, O]: squared norms of weights, and of gradients or updates
    ratios: Tensor  # [O], in the widest stepped dtype, at least float32
    spans: list[tuple[int, int]]  # range of blocks of each parameter
    reductions: list[tuple[dist.ProcessGroup, Tensor | None]]  # group and its blocks, None for all


class WideOptimizer(Optimizer):
    """Base class of optimizers whose state of 16-bit parameters is float32."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in its saved dtypes; torch's method casts it to the parameter's dtype."""
        super().load_state_dict(state_dict)
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        tensors = (tensor for group in self.param_groups for tensor in group["params"])
        for number, tensor in zip(numbers, tensors, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name != "step" and isinstance(value, Tensor):
                    self.state[tensor][name] = value.to(tensor.device, copy=True)


class TrustOptimizer(WideOptimizer):
    """Base class that scales the update of each block by a trust ratio. Subclasses compute update and ratio.

    A block is a matrix or an expert of a stack (`fmoe.optim.Blocks`). 16-bit parameters have float32 state, and are
    rounded once per step.
    """

    state_names: tuple[str, ...] = ()
    _compares_gradients = False  # whether the ratio compares weights with gradients; otherwise with updates

    def __init__(self, params, defaults: dict[str, Any]):
        self._layout: Layout | None = None
        self._plan_now: Plan | None = None
        super().__init__(params, defaults)

    def set_layout(self, layout: Layout | None) -> None:
        """Set the layout of the tensors in the parameter groups; None if each is a whole parameter.

        From then on, all ranks of the process groups in the layout must take the same steps.
        """
        self._layout = layout
        self._plan_now = None

    def trust_ratios(self) -> list[Tensor]:
        """Return the trust ratios of the last step: a tensor [blocks] per parameter, which is empty for vectors.

        They are float32, or float64 if a parameter is, on the device of the parameters. The ratio is NaN for a block
        that this rank never stepped, because it holds no slice of the block or because there was no gradient yet.
        """
        plan = self._plan()
        return [plan.ratios[begin:end].clone() for begin, end in plan.spans]

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        self._plan_now = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan_now = None
        self.__dict__.setdefault("_layout", None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, together with all ranks of the process groups in the layout."""
        loss = loss_of(closure)
        plan = self._plan()
        plan.squares.zero_()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self._begin(tensor, self.state[tensor])
        slots = [slot for chunk in plan.chunks for slot in chunk if slot.tensor.grad is not None]
        if slots and self._at_once(slots, plan):
            return loss
        waiting = []
        for chunk in plan.chunks:
            slots = [slot for slot in chunk if slot.tensor.grad is not None]
            if not slots:
                continue
            weights, gradients = _values(slots)
            self._advance(slots, gradients)
            updates = self._updates(slots, weights, gradients)
            if slots[0].part.count:
                _measure(plan.squares, slots, weights, gradients if self._compares_gradients else updates)
                if plan.reductions:
                    # Wait for the norms of the other ranks. The update is then recomputed from the moments, because
                    # keeping it would take as much memory as the parameters.
                    waiting.append(slots)
                    continue
            self._apply(plan, slots, weights, updates)
        self._reduce(plan)
        for slots in waiting:
            weights, gradients = _values(slots)
            self._apply(plan, slots, weights, self._updates(slots, weights, gradients))
        return loss

    def _at_once(self, slots: list[Slot], plan: Plan) -> bool:
        """Update the tensors of ``slots`` with fused kernels and return True.

        Without suitable kernels, change nothing and return False.
        """
        return False

    def _reduce(self, plan: Plan) -> None:
        """Sum ``plan.squares`` over the ranks that hold slices of the same block."""
        for group, blocks in plan.reductions:
            part = plan.squares if blocks is None else plan.squares[:, blocks]
            collectives.run(dist.all_reduce, part, group=group)
            if blocks is not None:
                plan.squares[:, blocks] = part

    def _states(self, slots: list[Slot], name: str) -> list[Tensor]:
        return [slot.part.of(self.state[slot.tensor][name]) for slot in slots]

    def _apply(self, plan: Plan, slots: list[Slot], weights: list[Tensor], updates: list[Tensor]) -> None:
        """Apply ``updates``, times their trust ratios, to the tensors of ``slots``. Overwrites ``updates``."""
        if slots[0].part.count:
            self._scale(plan, slots, updates)
        self._move(slots, weights, updates)
        for slot, weight in zip(slots, weights, strict=True):
            if slot.tensor.dtype != weight.dtype:  # a 16-bit tensor, and its float32 copy
                slot.part.of(slot.tensor).copy_(weight)

    def _scale(self, plan: Plan, slots: list[Slot], updates: list[Tensor]) -> None:
        """Multiply ``updates`` by their trust ratios in place, and write the ratios to ``plan.ratios``."""
        group = slots[0].group
        blocks = _blocks(slots)
        weight_norms, compared_norms = plan.squares[:, blocks].sqrt()
        ratio = self._ratio(weight_norms, compared_norms, group)
        ratio = torch.where((weight_norms > 0) & (compared_norms > 0), ratio, 1.0)
        ratio = ratio.clamp(max=group["max_trust"] or torch.inf).to(updates[0].dtype)
        plan.ratios[blocks] = ratio.to(plan.ratios.dtype)
        factors = ratio.split([slot.part.count for slot in slots])
        single = [number for number, slot in enumerate(slots) if slot.part.count == 1]
        if single:
            torch._foreach_mul_([updates[n] for n in single], [factors[n][0] for n in single])
        for slot, update, factor in zip(slots, updates, factors, strict=True):
            if slot.part.count > 1:
                update.mul_(factor.view(-1, *[1] * (update.dim() - 1)))

    def _plan(self) -> Plan:
        if self._plan_now is None:
            self._plan_now = self._make_plan()
        return self._plan_now

    def _make_plan(self) -> Plan:
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        for tensor in tensors:
            if hasattr(tensor, "placements"):
                raise UserError(
                    f"{type(self).__name__} does not support DTensors: norms need whole weights; use AdamW with FSDP"
                )
        layout = self._layout or Layout.of(tensors)
        device = tensors[0].device if tensors else torch.device("cpu")
        ends = [0]
        for parameter_blocks in layout.parameters:
            ends.append(ends[-1] + parameter_blocks.count)
        chunks: dict[tuple, list[list[Slot]]] = {}
        filled: dict[tuple, int] = defaultdict(int)
        for number, group in enumerate(self.param_groups):
            for tensor in group["params"]:
                parameter, start = layout.parts[tensor]
                limit = _CHUNK.get(tensor.device.type, _CHUNK["cuda"])
                for part in parts_of(tensor, layout.parameters[parameter], ends[parameter], start, limit):
                    kind = (number, tensor.device, stepped_dtype(tensor), part.count > 0)
                    size = part.of(tensor).numel()
                    alike = chunks.setdefault(kind, [[]])
                    if alike[-1] and filled[kind] + size > limit:
                        alike.append([])
                        filled[kind] = 0
                    blocks = torch.arange(part.block, part.block + part.count, device=device, dtype=torch.int64)
                    alike[-1].append(Slot(tensor, group, part, blocks))
                    filled[kind] += size
        # In float64 no square overflows; MPS does not support it.
        exact = sum_dtype(device)
        widest = functools.reduce(torch.promote_types, map(stepped_dtype, tensors), torch.float32)
        return Plan(
            chunks=[chunk for alike in chunks.values() for chunk in alike],
            squares=torch.zeros(2, ends[-1], dtype=exact, device=device),
            ratios=torch.full((ends[-1],), torch.nan, dtype=widest, device=device),
            spans=list(pairwise(ends)),
            reductions=list(_reductions(layout, ends, device)),
        )

    def _begin(self, tensor: Tensor, state: State) -> None:
        """Prepare a step of the tensor; create its state if needed."""
        if not state:
            state |= {name: torch.zeros_like(tensor, dtype=stepped_dtype(tensor)) for name in self.state_names}

    @abstractmethod
    def _advance(self, slots: list[Slot], gradients: list[Tensor]) -> None:
        """Update the state with the gradients."""

    @abstractmethod
    def _updates(self, slots: list[Slot], weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Return new float tensors: the updates, without trust ratio and learning rate. A step may call this twice."""

    @abstractmethod
    def _ratio(self, weight_norms: Tensor, compared_norms: Tensor, group: Group) -> Tensor:
        """Return the trust ratios of blocks, given the norms of their weights, and of their gradients or updates.

        Ratios of blocks with a norm of 0 are not used.
        """

    @abstractmethod
    def _move(self, slots: list[Slot], weights: list[Tensor], updates: list[Tensor]) -> None:
        """Apply ``updates``, which it may overwrite, to ``weights``, the values of the tensors of ``slots``."""


def _reductions(layout: Layout, ends: list[int], device: torch.device) -> Iterator[tuple[dist.ProcessGroup, Any]]:
    groups = list(dict.fromkeys(group for blocks in layout.parameters for group in blocks.groups))
    for group in groups:
        taking_part = [
            torch.arange(ends[number], ends[number + 1], device=device, dtype=torch.int64)
            for number, blocks in enumerate(layout.parameters)
            if group in blocks.groups
        ]
        blocks = torch.cat(taking_part)
        yield group, None if len(blocks) == ends[-1] else blocks


def _values(slots: list[Slot]) -> tuple[list[Tensor], list[Tensor]]:
    """Return weights and gradients: float32 copies of 16-bit tensors, views of others."""
    weights = floats([slot.part.of(slot.tensor) for slot in slots])
    return weights, floats([slot.part.of(slot.gradient) for slot in slots])


def _blocks(slots: list[Slot]) -> Tensor:
    return torch.cat([slot.blocks for slot in slots])


def _measure(squares: Tensor, slots: list[Slot], weights: list[Tensor], compared: list[Tensor]) -> None:
    """Write the squared norm of each block to ``squares``.

    Row 0 is for ``weights``. Row 1 is for ``compared``, which are gradients or updates.
    """
    blocks = _blocks(slots)
    for row, tensors in enumerate((weights, compared)):
        single = [tensor for tensor, slot in zip(tensors, slots, strict=True) if slot.part.count == 1]
        of_single = iter(torch._foreach_norm(single) if single else ())
        norms = [
            next(of_single).view(1)
            if slot.part.count == 1
            else torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.dim())))
            for tensor, slot in zip(tensors, slots, strict=True)
        ]
        squares[row, blocks] = torch.cat(norms).to(squares).square()


def stepped_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of the tensor's state and updates: the tensor's own, but at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def floats(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return 16-bit tensors as float32 copies, others unchanged."""
    return [tensor if tensor.dtype.itemsize >= 4 else tensor.float() for tensor in tensors]
