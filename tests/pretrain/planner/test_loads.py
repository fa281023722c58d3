"""Loads of a plan."""

import json

import numpy as np
import pytest

from fmoe.errors import UserError
from pretrain.planner import loads
from pretrain.planner.cluster import load_cluster


def test_shares_are_divided_into_whole_rows():
    rows = loads.shared_out(np.array([0.5, 0.25, 0.25]), 10)
    assert rows.tolist() in ([5, 3, 2], [5, 2, 3])
    # each rank rounds other experts up, so that all experts get as much
    by_rank = [loads.shared_out(np.full(4, 0.25), 5, rank) for rank in range(4)]
    assert np.sum(by_rank, axis=0).tolist() == [5, 5, 5, 5]


def test_first_rank_is_the_busiest_of_each_layer():
    shares_SLE = np.array([[[0.1, 0.1, 0.5, 0.3], [0.6, 0.2, 0.1, 0.1]]])  # on two ranks, 0.8 on one of them
    rows_WE = loads.of_slowest(shares_SLE)(1, 2, 100)
    assert rows_WE.shape == (2, 4)
    assert rows_WE.sum(1).tolist() == [100, 100]
    assert rows_WE[:, :2].sum(1).tolist() == [80, 80]


def test_skew_is_zipf():
    shares = loads.skewed(3, 1.0)[0, 0]
    assert shares == pytest.approx(np.array([6, 3, 2]) / 11)
    assert loads.skewed(3, 0.0) == pytest.approx(loads.uniform(3))


def _run(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_recorded_loads(tmp_path):
    steps = [{"step": step, "moe/layer_1/load": [0.25, 0.75], "moe/layer_2/load": [0.5, 0.5]} for step in range(1, 4)]
    run = _run(tmp_path / "run", [*steps, {"step": 4, "loss": 1.0}])
    shares_SLE = loads.recorded(run, 2, last=2)
    assert shares_SLE.shape == (2, 2, 2)
    assert shares_SLE[0].tolist() == [[0.25, 0.75], [0.5, 0.5]]
    with pytest.raises(UserError, match=r"--load.* 2 experts.* 8"):
        loads.recorded(run, 8)
    with pytest.raises(UserError, match="--load"):
        loads.recorded(_run(tmp_path / "empty", [{"step": 1, "loss": 1.0}]), 2)


def test_imbalance():
    shares_SLE = np.array([[[0.4, 0.3, 0.2, 0.1]], [[0.25, 0.25, 0.25, 0.25]]])
    figures = loads.imbalance(shares_SLE, 2, 1.2)
    assert figures["max"] == pytest.approx(1.4)  # 0.7 of the rows on one of two ranks
    assert figures["p50"] == pytest.approx(1.2)
    assert figures["placed"] == pytest.approx(2 * (0.325 + 0.175))  # of the mean loads: 0.325, 0.275, 0.225, 0.175
    assert figures["dropped"] == pytest.approx(0.1 / 2)  # above 0.3: only the first expert of the first step
    assert loads.imbalance(shares_SLE, 2, None)["dropped"] == 0


def test_ways_of_an_exchange():
    cluster = load_cluster("h100-64")
    whole = cluster.collective_seconds("all_to_all", 16, 16, 1e8)
    even = loads.exchange_seconds(cluster, loads.uniform(64), 16, 1e8, 1e6)
    assert even["flat"] == even["padded"] == even["placed"] == even["0 shadowed"] == pytest.approx(whole)
    assert even["within nodes"] == cluster.collective_seconds("all_to_all", 8, 8, 1e8)
    shares = np.full(64, 0.4 / 62)
    shares[:2] = 0.3  # two hot experts, on one rank
    hot = loads.exchange_seconds(cluster, shares[None, None], 16, 1e8, 1e6)
    assert hot["placed"] < hot["flat"] < hot["padded"]
    assert hot["2 shadowed"] < hot["placed"]
    heavy = loads.exchange_seconds(cluster, shares[None, None], 16, 1e8, 1e12)
    assert heavy["0 shadowed"] == heavy["flat"]
