"""Kernels that make the integers of a dispatch, against fmoe.kernels.rows and fmoe.gates: equal, number by number."""

import random

import geometry
import pytest
import torch
from cpu_launcher import on_cpu
from emulator import InOut, Output

from fmoe.exchange.hops import segment_order
from fmoe.gates.router import count_by_group, drop_over_capacity
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing, RoutingGroups

INT64, INT32, BOOL = torch.int64, torch.int32, torch.bool


def choices(seed, draw):
    """Distinct experts for each token, some dropped, some never chosen."""
    g = torch.Generator().manual_seed(seed)
    tokens = draw.choice([0, 1, 5, 31, 64, 100, 333])
    experts = draw.choice([1, 2, 7, 32, 33, 65, 200])
    top_k = experts if seed % 9 == 0 and experts < 40 else draw.randint(1, min(8, experts))
    score_TE = torch.rand(tokens, experts, generator=g)
    score_TE[:, : draw.choice([0, 0, experts // 2])] -= 0.7  # skewed
    expert_TK = score_TE.argsort(1, descending=True)[:, :top_k].clone()
    expert_TK[torch.rand(expert_TK.shape, generator=g) < draw.choice([0, 0, 0.3, 1.0])] = -1
    return expert_TK, experts


@pytest.mark.parametrize("seed", range(60))
def test_place(launch, seed):
    draw = random.Random(seed)
    expert_TK, experts = choices(seed, draw)
    plan = DispatchPlan.from_routing(Routing(expert_TK, expert_TK.float()), experts)
    n = expert_TK.numel()
    tile = draw.choice([32, 96, 100, 256]) if seed % 4 else max(n, 1)
    tiles = max(1, -(-n // tile))
    count = total = None
    if tiles > 1 or seed % 8 == 0:
        (count,) = launch(
            "fmoe::count_tiles", (tiles, 256, 4 * (experts + 1)), expert_TK, n, experts, tile,
            Output((experts + 1, tiles), INT32),
        )  # fmt: skip
        count, total = launch(
            "fmoe::scan_tiles", (experts + 1, 256, 32), InOut(count), tiles, Output((experts + 1,), INT32)
        )
    has_all = draw.random() < 0.8
    order, place, *kept, counts, end, num_kept = launch(
        "fmoe::place", geometry.place(tiles, experts), expert_TK, n, experts, tile, count, total,
        Output((n,), INT64), Output(expert_TK.shape, INT64), Output(expert_TK.shape, BOOL) if has_all else None,
        Output((experts,), INT64), Output((experts,), INT32), Output((1,), INT64),
    )  # fmt: skip
    assert torch.equal(order, plan.perm_N)
    assert torch.equal(place, plan.inverse_TK)
    assert torch.equal(counts, plan.count_E)
    assert torch.equal(end, plan.count_E.cumsum(0).int())
    assert num_kept.item() == plan.count_E.sum()
    assert not kept or torch.equal(kept[0], plan.kept_TK)


def test_scan_of_more_tiles_than_threads(launch):
    g = torch.Generator().manual_seed(0)
    count = torch.randint(0, 9, (3, 700), generator=g, dtype=INT32)
    before, total = launch("fmoe::scan_tiles", (3, 256, 32), InOut(count), 700, Output((3,), INT32))
    assert torch.equal(before, count.cumsum(1).int() - count)
    assert torch.equal(total, count.sum(1).int())


@pytest.mark.parametrize("seed", range(40))
def test_drop_over_capacity(launch, seed):
    draw = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    expert_TK, experts = choices(seed, draw)
    tokens, top_k = expert_TK.shape
    lengths = [n for n in (1, 2, 3, 4, 9, 11) if tokens % n == 0]
    sequences = draw.choice(lengths) if tokens else 1
    sequence_first = draw.random() < 0.5
    mask_T = torch.rand(tokens, generator=g) < 0.7 if draw.random() < 0.5 else None
    size = draw.choice([None, max(1, tokens // 3), 7, tokens + 3])
    groups = RoutingGroups(
        sequences, tokens // sequences, size=size, sequence_first=sequence_first, mask_T=mask_T
    )  # fmt: skip
    if mask_T is not None:
        expert_TK[~mask_T] = -1
    factor = draw.choice([0.5, 1.0, 1.1, 1.25, 4.0])
    is_limited = bool(seed % 5)
    by_sequence = sequence_first and sequences > 1
    kept, load = launch(
        "fmoe::drop_over_capacity", geometry.drop(groups.count, experts), expert_TK, mask_T, tokens, top_k, experts,
        groups.size, sequences if by_sequence else 1, tokens // sequences if by_sequence else max(tokens, 1),
        factor if is_limited else 0.0, Output(expert_TK.shape, INT64), Output((groups.count, experts), INT64),
    )  # fmt: skip
    expected = drop_over_capacity(expert_TK, groups, experts, factor) if is_limited else expert_TK
    assert torch.equal(kept, expected)
    assert torch.equal(load, count_by_group(expert_TK, groups, experts).view(groups.count, experts))


@pytest.mark.parametrize("seed", range(20))
def test_segment_order(launch, kernels, seed):
    draw = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    workers, local = draw.randint(1, 6), draw.randint(1, 9)
    receive_WL = torch.randint(0, draw.choice([1, 3, 40]), (workers, local), generator=g)
    key_WL = torch.arange(local).expand(workers, -1)
    if seed % 2 and local > 1:  # any order
        key_WL = torch.randperm(workers * local, generator=g).view(workers, local)
    num_rows = int(receive_WL.sum())
    expected = segment_order(receive_WL, key_WL, num_rows)
    segments = workers * local
    found = launch(
        "fmoe::segment_order", geometry.segment_order(segments, num_rows), receive_WL.reshape(-1),
        key_WL.reshape(-1).argsort(stable=True), segments, num_rows, *[Output((num_rows,), INT64)] * 2,
    )  # fmt: skip
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    with on_cpu(kernels, seed) as launcher:  # as exchanges take it
        found = segment_order(receive_WL, key_WL, num_rows)
    assert launcher.names() == {"segment_order"}
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
