"""`fmoe compare` and `make compare` on runs of the trainer."""

import json

import pytest

from bench.convergence import main as convergence
from fmoe.cli import run
from pretrain.compare.cli import main
from pretrain.compare.runs import read_run
from pretrain.tracking import read_metrics


def test_what_a_run_writes_is_what_is_read(forks, recipe_file, tmp_path, capsys):
    """Two seeds of a real run and a dense one: counts, FLOPs and fingerprints as the trainer told them."""
    recipe = recipe_file()
    runs = []
    for name, options in [
        ("moe-1", ["--train.seed", "1"]),
        ("moe-2", ["--train.seed", "2"]),
        ("dense", ["--moe.num-experts", "0"]),
    ]:
        runs.append(tmp_path / name)
        (end,) = forks.command("pretrain", recipe, "--run.folder", runs[-1], *options)
        assert end.code == 0, end.err
    told = json.loads((runs[0] / "run.json").read_text())
    found = read_run(runs[0])
    assert found.validation[0].sha256 == told["data"]["validation"][0] and len(found.validation[0].sha256) == 64
    assert len(told["data"]["tokenizer"]) == 64 and len(told["data"]["train"][0]) == 64
    assert told["flops_per_token"] == found.recipe.flops_per_token() == found.flops_per_token
    rows = read_metrics(runs[0] / "metrics.jsonl")
    assert [row["flops"] for row in rows[1:]] == [told["flops_per_token"] * row["tokens"] for row in rows[1:]]
    assert run("fmoe compare", lambda: main([*map(str, runs), "--json"])) == 0
    values = json.loads(capsys.readouterr().out)
    assert [group["name"] for group in values["groups"]] == ["moe", "dense"]
    assert values["groups"][0]["flops"] == rows[-1]["flops"]
    assert values["groups"][0]["loss"]["min"] == min(
        read_metrics(folder / "metrics.jsonl")[-1]["val/loss"] for folder in runs[:2]
    )
    assert values["groups"][1]["recipe"]["moe.num_experts"] == 0


@pytest.mark.slow
def test_the_study_of_make_compare_with_the_trainer(write_tiny_recipe, tmp_path, capsys):
    recipes = [
        str(write_tiny_recipe(tmp_path / f"{name}.toml", model={"moe.num_experts": experts}, checkpoint={"every": 2}))
        for name, experts in (("dense", 0), ("moe", 4))
    ]
    assert convergence.main([*recipes, "--folder", str(tmp_path / "runs"), "--seeds", "3"]) == 0
    out = capsys.readouterr().out
    assert "dense-seed3: step 4 of 4, validation loss" in out and "moe-seed3: step 4 of 4, validation loss" in out
    assert "| dense-seed3 | 1 " in out and (tmp_path / "runs" / "curves.svg").is_file()
