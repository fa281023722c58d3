"""Output of a real run, read back from all four trackers: the declared names, the same everywhere.

A resumed run has no step twice; in wandb and trackio it is another run."""

import json
import math
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from fmoe.kernels import cache
from pretrain.tracking import read_metrics
from pretrain.tracking.loads import LOAD
from pretrain.tracking.metrics import DECLARED

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
WANDB = os.path.join(os.path.dirname(sys.executable), "wandb")
EXPERTS, LAYERS, STEPS, HALF, STOPPED = 4, 2, 6, 3, 5


def general(name):
    return re.sub(r"layer_\d+", "layer_N", name)


def wandb_rows(folder, environment):
    """Metrics by step of each offline run, the first one first; histograms as heights, pictures as files."""
    runs = []
    first = (folder / "wandb_id.txt").read_text().strip()
    for part in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: first not in path.name):
        rows = {}
        told = subprocess.run(
            [WANDB, "leet", "inspect", "--json", part], env=environment, capture_output=True, text=True, timeout=240
        )
        assert told.returncode == 0, told.stderr
        for record in map(json.loads, told.stdout.splitlines()):
            if record["type"] == "history":
                item, row = record["history"]["item"], {}
                for key, value in item.items():
                    name, _, field = key.partition(".")
                    kind = item.get(f"{name}._type")
                    is_number = kind is None and not name.startswith("_")
                    if is_number or (kind, field) == ("histogram", "values"):
                        row[name] = value
                    elif (kind, field) == ("image-file", "path"):
                        row[name] = part.parent / "files" / value
                assert item["_step"] not in rows, f"step {item['_step']} is there twice"
                rows[item["_step"]] = row
        runs.append(rows)
    return runs


def tensorboard_rows(folder):
    everything = dict.fromkeys(("scalars", "histograms", "images"), 0)
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance=everything)
    events.Reload()
    rows = {}
    for kind, read, value in (
        ("scalars", events.Scalars, lambda event: event.value),
        ("histograms", events.Histograms, lambda event: list(event.histogram_value.bucket)),
        ("images", events.Images, lambda event: event.encoded_image_string),
    ):
        for name in events.Tags()[kind]:
            for event in read(name):
                row = rows.setdefault(event.step, {})
                assert name not in row, f"{name} of step {event.step} is there twice"
                row[name] = value(event)
    return rows


def trackio_rows(folder):
    runs = {folder.name: {}, f"{folder.name}-from-{HALF}": {}}
    with closing(sqlite3.connect(folder / "trackio" / "fmoe.db")) as database:
        for name, step, text in database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id"):
            assert step not in runs[name], f"step {step} is there twice"
            runs[name][step] = {
                name: value.get("values", value.get("file_path")) if isinstance(value, dict) else value
                for name, value in json.loads(text).items()
            }
    return list(runs.values())


@pytest.fixture(scope="module")
def run(forks, write_tiny_recipe, tmp_path_factory):
    """A run that made 5 of 6 steps and went on from step 3, and the environment to read it in."""
    folder = tmp_path_factory.mktemp("tracked")
    recipe = write_tiny_recipe(
        folder / "recipe.toml",
        run={"folder": str(folder / "run")},
        train={"steps": STEPS, "precision": "fp16", "validation_every": 2},
        optimizer={"name": "lamb", "warmup_steps": 1, "initial_loss_scale": 1024.0},
        guard={"collapse_window": 2, "collapse_cv": 0.01},
        checkpoint={"every": HALF, "asynchronous": False},
        tracking={
            "wandb": True,
            "tensorboard": True,
            "trackio": True,
            "trust_every": 2,
            "phases_every": 2,
            "plan": {"seconds": 100.0},
            "picture_every": 2,
            "console_every": 1,
        },
    )
    ours = {"HOME": str(folder), "NETRC": str(folder / "none"), "WANDB_MODE": "offline"}
    ours["FMOE_CACHE"] = str(cache.writable())  # nothing is compiled again
    ours["WANDB_ERROR_REPORTING"] = "false"
    for argv in (["--train.steps", STOPPED, "--optimizer.decay-steps", STEPS], ["--resume"]):
        if argv == ["--resume"]:  # as a machine that went down leaves it
            for checkpoint in (folder / "run" / "checkpoints").glob(f"step-*{STOPPED}"):
                checkpoint.rename(folder / checkpoint.name)
        (end,) = forks.command("pretrain", recipe, *argv, environment=ours)
        assert end.code == 0, end.err
        assert "dropped, the run goes on" not in end.err, end.err
        assert "rackio" not in re.sub(r"^  trackio .*", "", end.out, flags=re.M), "trackio greets"
    return folder / "run", {key: value for key, value in os.environ.items() if "WANDB" not in key} | ours


def test_names_are_the_declared_ones(run):
    logged = {}
    for row in read_metrics(run[0] / "metrics.jsonl"):
        logged |= {general(name): value for name, value in row.items() if name != "step" and "_ms/" not in name}
    lists = {name for name, value in logged.items() if isinstance(value, list)}
    assert lists == {f"moe/layer_N/{metric.name}" for metric in DECLARED if "a list" in metric.unit}
    means = {metric.key for metric in DECLARED if "a list" not in metric.unit}
    means.remove("mtp_loss")  # test_run_mtp.py has it
    means.remove("plan/memory_ratio")  # on GPUs: test_plan_check.py
    means -= {"memory_mb/largest", "memory_mb/largest_rank"}  # of several ranks: test_run_profiles.py
    assert sorted(logged) == sorted(means | {f"moe/layer_N/{metric.name}" for metric in DECLARED if metric.reduce})


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard", "trackio"])
def test_every_tracker_has_every_number_once(run, tracker):
    folder, environment = run
    if tracker == "tensorboard":
        rows = tensorboard_rows(folder)
    else:
        if tracker == "wandb" and not os.path.exists(WANDB):
            pytest.skip("the wandb command is not beside this Python")
        first, resumed = wandb_rows(folder, environment) if tracker == "wandb" else trackio_rows(folder)
        assert (sorted(first), sorted(resumed)) == (list(range(STOPPED + 1)), list(range(HALF + 1, STEPS + 1)))
        rows = {step: row for step, row in first.items() if step <= HALF} | resumed
    record = {row["step"]: row for row in read_metrics(folder / "metrics.jsonl")}
    assert sorted(rows) == sorted(record) == list(range(STEPS + 1))
    pictures = set()
    for step, row in rows.items():
        expected = {name: value for name, value in record[step].items() if name != "step"}
        if LOAD in row:
            pictures.add(step)
            del row[LOAD]
        assert sorted(row) == sorted(expected)
        for name, value in row.items():
            if isinstance(value, list):
                assert value == pytest.approx(expected[name], rel=1e-5), f"{name} of step {step}"
                assert len(value) == (1 if name.startswith("time/") else EXPERTS)  # a rank
            else:
                assert math.isclose(value, expected[name], rel_tol=1e-5), f"{name} of step {step}"
    # The first of each process, every second, the last.
    assert pictures == {1, 2, HALF + 1, STEPS}


def test_pictures_are_files(run):
    """PNG that wandb and trackio find where their rows say."""
    folder, environment = run
    shown = [folder / "trackio" / "media" / trackio_rows(folder)[-1][STEPS][LOAD]]
    if os.path.exists(WANDB):
        shown.append(wandb_rows(folder, environment)[-1][STEPS][LOAD])
    for picture in [path.read_bytes() for path in shown] + [tensorboard_rows(folder)[STEPS][LOAD]]:
        assert picture.startswith(b"\x89PNG")
