"""`make headlines`: its pairs at equal active FLOPs, the table of finished runs, and the benchmarks after them."""

import json
import math

import pytest

from bench import __main__ as bench_main
from bench.studies.headlines import main as headlines
from bench.studies.headlines.main import DENSE, EXPERTS, HALF, HERE, PAIRS, STUDIES
from pretrain.config import load_recipe, write_recipe


@pytest.mark.parametrize("name", PAIRS)
def test_both_models_of_a_pair_cost_the_same(name):
    path = str(HERE / f"{name}.toml")
    experts, dense = load_recipe(path, []), load_recipe(path, list(PAIRS[name].dense))
    assert dense.model.moe.num_experts == 0 and dense.num_params() < experts.num_params()
    assert math.isclose(experts.flops_per_token(), dense.flops_per_token(), rel_tol=1e-9)
    full_dense, full = headlines._full(name)
    assert full_dense.model.moe.num_experts == 0
    assert 1 <= full.flops_per_token() / full_dense.flops_per_token() < 1.01, "the router is the difference"


@pytest.mark.parametrize("name", STUDIES)
def test_all_variants_of_a_study_cost_the_same(name, tmp_path):
    of_study = STUDIES[name]
    jobs = headlines.plan([name], [], tmp_path)
    assert {key[1:] for key in jobs} == {(v, seed) for v in of_study.variants for seed in of_study.seeds}
    assert len({job.folder for job in jobs.values()}) == len(jobs)
    assert len({job.recipe.flops_per_token() for job in jobs.values()}) == 1
    steps = {(job.recipe.model.moe.num_experts > 0, job.recipe.train.steps) for job in jobs.values()}
    if name.startswith("half-of-the-steps"):
        assert steps == {(False, 2000), (True, 1000)}
    else:
        assert len({count for _, count in steps}) == 1, "an unfinished schedule would be compared"
    for variant, count in of_study.curve.items():
        assert jobs[name, variant, 1].recipe.model.moe.num_experts == count


def run(job, losses, entropy=None):
    """Write a finished run with a loss for each validation."""
    job.folder.mkdir(parents=True)
    write_recipe(job.recipe, job.folder / "config.toml")
    steps = job.recipe.train.steps
    every = steps // (len(losses) - 1)
    rows = [
        {"step": n * every, "tokens": 4096 * n * every, "val/loss": loss, "tokens_per_second": 10.0}
        for n, loss in enumerate(losses)
    ]
    if entropy is not None:
        rows[-1]["moe/entropy"] = entropy
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


@pytest.mark.parametrize("name", headlines.numbers.NUMBERS)
def test_benchmarks_take_their_options(name, tmp_path, capsys):
    """Each benchmark accepts its options, and writes where it is asked to."""
    command = headlines.numbers.command(name, tmp_path / "out")
    with pytest.raises(SystemExit):
        bench_main._module(name).main([*command[4:], "superfluous"])
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: superfluous\n")
    assert command[-2:] == ["--out", str(tmp_path / "out")]
