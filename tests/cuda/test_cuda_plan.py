"""Kernels that make the integers of a dispatch, against fmoe.kernels.rows and fmoe.gates: equal, number by number."""

import random

import geometry
import pytest
import torch
from cpu_launcher import on_cpu
from emulator import InOut, Output

from fmoe.gates.capacity import drop_over_capacity
from fmoe.kernels.cuda import calls
from fmoe.kernels.cuda.instances import MAX_EXPERTS, MAX_SEGMENTS
from fmoe.kernels.gates import memory_shape
from fmoe.kernels.rows import DispatchPlan, segment_order
from fmoe.routing import Routing, RoutingGroups

INT64, INT32, BOOL, FLOAT = torch.int64, torch.int32, torch.bool, torch.float32


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


def test_counters_of_the_most_experts_and_segments_fit_without_opt_in(monkeypatch):
    shared = {}
    monkeypatch.setattr(calls, "_start", lambda kernel, geometry, *rest: shared.update({kernel: geometry.shared}))
    calls.place(torch.zeros(8192, dtype=INT64), MAX_EXPERTS)
    calls.segment_order(torch.ones(MAX_SEGMENTS, dtype=INT64), torch.arange(MAX_SEGMENTS), MAX_SEGMENTS)
    assert set(shared) == {"count_tiles", "place", "segment_order"}
    assert max(shared.values()) <= geometry.SHARED


@pytest.mark.parametrize("seed", range(60))
def test_place(launch, seed):
    draw = random.Random(seed)
    expert_TK, experts = choices(seed, draw)
    plan = DispatchPlan.from_routing(Routing(expert_TK, expert_TK.float()), experts)
    n = expert_TK.numel()
    tile = draw.choice([32, 96, 100, 256]) if seed % 4 else max(n, 1)
    tiles = max(1, -(-n // tile))
    count = None
    if tiles > 1 or seed % 8 == 0:
        (count,) = launch(
            "fmoe::count_tiles", (tiles, 256, 4 * (experts + 1)), expert_TK, n, experts, tile,
            Output((tiles, experts + 1), INT32),
        )  # fmt: skip
    has_all = draw.random() < 0.8
    order, place, *kept, counts, end, num_kept = launch(
        "fmoe::place", geometry.place(tiles, experts), expert_TK, n, experts, tile, count,
        Output((n,), INT64), Output(expert_TK.shape, INT64), Output(expert_TK.shape, BOOL) if has_all else None,
        Output((experts,), INT64), Output((experts,), INT32), Output((1,), INT64),
    )  # fmt: skip
    assert torch.equal(order, plan.perm_N)
    assert torch.equal(place, plan.inverse_TK)
    assert torch.equal(counts, plan.count_E)
    assert torch.equal(end, plan.count_E.cumsum(0).int())
    assert num_kept.item() == plan.count_E.sum()
    assert not kept or torch.equal(kept[0], plan.kept_TK)


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
    tile, plan_tile = draw.choice([8, 16, 40]), draw.choice([1, 32, 100])
    per_group, (by_sequence, length) = -(-groups.size // tile), memory_shape(groups)
    tiles = geometry.tiles(tokens, groups.size, tile)
    shape = (groups.size, by_sequence, max(length, 1), tile)
    count, sums = launch(
        "fmoe::count_choices", geometry.count_choices(tiles, top_k, experts), expert_TK, mask_T, tokens, top_k, experts,
        *shape, Output((tiles, top_k, experts), INT32), Output((tiles, 3), FLOAT),
    )  # fmt: skip
    num_tiles, num_groups = max(1, -(-expert_TK.numel() // plan_tile)), max(1, groups.count)
    zeros = Output((num_tiles, experts + 1), INT32)
    count, limit, plan_count = launch(
        "fmoe::queue", geometry.queue(groups.count, experts), InOut(count), None, sums, num_groups, per_group, top_k,
        experts, top_k, factor, Output((num_groups,), INT64), zeros, num_tiles * (experts + 1), *[None] * 7,
    )  # fmt: skip
    kept, plan_count = launch(
        "fmoe::drop_over_capacity", geometry.drop(tiles, top_k, experts), expert_TK, tokens, top_k, experts, *shape,
        count, limit, plan_tile, Output(expert_TK.shape, INT64), InOut(plan_count),
    )  # fmt: skip
    expected = drop_over_capacity(expert_TK, groups, experts, factor)
    assert torch.equal(kept, expected)
    flat_N = torch.where(expected < 0, experts, expected).flatten()
    index_N = torch.arange(len(flat_N)) // plan_tile * (experts + 1) + flat_N
    assert torch.equal(plan_count.flatten().long(), torch.bincount(index_N, minlength=plan_count.numel()))


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
