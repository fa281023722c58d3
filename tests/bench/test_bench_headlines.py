"""`make headlines`: its pairs at equal active FLOPs, and the table of finished runs."""

import json
import math

import pytest

from bench.headlines import main as headlines
from bench.headlines.main import DENSE, EXPERTS, HALF, HERE, PAIRS
from fmoe.errors import UserError
from pretrain.config import load_recipe, write_recipe


@pytest.mark.parametrize("name", PAIRS)
def test_both_models_of_a_pair_cost_the_same(name):
    path = str(HERE / f"{name}.toml")
    experts, dense = load_recipe(path, []), load_recipe(path, list(PAIRS[name].dense))
    assert dense.model.num_experts == 0 and dense.num_params() < experts.num_params()
    assert math.isclose(experts.flops_per_token(), dense.flops_per_token(), rel_tol=1e-9)
    full_dense, full = headlines._full(name)
    assert full_dense.model.num_experts == 0
    assert 1 <= full.flops_per_token() / full_dense.flops_per_token() < 1.01, "the router is the difference"


@pytest.mark.parametrize("name", ["gpt-64-bytes", "transformer-xl-64"])
def test_recipes_have_twenty_times_the_parameters(name):
    """FastMoE's section 5.4: a Transformer-XL with 64 experts of half the width, two per token."""
    dense, experts = headlines._full(name)
    assert 20 <= experts.num_params() / dense.num_params() <= 22


def run(job, losses):
    """Write a finished run with a loss for each validation."""
    job.folder.mkdir(parents=True)
    write_recipe(job.recipe, job.folder / "config.toml")
    steps = job.recipe.train.steps
    every = steps // (len(losses) - 1)
    rows = [
        {"step": n * every, "tokens": 4096 * n * every, "val/loss": loss, "tokens_per_second": 10.0}
        for n, loss in enumerate(losses)
    ]
    (job.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_table_of_finished_pairs(tmp_path, capsys):
    jobs = headlines.plan(["gpt-96", "switch-t5"], [1, 2, 3], tmp_path)
    for seed, shift in ((1, 0.0), (2, 0.02)):
        run(jobs["gpt-96", DENSE, seed], [8.0, 5.0, 4.0 + shift, 3.5, 3.0])
        run(jobs["gpt-96", EXPERTS, seed], [8.0, 5.1, 4.0, 3.0, 2.8 + shift])
    run(jobs["gpt-96", HALF, 1], [8.0, 4.0, 3.0])
    run(jobs["switch-t5", DENSE, 1], [8.0, 4.0, 3.0])  # its twin is missing
    out = tmp_path / "rows.json"
    assert headlines.main(["--folder", str(tmp_path), "--table", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert row["pair"] == "gpt-96" and row["seeds"] == [1, 2]
    assert row["reached_at"] == 1500 and row["steps"] == 2000, "the mean of both seeds is 3.0 at step 1500"
    assert row["below_from"] == 1500, "seed 1 is not below at step 1000"
    assert math.isclose(row["difference"]["mean"], -0.19)
    # Student's t with one degree of freedom; differences of -0.2 and -0.18
    assert math.isclose(row["difference"]["high"] - row["difference"]["mean"], 12.7062 * 0.01, rel_tol=1e-4)
    assert row["half"]["seeds"] == [1] and row["half"]["difference"] == {"mean": 0.0, "low": None, "high": None}
    shown = capsys.readouterr().out
    assert "1500 of 2000" in shown and "0.750 of its steps" in shown and "-0.1900 [-0.3171, -0.0629]" in shown
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["gpt-96.svg"]


def test_never_below_and_never_reached(tmp_path, capsys):
    jobs = headlines.plan(["gpt-96"], [1], tmp_path)
    run(jobs["gpt-96", DENSE, 1], [8.0, 3.0])
    run(jobs["gpt-96", EXPERTS, 1], [8.0, 3.1])
    assert headlines.main(["gpt-96", "--folder", str(tmp_path), "--table"]) == 0
    shown = capsys.readouterr().out
    assert "never" in shown and "not reached" in shown and "+0.1000" in shown


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["gpt-69"], "'gpt-69'"),
        (["--seeds", "1", "1"], "--seeds=1 1"),
        (["--at-once", "0"], "--at-once=0"),
        (["--set", "train.steps"], "train.steps"),
        (["--table"], "no finished pair"),
    ],
)
def test_wrong_options(argv, named, tmp_path):
    with pytest.raises(UserError, match=named):
        headlines.main([*argv, "--folder", str(tmp_path)])


def test_trains_what_is_not_finished_in_the_order_of_seeds(tmp_path, monkeypatch):
    began = []
    monkeypatch.setattr(headlines.study, "train", lambda jobs, **_: began.extend(job.name for job in jobs) or 75)
    assert headlines.main(["switch-t5", "gpt-96", "--seeds", "1", "2", "--folder", str(tmp_path)]) == 75
    assert began[:6] == [
        f"{name}-{model}-seed1" for name in ("switch-t5", "gpt-96") for model in (DENSE, EXPERTS, HALF)
    ]
    assert len(began) == 12
