"""The benchmark of FasterMoE's techniques: its clock and its model by hand, and a small run."""

import math
from types import SimpleNamespace

import pytest
import torch

from bench import report
from bench.studies import fastermoe
from fmoe.errors import UserError
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


@pytest.mark.parametrize("skew", [1.0, 2.0, 4.0])
def test_the_hottest_expert_gets_its_share(skew):
    arguments = SimpleNamespace(tokens=256, d_model=16, num_experts=8, top_k=2, seed=0)
    batch = fastermoe.Batch.random(0, skew, arguments)
    chosen = (batch.x_TD @ batch.gate_ED.t()).topk(2).indices
    assert int((chosen == 0).sum()) == pytest.approx(skew * 256 * 2 / 8, abs=2)


@pytest.mark.parametrize(
    "option",
    ["--ranks=3", "--ranks=1", "--skew=5", "--skew=0.5", "--bandwidth=0", "--chunks=1", "--top-k=0", "--top-k=8"],
)
def test_wrong_options(option):
    with pytest.raises(UserError, match=option):
        fastermoe.main([option])


@pytest.mark.slow
def test_two_ranks(tmp_path):
    shape = ["--tokens=512", "--d-model=32", "--d-hidden=32", "--skew", "1", "4", "--chunks=2"]
    fastermoe.main(["--ranks=2", *shape, "--bandwidth", "0.5", "inf", "--rounds=3", f"--out={tmp_path}"])
    rows = report.read(tmp_path / "fastermoe.json")
    assert [row.label for row in rows] == [
        "skew 1, 0.5 MB/s",
        "skew 1, inf MB/s",
        "skew 4, 0.5 MB/s",
        "skew 4, inf MB/s",
    ]
    assert float(rows[2].facts["plain"]["hottest expert"]) == pytest.approx(4, abs=0.1)
    for row in (rows[0], rows[2]):  # at this bandwidth time is transfers, which the model knows
        for name in ("shadow", "chunks=2", "topology"):
            assert row.ratio(name).estimate == pytest.approx(float(row.facts[name]["model"]), rel=0.1)
    assert rows[2].ratio("shadow").low > 1.5
    assert rows[0].median("plain") > 5 * rows[1].median("plain") and math.isfinite(rows[1].median("plain"))
    assert "Speedup of shadow over plain" in (tmp_path / "fastermoe.md").read_text()
