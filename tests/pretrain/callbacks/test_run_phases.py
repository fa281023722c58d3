"""Time by phase of real runs: the slow rank is named, though the others wait for it, and training does not change."""

import time

import pytest
from runs import BeforeStep, steps, train

from fmoe.experts.ffn import FFNExperts
from fmoe.runtime.phases import WAITS, WORK
from pretrain.tracking import read_metrics
from pretrain.tracking.events import read_events
from pretrain.tracking.metrics import PHASES

SLEEP = 0.4


class SlowExperts(BeforeStep):
    """The experts of rank 1 sleep in the last step's forward passes."""

    def act(self, trainer):
        compute = FFNExperts.fused_forward

        def slow(*args, **options):
            time.sleep(SLEEP / 4)
            return compute(*args, **options)

        if trainer.step == 3 and trainer.processes.rank == 1:
            FFNExperts.fused_forward = slow


class SlowStep(BeforeStep):
    """Rank 1 sleeps within the last step."""

    def act(self, trainer):
        if trainer.step == 3 and trainer.processes.rank == 1:
            time.sleep(SLEEP)


def test_the_declared_phases_are_those_measured():
    assert set(PHASES) == {"work", *WORK, *WAITS}


@pytest.mark.by_default(0, 2)
@pytest.mark.parametrize(
    ("parallel", "slowness", "phase", "wait"),
    [
        ({"expert": 2}, SlowExperts(), "experts", "exchange"),
        ({"expert": 2, "recompute": "full"}, SlowStep(), "other", "exchange"),
        ({"pipeline": 2}, SlowStep(), "other", "collectives"),
        ({"tensor": 2, "sequence": True}, SlowStep(), "other", "collectives"),
    ],
    ids=["experts", "recomputed", "pipeline", "tensor"],
)
def test_the_slow_rank_is_named(forks, recipe_file, tmp_path, parallel, slowness, phase, wait):
    tracking = {"wandb": False, "phases_every": 4}
    recipe = recipe_file(parallel=parallel, train={"micro_batch": 1}, tracking=tracking)
    train(forks, recipe, "--run.folder", tmp_path / "plain", "--tracking.phases_every", 0, size=2)
    train(forks, recipe, "--run.folder", tmp_path / "run", size=2, before=slowness)
    of_plain = steps(tmp_path / "plain")
    of_run = steps(tmp_path / "run")
    assert not any(key.startswith("time/") for key in of_run[1])
    assert {key: value for key, value in of_run[4].items() if not key.startswith("time/")} == of_plain[4]
    assert all(f"time/{name}_ms" in of_run[4] for name in PHASES)

    (row,) = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "time/work_ms" in row]
    assert row["time/work_ms/largest_rank"] == row[f"time/{phase}_ms/largest_rank"] == 1
    assert row[f"time/{wait}_ms/largest_rank"] == 0
    assert row[f"time/{wait}_ms/largest"] > 1e3 * SLEEP / 2
    assert row["time/work_ms/ranks"][0] < row["time/work_ms/ranks"][1] == row["time/work_ms/largest"]
    for name in ("forward", "backward", "optimizer"):
        assert min(row[f"time/{name}_ms/ranks"]) > 0
    for rank in range(2):  # each moment counts once
        total = sum(row[f"time/{name}_ms/ranks"][rank] for name in (*WORK, *WAITS))
        work = sum(row[f"time/{name}_ms/ranks"][rank] for name in WORK)
        assert work == pytest.approx(row["time/work_ms/ranks"][rank])
        assert 0.9 * total < 1e3 * row["step_seconds"] + 100
    (warning,) = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "warning"]
    assert warning["step"] == 4 and "rank 1" in warning["text"]


def test_one_process_names_no_rank(forks, recipe_file, tmp_path):
    recipe = recipe_file(tracking={"wandb": False, "phases_every": 4})
    train(forks, recipe, "--run.folder", tmp_path / "run")
    row = steps(tmp_path / "run")[4]
    assert row["time/experts_ms"] > 0 and row["time/exchange_ms"] == 0
    assert not [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "warning"]
