"""Elements of a global tensor that a rank holds: blocks, flat ranges of blocks, and the boxes that make up both.

A block is a rectangle of the global tensor. A distributed optimizer cuts flattened blocks anywhere, so a rank's range
is in general not a rectangle. In row-major order, it consists of a few rectangles (head row, full rows, tail row,
recursively). These are its boxes, and each is contiguous in the range. Reading at another parallel split and checking
coverage then only intersect boxes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangle of a global tensor.

    The elements of a box from `Region.boxes` are consecutive in the region. ``position`` is the index of the box's
    first element, counted from the region's ``start``.
    """

    offset: Shape  # in the global tensor
    shape: Shape
    position: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    def slices_in(self, offset: Sequence[int]) -> tuple[slice, ...]:
        """Return the slices that select this box in an array that begins at ``offset`` of the global tensor."""
        return tuple(slice(a - o, a - o + n) for a, o, n in zip(self.offset, offset, self.shape, strict=True))

    def common(self, other: "Box") -> "Box | None":
        """Return the intersection with ``other``, or None if it is empty. The result's ``position`` has no meaning."""
        low = tuple(map(max, self.offset, other.offset))
        high = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(h - a for a, h in zip(low, high, strict=True))
        return Box(low, shape, 0) if all(n > 0 for n in shape) else None


@dataclass(frozen=True)
class Region:
    """The elements [start, stop) of a block of a global tensor. The block is flattened in row-major order.

    `Region.of` takes the whole block by default.
    """

    offset: Shape  # of the block in the tensor
    block: Shape  # shape of the block
    start: int
    stop: int

    @classmethod
    def of(cls, offset: Iterable[int], block: Iterable[int], start: int = 0, stop: int | None = None) -> "Region":
        block = tuple(block)
        return cls(tuple(offset), block, start, prod(block) if stop is None else stop)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == prod(self.block)

    @cached_property
    def boxes(self) -> list[Box]:
        """Disjoint, non-empty boxes that make up the region, in the order of its data.

        There are at most ``max(2 * len(block) - 1, 1)``.
        """
        boxes = []
        position = self.start
        for corner, shape in _boxes_of_range(self.block, self.start, self.stop):
            boxes.append(
                Box(tuple(o + c for o, c in zip(self.offset, corner, strict=True)), shape, position - self.start)
            )
            position += prod(shape)
        return boxes

    def misfit(self, shape: Sequence[int]) -> str | None:
        """Return the reason why this is not a region of a tensor of ``shape``; None if it is one."""
        if not len(self.offset) == len(self.block) == len(shape):
            return f"block {self.block} at {self.offset} differs in number of axes from the shape {tuple(shape)}"
        if any(o < 0 or n < 0 or o + n > s for o, n, s in zip(self.offset, self.block, shape, strict=True)):
            return f"block {self.block} at {self.offset} is outside the shape {tuple(shape)}"
        if not 0 <= self.start <= self.stop <= prod(self.block):
            return f"range [{self.start}, {self.stop}) is outside the block's {prod(self.block)} elements"
        return None


def merged(regions: Iterable[Region]) -> list[Region]:
    """Merge adjacent flat ranges of the same block into one. Overlapping ranges stay separate."""
    result: list[Region] = []
    for region in sorted(regions, key=lambda r: (r.offset, r.block, r.start)):
        last = result[-1] if result else None
        if last and (last.offset, last.block, last.stop) == (region.offset, region.block, region.start):
            result[-1] = Region(last.offset, last.block, last.start, region.stop)
        else:
            result.append(region)
    return result


def first_overlap(boxes: Iterable[tuple[str, Box]]) -> tuple[str, str, Shape] | None:
    """Return the labels of two boxes that share elements, and the offset of their first shared element.

    Return None if no boxes share elements. The time for n boxes is about n log n.
    """
    labelled = list(boxes)
    if len(labelled) < 2:
        return None
    num_axes = len(labelled[0][1].offset)
    if num_axes == 0:
        return labelled[0][0], labelled[1][0], ()
    # Sweep along the axis with the most distinct offsets.
    axis = max(range(num_axes), key=lambda a: len({box.offset[a] for _, box in labelled}))
    labelled.sort(key=lambda item: item[1].offset[axis])
    open_boxes: list[tuple[str, Box]] = []
    for label, box in labelled:
        begin = box.offset[axis]
        open_boxes = [(who, b) for who, b in open_boxes if b.offset[axis] + b.shape[axis] > begin]
        for who, b in open_boxes:
            if (shared := b.common(box)) is not None:
                return who, label, shared.offset
        open_boxes.append((label, box))
    return None


def _boxes_of_range(block: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield the (corner, shape) of each box in the flat range [start, stop) of a block, in row-major order."""
    if start == 0 and stop == prod(block):
        if stop:
            yield (0,) * len(block), block
        return
    inner = block[1:]
    row = prod(inner)
    while start < stop:
        index, skip = divmod(start, row)
        full_rows = (stop - start) // row if skip == 0 else 0
        if full_rows:
            yield (index, *(0 for _ in inner)), (full_rows, *inner)
            start += full_rows * row
        else:
            end = min(stop, (index + 1) * row)
            for corner, shape in _boxes_of_range(inner, skip, end - index * row):
                yield (index, *corner), (1, *shape)
            start = end
