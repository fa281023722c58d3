"""Layout of parameters: stacks of experts, matrices and vectors, and the parts of them that a rank updates."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe.errors import UserError
from fmoe.runtime import collectives, ownership

Group = dict[str, Any]  # a parameter group of torch's optimizers
State = dict[str, Any]  # the state of a tensor, by name


def is_stacked(parameter: Tensor) -> bool:
    """Return whether the parameter stacks experts along its first axis; optimizers treat each expert separately.

    `fmoe.experts.Stacked` sets the attribute ``is_stacked`` of such parameters.
    """
    if not has_mark(parameter):
        ownership.refresh()
    return has_mark(parameter)


def has_mark(parameter: Tensor) -> bool:
    """Return the parameter's attribute ``is_stacked``; False if it has none.

    `fmoe.runtime.ownership.refresh` sets the attribute. Call it first, or use `is_stacked`.
    """
    return getattr(parameter, "is_stacked", False)


def is_matrix(parameter: Tensor) -> bool:
    """Return whether the parameter is a matrix, to which weight decay and trust ratios apply.

    A matrix has two or more axes, not counting the expert axis. Biases and norms are vectors, including those of
    stacked experts.
    """
    return parameter.dim() >= 2 and parameter.dim() - is_stacked(parameter) >= 2


def param_groups(model: nn.Module, weight_decay: float, **options) -> list[dict]:
    """Return parameter groups for any optimizer: trained matrices have weight decay, trained vectors have none.

    Args:
        options: options of both groups, such as ``lr``.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if is_matrix(p)]
    vectors = [p for p in trained if not is_matrix(p)]
    groups = ((matrices, weight_decay), (vectors, 0.0))
    return [{**options, "params": params, "weight_decay": decay} for params, decay in groups if params]


@dataclass(frozen=True)
class Blocks:
    """Division of a parameter into equal blocks, each of which the optimizer treats as a separate tensor.

    The blocks follow each other in row-major order.

    Attributes:
        numel: number of elements of the parameter, which may itself be a tensor parallel slice.
        count: number of blocks; 0 for a vector, which has neither decay nor trust ratio.
        groups: process groups whose ranks hold different parts of the blocks: the data parallel group of a distributed
            optimizer (ZeRO-1), and the tensor parallel group of a split weight. Squared norms are summed over each
            group in turn, so a group of replicas must not be listed.
    """

    numel: int
    count: int = 1
    groups: tuple[dist.ProcessGroup, ...] = ()

    @classmethod
    def of(cls, parameter: Tensor, groups: tuple[dist.ProcessGroup, ...] = ()) -> "Blocks":
        """Divide a stack of L experts into L blocks; any other matrix is one block, and a vector has none."""
        if not is_matrix(parameter):
            return cls(parameter.numel(), 0)
        count = parameter.shape[0] if is_stacked(parameter) else 1
        return cls(parameter.numel(), count, tuple(g for g in groups if g.size() > 1))


@dataclass(frozen=True)
class Layout:
    """The parameters of an optimizer, and the tensors in its parameter groups, which may be parts of parameters.

    Attributes:
        parameters: the blocks of each parameter, including parameters without elements on this rank. The list is
            equal on all ranks of the blocks' process groups.
        parts: (index of the parameter, offset in the flattened parameter) of each tensor in the parameter groups.
    """

    parameters: Sequence[Blocks]
    parts: Mapping[Tensor, tuple[int, int]]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Layout":
        """Return the layout in which every tensor is a whole parameter."""
        return cls([Blocks.of(t) for t in tensors], {t: (number, 0) for number, t in enumerate(tensors)})


@dataclass(frozen=True)
class Shards:
    """The tensors in an optimizer's parameter groups, as ranges of parameters.

    Attributes:
        parts: (parameter, offset in the flattened parameter) of each of these tensors.
        parameters: all parameters, even if this rank has no part of them; in the same order on all ranks.
        group: data parallel group over whose ranks parameters are divided (ZeRO); None if every tensor is whole.
    """

    parts: Mapping[Tensor, tuple[Tensor, int]]
    parameters: Sequence[Tensor]
    group: dist.ProcessGroup | None = None

    def ranges(self) -> list[list[list[list[int]]]]:
        """Gather the ranges [begin, end) that a rank has of a parameter. Collective over `group`.

        Returns:
            Lists [ranks][parameters][ranges][2]. Without a group, an empty list.
        """
        if self.group is None or not self.parameters:
            return []
        numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        held: list[list[list[int]]] = [[] for _ in numbers]
        for tensor, (parameter, start) in self.parts.items():
            held[numbers[parameter]].append([start, start + tensor.numel()])
        held = [ranges or [[0, 0]] for ranges in held]  # from here on, equally many on every rank
        flat = list(itertools.chain.from_iterable(held))
        of_this_rank = torch.tensor(flat, dtype=torch.int64, device=self.parameters[0].device)
        counts = [len(ranges) for ranges in held]
        gathered = []
        for of_rank in collectives.gather(of_this_rank, self.group):
            gathered.append([ranges.tolist() for ranges in of_rank.split(counts)])
        return gathered


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the result of a closure that computes the loss and its gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def gradient_of(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor that other ranks step parts of; raise a RuntimeError if it has none."""
    if tensor.grad is None:
        shape = list(tensor.shape)
        raise RuntimeError(f"a tensor of shape {shape} has no gradient, but other ranks step parts of its parameter")
    return tensor.grad


@dataclass(frozen=True)
class Part:
    """A piece of a tensor: one or more whole blocks (`Blocks`), or a slice of one block.

    Attributes:
        index: slice of the tensor's first axis (experts of a stack, or elements of a flat shard); None for all of it.
        count: number of blocks; 0 for a vector.
        block: index of the first block among the blocks of all parameters.
        length: elements per block, if the piece is one-dimensional and holds several blocks; else None.
    """

    index: slice | None
    count: int
    block: int = 0
    length: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return the piece of a tensor as a view, with one row per block if it has several blocks."""
        part = tensor if self.index is None else tensor[self.index]
        return part if self.length is None else part.view(self.count, self.length)


def parts_of(tensor: Tensor, blocks: Blocks, first_block: int, start: int, max_numel: int) -> Iterator[Part]:
    """Yield the pieces of a tensor that holds elements [start, start + tensor.numel()) of a parameter.

    The elements may begin and end within a block. The end of a block, whole blocks, and the start of another block are
    then separate pieces. A piece of several whole blocks has at most ``max_numel`` elements.

    Args:
        blocks: blocks of the parameter.
        first_block: index of the first of them among the blocks of all parameters.

    Raises:
        UserError: the range exceeds the parameter; the parameter does not divide into equal blocks.
    """
    numel = tensor.numel()
    if not 0 <= start <= start + numel <= blocks.numel:
        raise UserError(f"elements {start} to {start + numel} exceed a parameter of {blocks.numel} elements")
    num_blocks = blocks.count
    if num_blocks and blocks.numel % num_blocks:
        raise UserError(f"a parameter of {blocks.numel} elements does not divide into {num_blocks} equal blocks")
    if not numel:
        return
    if not num_blocks:
        yield Part(None, 0)
        return
    length = blocks.numel // num_blocks
    at_once = max(1, max_numel // length)
    if numel == blocks.numel and tensor.dim() > 1:
        if num_blocks == 1:
            yield Part(None, 1, first_block)
        else:
            for begin in range(0, num_blocks, at_once):
                end = min(begin + at_once, num_blocks)
                yield Part(slice(begin, end), end - begin, first_block + begin)
        return
    offset = 0
    while offset < numel:
        block, within = divmod(start + offset, length)
        count = min((numel - offset) // length, at_once) if not within else 0
        size = count * length or min(length - within, numel - offset)
        index = slice(offset, offset + size)
        yield Part(index, max(count, 1), first_block + block, length if count > 1 else None)
        offset += size
