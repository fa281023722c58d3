"""`make compare`: what trains the runs, with a stand-in for the trainer, and its recipes."""

import os
import signal
import sys
import threading
import time
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
from pretrain.start.codes import EXIT_REQUEUE
from pretrain.tracking import read_metrics

# A trainer that logs a step every so many seconds from where it was, and stops between two when it is told to.
TRAINER = """
import json, signal, sys, time
from pathlib import Path
folder, steps, seconds, fails = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
path = folder / "metrics.jsonl"
lines = path.read_text().splitlines() if path.exists() else []
print("begins at", len(lines), flush=True)
for step in range(len(lines), steps + 1):
    if asked:
        sys.exit(75)
    if step == fails:
        sys.exit("no space")
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "tokens": step, "val/loss": 8 - step}) + "\\n")
    time.sleep(seconds)
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
def stand_in(monkeypatch, tmp_path):
    """``stand_in(seconds, fails)`` replaces the trainer; a list of the runs in the order in which they began."""
    began = []

    def stand_in(seconds=0.0, fails=-1):
        def command(job):
            began.append(job.name)
            write_recipe(job.recipe, job.folder / "config.toml")
            arguments = [str(job.folder), str(job.recipe.train.steps), str(seconds), str(fails)]
            return [sys.executable, "-c", TRAINER, *arguments]

        monkeypatch.setattr(study, "command", command)
        return began

    return stand_in


def steps(folder):
    return {path.parent.name: [row["step"] for row in read_metrics(path)] for path in folder.glob("*/metrics.jsonl")}


def test_trains_all_once_and_compares_them(recipes, stand_in, tmp_path, capsys):
    began = stand_in()
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


@pytest.mark.by_default("SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_stops_and_goes_on(recipes, stand_in, tmp_path, capsys, number):
    began = stand_in(seconds=1.0)
    folder = tmp_path / "runs"
    jobs = study.plan(recipes, [1], folder)

    def stop():
        while not all((job.folder / "metrics.jsonl").exists() for job in jobs):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    assert study.train(jobs, at_once=2, threads=1) == EXIT_REQUEUE
    thread.join()
    assert "the same command resumes" in capsys.readouterr().out
    assert all(job.process is None for job in jobs)
    assert any(len(found) < 5 for found in steps(folder).values())
    stand_in()
    assert study.train(study.plan(recipes, [1], folder), at_once=1, threads=1) == 0
    assert len(began) == 4
    assert all(found == [0, 1, 2, 3, 4] for found in steps(folder).values())


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
