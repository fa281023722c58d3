"""Kernels that make the integers of a dispatch, against fmoe.kernels.rows and fmoe.gates: equal, number by number."""

import random

import pytest
import torch

from fmoe.gates.capacity import drop_over_capacity
from fmoe.kernels.cuda import calls, rows
from fmoe.kernels.cuda.calls import TokenTiles
from fmoe.kernels.cuda.instances import MAX_EXPERTS, MAX_SEGMENTS
from fmoe.kernels.cuda.launch import SHARED
from fmoe.kernels.gates import memory_shape
from fmoe.kernels.rows import DispatchPlan, segment_order
from fmoe.routing import Routing, RoutingGroups

INT64 = torch.int64


@pytest.fixture
def tiles(request, monkeypatch):
    """Many tiles for few tokens, by the test's seed."""
    seed = request.node.callspec.params["seed"]
    monkeypatch.setattr(calls, "TILE", (1 << 20, 32, 96, 100, 256, 1)[seed % 6])
    monkeypatch.setattr(calls, "TOKEN_TILES", (512, 10, 2)[seed % 3])


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


def assert_plan(found, expert_TK, experts):
    plan = DispatchPlan.from_routing(Routing(expert_TK, expert_TK.float()), experts)
    end_E = plan.count_E.cumsum(0).int()
    expected = (plan.perm_N, plan.inverse_TK, plan.kept_TK, plan.count_E, end_E, plan.count_E.sum().view(1))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_counters_of_the_most_experts_and_segments_fit_without_opt_in(monkeypatch):
    shared = {}
    monkeypatch.setattr(calls, "_start", lambda kernel, geometry, *rest: shared.update({kernel: geometry.shared}))
    calls.place(torch.zeros(8192, dtype=INT64), MAX_EXPERTS)
    calls.segment_order(torch.ones(MAX_SEGMENTS, dtype=INT64), torch.arange(MAX_SEGMENTS), MAX_SEGMENTS)
    assert set(shared) == {"count_tiles", "place", "segment_order"}
    assert max(shared.values()) <= SHARED


@pytest.mark.by_default(*range(36))
@pytest.mark.parametrize("seed", range(60))
def test_place(launch, tiles, seed):
    expert_TK, experts = choices(seed, random.Random(seed))
    assert_plan(launch(rows.place, expert_TK, experts), expert_TK, experts)


@pytest.mark.by_default(*range(12))
@pytest.mark.parametrize("seed", range(40))
def test_drop_over_capacity(launch, tiles, seed):
    """Also the number of assignments by tile and expert, from which `place` continues."""
    draw = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    expert_TK, experts = choices(seed, draw)
    tokens, top_k = expert_TK.shape
    sequences = draw.choice([n for n in (1, 2, 3, 4, 9, 11) if tokens % n == 0]) if tokens else 1
    mask_T = torch.rand(tokens, generator=g) < 0.7 if draw.random() < 0.5 else None
    groups = RoutingGroups(
        sequences,
        tokens // sequences,
        size=draw.choice([None, max(1, tokens // 3), 7, tokens + 3]),
        sequence_first=draw.random() < 0.5,
        mask_T=mask_T,
    )
    if mask_T is not None:
        expert_TK[~mask_T] = -1
    factor = draw.choice([0.5, 1.0, 1.1, 1.25, 4.0])
    by_sequence, length = memory_shape(groups)

    def drop():
        token_tiles = TokenTiles(tokens, groups.size, by_sequence, max(length, 1))
        counted = calls.count_choices(expert_TK, mask_T, experts, token_tiles)
        kept_TK, tile_count = calls.drop_over_capacity(expert_TK, counted, calls.queue(counted, top_k, factor))
        return kept_TK, tile_count, rows.place(kept_TK, experts, tile_count)

    kept_TK, tile_count, plan = launch(drop)
    expected = drop_over_capacity(expert_TK, groups, experts, factor)
    assert torch.equal(kept_TK, expected)
    bin_N = torch.where(expected < 0, experts, expected).flatten()
    index_N = torch.arange(len(bin_N)) // calls.plan_tile(len(bin_N), experts) * (experts + 1) + bin_N
    assert torch.equal(tile_count.flatten().long(), torch.bincount(index_N, minlength=tile_count.numel()))
    assert_plan(plan, expected, experts)


@pytest.mark.parametrize("seed", range(20))
def test_segment_order(launch, seed):
    """As exchanges use it."""
    draw = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    workers = draw.randint(1, 6)
    local = draw.randint(1, 9)
    receive_WL = torch.randint(0, draw.choice([1, 3, 40]), (workers, local), generator=g)
    key_WL = torch.arange(local).expand(workers, -1)
    if seed % 2 and local > 1:  # any order
        key_WL = torch.randperm(workers * local, generator=g).view(workers, local)
    num_rows = int(receive_WL.sum())
    expected = segment_order(receive_WL, key_WL, num_rows)
    found = launch(segment_order, receive_WL, key_WL, num_rows)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
