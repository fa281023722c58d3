"""The benchmark of large output layers: its verdict, and a small run of it on one rank and on two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.studies import classes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("loss", "held", "is_met"),
    [(4.0, 100, True), (4.0001, 100, False), (4.0, 101, False), (float("nan"), 100, False)],
    ids=["equal", "another loss", "other bytes", "not a number"],
)
def test_losses_and_bytes_must_agree(loss, held, is_met):
    plan = {"classes": 8, "width": 4, "ranks": 2, "optimizer": "sgd", "precision": "fp32", "total": 3, "logits": 1}
    run = {"classes": 8, "width": 4, "ranks": 1, "losses": [4.0, 4.0], "held": 100, "planned": 100, "sent": 0}
    plans = [plan | dict.fromkeys(classes.HELD, 1)]
    text, found = classes._text(plans, [run, run | {"losses": [4.0, loss], "held": held}], tolerance=1e-5)
    assert found is is_met
    assert ("missed" in text) is not is_met


@pytest.mark.slow
def test_a_small_run(tmp_path):
    command = [sys.executable, "-m", "bench", "classes", "--step-classes=2048", "--steps=2", "--ranks=8"]
    command += ["--margin-classes=3001", "--margin-width=8", "--margin-batch=16"]
    command += ["--optimizers=adamw", "--precision=fp32", f"--out={tmp_path}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = json.loads((tmp_path / "classes.json").read_text())["rows"]
    (plan,) = rows["plans"]
    # Weights, gradients and two moments of float32; the rest of the model is one layer of width 512.
    assert plan["total"] == pytest.approx(16 * 50_000_000 * 512 / 8, rel=1e-3)
    one, two = rows["steps"]
    assert one["held"] == one["planned"] and two["held"] == two["planned"] < 0.6 * one["held"]
    assert one["losses"][1] < one["losses"][0]
    assert one["sent"] == 0 < two["sent"] < 1e6
    one, two = rows["margins"]
    assert (one["held"], two["held"]) == (3001 * 36, 1501 * 36)  # a rank's rows of 8 numbers, and an accumulator each
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5) and one["losses"][1] < one["losses"][0]
