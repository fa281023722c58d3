"""`make compare`: what trains the runs, with a stand-in for the trainer, and its recipes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.convergence import main as convergence
from bench.convergence import study
from pretrain.config import (
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    Recipe,
    TrainConfig,
    load_recipe,
    write_recipe,
)
from pretrain.tracking import read_metrics

# A trainer that logs all steps.
TRAINER = """
import json, sys
from pathlib import Path
rows = [{"step": step, "tokens": step, "val/loss": 8 - step} for step in range(int(sys.argv[2]) + 1)]
Path(sys.argv[1], "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


def write(path, num_experts=0, **sections):
    """A recipe of 4 steps."""
    recipe = replace(Recipe(), model=ModelConfig(moe=MoEConfig(num_experts=num_experts)), **sections)
    recipe = replace(recipe, train=TrainConfig(steps=4), optimizer=OptimizerConfig(warmup_steps=1))
    write_recipe(recipe, Path(path))
    return str(path)


@pytest.fixture
def recipes(tmp_path):
    return [write(tmp_path / "dense.toml"), write(tmp_path / "moe.toml", 4)]


@pytest.fixture
def began(monkeypatch):
    """The runs of a stand-in for the trainer, in the order in which they began."""
    names = []

    def command(job):
        names.append(job.name)
        write_recipe(job.recipe, job.folder / "config.toml")
        return [sys.executable, "-c", TRAINER, str(job.folder), str(job.recipe.train.steps)]

    monkeypatch.setattr(study, "command", command)
    return names


def steps(folder):
    return {path.parent.name: [row["step"] for row in read_metrics(path)] for path in folder.glob("*/metrics.jsonl")}


def test_trains_all_once_and_compares_them(recipes, began, tmp_path, capsys):
    argv = [*recipes, "--folder", str(tmp_path / "runs"), "--seeds", "1", "7"]
    assert convergence.main(argv) == 0
    assert sorted(began) == ["dense-seed1", "dense-seed7", "moe-seed1", "moe-seed7"]
    assert set(began[:2]) == {"moe-seed1", "moe-seed7"}, "the longest first"
    assert all(found == [0, 1, 2, 3, 4] for found in steps(tmp_path / "runs").values())
    out = capsys.readouterr().out
    assert "moe-seed7: step 4 of 4, validation loss 4.0000" in out
    assert "| dense " in out and "| moe " in out
    assert (tmp_path / "runs" / "curves.svg").is_file()
    assert convergence.main(argv) == 0
    assert len(began) == 4, "finished runs were begun again"


def test_the_quickstart_spends_what_its_earlier_model_did():
    found, earlier = load_recipe("quickstart"), load_recipe(str(convergence.HERE / "switch.toml"))
    assert found.flops_per_token() == pytest.approx(earlier.flops_per_token(), rel=0.005)
    assert found.num_params() == pytest.approx(earlier.num_params(), rel=0.005)
    for section in ("data", "train"):
        assert getattr(found, section) == getattr(earlier, section)


def test_recipes_spend_the_same_on_a_token():
    dense, *others = [load_recipe(path) for path in convergence.RECIPES]
    assert dense.model.moe.num_experts == 0
    assert [other.model.moe.num_experts for other in others] == [8, 32]
    for other in others:
        assert other.flops_per_token() == dense.flops_per_token()
        assert other.num_active_params() == dense.num_active_params()
        for section in ("data", "optimizer", "train", "parallel", "guard"):
            assert getattr(other, section) == getattr(dense, section)
