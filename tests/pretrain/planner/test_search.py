"""``fmoe plan RECIPE``: the search, its result as a recipe, and errors."""

import json

import pytest

from pretrain.config.load import load_recipe
from pretrain.planner.cluster import CLUSTERS

TINY = [
    "quickstart",
    "--model.num_layers=2",
    "--model.hidden_size=32",
    "--model.ffn_hidden_size=32",
    "--model.vocab_size=256",
    "--model.sequence_length=16",
    "--attention.num_heads=2",
    "--moe.num_experts=4",
    "--train.global_batch=8",
    "--train.micro_batch=2",
]


def _plan(forks, *words):
    (ended,) = forks.command("fmoe", "plan", *TINY, *words)
    return ended


def test_best_split_is_written_and_passes_the_check(forks, tmp_path):
    path = tmp_path / "best.toml"
    ended = _plan(forks, "--cluster", "h100-4", "--tokens", "1e9", "--json", "--out", str(path))
    assert ended.code == 0, ended.err
    planned = json.loads(ended.out)
    seconds = [plan["seconds"] for plan in planned["plans"]]
    assert seconds == sorted(seconds)
    best = planned["plans"][0]
    assert best["days"] == pytest.approx(1e9 / best["tokens_per_second"] / 86400)
    assert sum(best["terms"].values()) == pytest.approx(best["seconds"])
    recipe = load_recipe(str(path))
    assert recipe.parallel.world_size == 4
    assert {key: getattr(recipe.parallel, key) for key in ("tensor", "pipeline", "expert", "data", "shard")} == {
        key: best["split"][key] for key in ("tensor", "pipeline", "expert", "data", "shard")
    }
    assert recipe.tracking.plan["seconds"] == pytest.approx(best["seconds"], rel=1e-3)
    assert all(neighbor["why"] for neighbor in planned["neighbors"])
    assert "all-reduce of gradients, ring" in planned["other_methods"]
    # all neighbors of the best were tried, and none of those that fit is faster
    assert not any(one["fits"] and one["seconds"] < best["seconds"] for one in planned["tried"])


def test_text_names_the_best_split_and_its_price(forks, tmp_path):
    cluster = tmp_path / "here.toml"
    cluster.write_text(
        'name = "here"\nsource = "made up"\nnum_ranks = 2\nlinks = [{size = 2, bandwidth = 1e9, latency = 1e-5}]\n'
        "[device]\nmemory = 1e9\nefficiency = 0.5\nbandwidth = 1e10\nlaunch = 1e-6\npeak = {fp32 = 1e11}\n"
        '[price]\nper_rank_hour = 2.0\ncurrency = "EUR"\n'
    )
    ended = _plan(forks, "--cluster", str(cluster), "--skew", "1")
    assert ended.code == 0, ended.err
    assert "EUR" in ended.out
    assert "per rank, without activations" in ended.out  # the dry run


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--cluster", "h100-8", "--ranks", "9"], ("--ranks=9 ", "8")),
        (["--cluster", "h100-8", "--skew", "-1"], ("--skew=-1 ", "0")),
        (["--cluster", "h100-8", "--tokens", "inf"], ("--tokens=inf ", "1")),
        (["--cluster", "nowhere-8"], ("nowhere-8", "h100-RANKS")),
        ([], ("--cluster",)),
        (["--cluster", "h100-8", "--load", "missing"], ("missing",)),
        (["--cluster", "h100-7"], ("7 ranks",)),
        (["--cluster", "h100-8", "--moe.top_k=9"], ("moe.top_k",)),
    ],
)
def test_errors_are_one_line(forks, words, parts):
    ended = _plan(forks, *words)
    assert ended.code == 2
    assert ended.out == ""
    lines = [line for line in ended.err.splitlines() if "splits tried" not in line]
    assert len(lines) == 1
    assert all(part in lines[0] for part in parts), lines


def test_a_cluster_that_cannot_hold_the_model(forks, tmp_path):
    small = tmp_path / "small.toml"
    text = (CLUSTERS / "h100.toml").read_text().replace("memory = 80e9", "memory = 1e5")
    small.write_text(text.replace("num_ranks = 16384  # 64 scalable units of 32 nodes", "num_ranks = 2"))
    out = tmp_path / "best.toml"
    ended = _plan(forks, "--cluster", str(small), "--out", str(out))
    assert ended.code == 2
    assert "device.memory=1e+05" in ended.err
    assert not out.exists()
