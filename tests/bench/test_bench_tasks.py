"""The benchmark of tasks: its table, and a run of one task over two seeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.studies import tasks

ROOT = Path(__file__).parents[2]


def test_the_table_has_mean_and_deviation_of_each_figure():
    runs = [tasks.figures({"runs": [{"accuracy": a, "loss": 2 * a, "scores": {}}]}) for a in (0.25, 0.75)]
    text = tasks.table([{"task": "vit", "model": "dense", "seeds": [1, 2], "runs": runs}])
    assert "| vit | dense | accuracy | 0.5 | 0.3536 | 1, 2 |" in text
    assert "| vit | dense | loss | 1 | 0.7071 | 1, 2 |" in text


@pytest.mark.slow
def test_a_small_run(tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "bench", "tasks", "--tasks=vit", "--seeds=1", "--steps=31", f"--out={tmp_path}"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    experts, dense = json.loads((tmp_path / "tasks.json").read_text())["rows"]
    assert (experts["model"], dense["model"]) == ("experts", "dense")
    assert all(0.1 < row["runs"][0]["accuracy"] <= 1 for row in (experts, dense))
