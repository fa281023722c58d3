"""How parameters are divided: which tensors are stacks of experts, which are matrices, which a rank holds a part of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from fmoe.errors import UserError
from fmoe.runtime import ownership


def is_stacked(parameter: Tensor) -> bool:
    """Whether the first axis counts experts, each of which is a tensor of its own to an optimizer.

    `fmoe.experts.Stacked` marks such parameters.
    """
    if not has_mark(parameter):
        ownership.refresh()
    return has_mark(parameter)


def has_mark(parameter: Tensor) -> bool:
    """`is_stacked` after `fmoe.runtime.ownership.refresh`, for loops over parameters."""
    return getattr(parameter, "is_stacked", False)


def is_matrix(parameter: Tensor) -> bool:
    """Whether weight decay and trust ratios are for it: two axes or more, that of the experts not counted.

    Biases and norms are vectors, those of stacked experts too.
    """
    return parameter.dim() >= 2 and parameter.dim() - is_stacked(parameter) >= 2


def param_groups(model: nn.Module, weight_decay: float, **options) -> list[dict]:
    """Parameter groups for any optimizer: the trained matrices with weight decay, the vectors without.

    Args:
        options: of both groups, e.g. ``lr``.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    decays = {True: weight_decay, False: 0.0}
    groups = [{"params": [p for p in trained if is_matrix(p) is kind], "weight_decay": decays[kind]} for kind in decays]
    return [{**options, **group} for group in groups if group["params"]]


@dataclass(frozen=True)
class Blocks:
    """A parameter as equal consecutive blocks of its row-major order, each a tensor of its own to the optimizer.

    Attributes:
        numel: elements of the parameter, as far as this rank's part of the model has it.
        count: blocks; 0 for a vector, which has neither decay nor trust ratio.
        groups: ranks of each hold parts of every block: the squares of norms are summed over them. None but those
            groups, one after the other: the data parallel group of a distributed optimizer (ZeRO-1), the tensor
            parallel group of a weight that is cut over it. A replica is in no group.
    """

    numel: int
    count: int = 1
    groups: tuple[dist.ProcessGroup, ...] = ()

    @classmethod
    def of(cls, parameter: Tensor, groups: tuple[dist.ProcessGroup, ...] = ()) -> "Blocks":
        """A stack of L experts is L blocks, another matrix one."""
        count = (parameter.shape[0] if is_stacked(parameter) else 1) if is_matrix(parameter) else 0
        return cls(parameter.numel(), count, tuple(g for g in groups if g.size() > 1) if count else ())


@dataclass(frozen=True)
class Layout:
    """What the tensors that an optimizer steps are parts of.

    Attributes:
        parameters: all that it is for, those too that this rank holds nothing of: the same list, in the same order, on
            all ranks of the parameters' groups.
        parts: (number of the parameter, flat index in it of the first element) of each tensor that is stepped.
    """

    parameters: Sequence[Blocks]
    parts: Mapping[Tensor, tuple[int, int]]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Layout":
        """Every tensor is a parameter, all of it here."""
        return cls([Blocks.of(t) for t in tensors], {t: (number, 0) for number, t in enumerate(tensors)})


@dataclass(frozen=True)
class Part:
    """What of a tensor is stepped at once: some whole blocks, or one of which it may hold only a part.

    Attributes:
        index: along the tensor's first axis: experts of a stack, elements of a flat shard; None for all of it.
        count: blocks; 0 for a vector, which has none.
        block: number of the first of them among those of all parameters.
        length: elements of a block, where several of them lie flat; else None.
    """

    index: slice | None
    count: int
    block: int = 0
    length: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """A view of the tensor, or of another like it; with ``count`` rows if that is more than 1."""
        part = tensor if self.index is None else tensor[self.index]
        return part if self.length is None else part.view(self.count, self.length)


def parts_of(tensor: Tensor, blocks: Blocks, first_block: int, start: int, most: int) -> Iterator[Part]:
    """The parts of a tensor, which is elements [start, start + numel) of a parameter.

    A flat range is the end of a block, whole blocks, the begin of another. Several blocks are at most ``most``.

    Raises:
        UserError: the range lies outside the parameter, the blocks are not equal.
    """
    numel = tensor.numel()
    if not 0 <= start <= start + numel <= blocks.numel or (blocks.count and blocks.numel % blocks.count):
        raise UserError(
            f"elements {start} to {start + numel} are no part of a parameter of {blocks.numel} in {blocks.count} blocks"
        )
    if not blocks.count or not numel:
        if numel:
            yield Part(None, 0)
        return
    length = blocks.numel // blocks.count
    at_once = max(1, most // length)
    if numel == blocks.numel and tensor.dim() > 1:
        if blocks.count == 1:
            yield Part(None, 1, first_block)
        else:
            for begin in range(0, blocks.count, at_once):
                end = min(begin + at_once, blocks.count)
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
