"""Boxes of flat ranges and the coverage sweep, against enumeration of every element."""

import itertools
import random
from math import prod

import pytest
import torch

from pretrain.checkpoint.geometry import Region, first_overlap, merged


@pytest.mark.parametrize("block", [(), (1,), (5,), (3, 4), (1, 4), (4, 1), (2, 3, 2), (2, 1, 3, 2)], ids=str)
def test_boxes_hold_exactly_the_range_in_its_order(block):
    offset = tuple(range(1, len(block) + 1))
    index = torch.arange(prod(block)).view(block)
    for start, stop in itertools.combinations_with_replacement(range(prod(block) + 1), 2):
        region = Region.of(offset, block, start, stop)
        held = [index[box.slices_in(offset)].reshape(-1) for box in region.boxes]
        assert torch.equal(torch.cat(held) if held else torch.arange(0), torch.arange(start, stop))
        assert [box.position for box in region.boxes] == [int(values[0]) - start for values in held]
        assert len(region.boxes) <= max(1, 2 * len(block) - 1)


@pytest.mark.parametrize(
    "region, shape",
    [
        (Region.of((0,), (2,)), (2, 2)),
        (Region.of((0,), (2, 2)), (2, 2)),
        (Region.of((1, 0), (2, 2)), (2, 2)),
        (Region.of((-1, 0), (2, 2)), (2, 2)),
        (Region.of((0, 0), (2, 2), 0, 5), (2, 2)),
        (Region.of((0, 0), (2, 2), 3, 2), (2, 2)),
    ],
    ids=["axes", "offset", "beyond", "negative", "range", "backwards"],
)
def test_misfits_are_told(region, shape):
    assert region.misfit(shape)
    assert Region.of((0, 0), (2, 2), 1, 3).misfit((2, 2)) is None


def test_first_overlap_agrees_with_counting_elements():
    generator = random.Random(0)
    seen = set()
    for _ in range(300):
        shape = tuple(generator.randint(1, 5) for _ in range(generator.randint(0, 3)))
        count, boxes = torch.zeros(shape), []
        for label in "abc":
            offset = tuple(generator.randrange(n) for n in shape)
            block = tuple(generator.randint(1, n - o) for n, o in zip(shape, offset, strict=True))
            start = generator.randrange(prod(block))
            region = Region.of(offset, block, start, generator.randint(start + 1, prod(block)))
            for box in region.boxes:
                count[box.slices_in((0,) * len(shape))] += 1
                boxes.append((label, box))
        overlap = first_overlap(boxes)
        seen.add(overlap is None)
        assert (overlap is not None) == bool((count > 1).any())
        if overlap:
            first, second, place = overlap
            assert first != second
            assert count[place] > 1
    assert seen == {True, False}


def test_merging_keeps_what_is_held():
    block, elsewhere = ((0, 0), (4, 4)), Region.of((4, 0), (4, 4))
    parts = [Region.of(*block, a, b) for a, b in [(9, 16), (0, 3), (3, 3), (3, 9)]]
    assert merged([elsewhere, *parts]) == [Region.of(*block), elsewhere]
    halves = [Region.of(elsewhere.offset, elsewhere.block, a, b) for a, b in [(0, 8), (8, 16)]]
    assert merged([*halves, *parts]) == [Region.of(*block), elsewhere]
    for other in [(2, 9), (4, 9), (3, 8), (0, 9)]:
        regions = [Region.of(*block, 0, 3), Region.of(*block, *other), Region.of(*block, 9, 16)]
        assert len(merged(regions)) > 1
        assert sum(region.size for region in merged(regions)) == sum(region.size for region in regions)
