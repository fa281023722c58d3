"""The benchmark of FasterMoE's techniques: its clock and its model by hand."""

from types import SimpleNamespace

import pytest
import torch

from bench.studies import fastermoe
from fmoe.exchange.shadow import Cost


def clock_of_transfers():
    """Return the seconds that a rank's clock shows after each of three collectives, at 1000 bytes per second."""
    import torch
    import torch.distributed as dist

    from bench.studies.link import Link
    from fmoe.exchange import collectives

    group, rank, link, seen = dist.group.WORLD, dist.get_rank(), Link(), []
    plain = collectives.Pending
    link.bandwidth = 1e3
    with link:
        link.line_up()
        # Rank 0 sends 100 floats to rank 1 and gets 10: the busier direction of either rank has 400 bytes.
        send, receive = ([5, 100], [5, 10]) if rank == 0 else ([10, 5], [100, 5])
        collectives.all_to_all(group, torch.ones(sum(send)), receive, send).wait()
        seen.append(link.now())
        # Two at once: the second waits for the first. The broadcast passes each rank once.
        first = collectives.all_to_all(group, torch.ones(100), [50, 50], [50, 50])
        second = collectives.broadcast(group, torch.ones(25), 0)
        second.wait()
        first.wait()
        seen.append(link.now())
    assert collectives.Pending is plain
    return seen


def test_transfers_take_bytes_over_bandwidth(two_ranks):
    for first, second in two_ranks.run(clock_of_transfers):
        assert first == pytest.approx(0.4, abs=0.05)  # the rest is processor time
        assert second == pytest.approx(0.4 + 0.2 + 0.1, abs=0.05)


def test_model_by_hand():
    # Two ranks, an expert each. Rank 0 has 10 and 10 rows, rank 1 has 30 and 10: rank 0 computes 40.
    loads = {"plain": torch.tensor([[10, 10], [30, 10]]), "topology": torch.tensor([[20, 0], [0, 40]])}
    arguments = SimpleNamespace(num_experts=2, ranks=2, chunks=[2, 3])
    model = fastermoe.predicted(loads, arguments, Cost(row_seconds=3, row_bytes=10, expert_bytes=100, bandwidth=10))
    computed, sent = 40 * 3, 4 * 30 * 10 / 10  # seconds: the busiest link carries 30 rows, four times
    plain = computed + sent
    # The hot expert is sent twice. Rank 1 computes its 30 rows and 20 of its own expert, 10 of which came to it.
    assert model["shadow"] == pytest.approx(plain / (50 * 3 + 4 * 10 + 2 * 10))
    assert model["topology"] == pytest.approx(plain / (40 * 3))
    forward, backward = max(60, 40 + 60 / 2), max(60, 80 + 60 / 2)
    assert model["chunks=2"] == pytest.approx(plain / (forward + backward))
    assert model["chunks=3"] == pytest.approx(plain / (max(60, 40 + 20) + (80 + 20)))
