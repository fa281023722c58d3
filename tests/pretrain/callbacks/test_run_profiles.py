"""Traces of steps: by a key, by a signal to one rank or to the launcher; and the memory of all ranks."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from runs import BeforeStep, steps, train

from pretrain.tracking import read_metrics
from pretrain.tracking.events import read_events


class Signal(BeforeStep):
    """Sends SIGUSR2 to rank 1 before step 3."""

    def act(self, trainer):
        if trainer.step == 2 and trainer.processes.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)


def names(path):
    return {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}


def test_a_key_and_a_signal_write_traces_and_change_nothing(forks, recipe_file, tmp_path):
    recipe = recipe_file(parallel={"expert": 2}, train={"steps": 6}, tracking={"wandb": False, "profile_steps": 2})
    train(forks, recipe, "--run.folder", tmp_path / "plain", size=2)
    ends = forks.command(
        "pretrain", recipe, "--run.folder", tmp_path / "run", "--tracking.profile_step", 6, size=2, before=Signal()
    )
    assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
    assert steps(tmp_path / "run") == steps(tmp_path / "plain")
    profiles = tmp_path / "run" / "profiles"
    # The signal comes before the callback looks, in the same step or the next; step 6 is the last.
    found = sorted(str(path.relative_to(profiles)) for path in profiles.rglob("*.gz"))
    assert found[-2:] == ["step-00000006/rank-0.json.gz", "step-00000006/rank-1.json.gz"]
    assert found[:-2] in (["step-00000003/rank-1.json.gz"], ["step-00000004/rank-1.json.gz"])
    for path in profiles.rglob("*.gz"):
        assert {"fmoe: forward", "fmoe: reduce gradients", "fmoe: optimizer"} <= names(path)
    events = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "profile"]
    assert len(events) == 1 and "steps 6 to 6" in events[0]["text"]
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        if "memory_mb" in row:
            assert row["memory_mb/largest"] >= row["memory_mb"] - 1 and row["memory_mb/largest_rank"] in (0, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_to_the_command_writes_traces(recipe_file, tmp_path, ranks):
    recipe = recipe_file(parallel={"expert": ranks}, train={"steps": 100_000}, tracking={"wandb": False})
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "fmoe", "train", str(recipe), "--run.folder", str(folder)]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 120
        while not (folder / "metrics.jsonl").exists() or "loss" not in (folder / "metrics.jsonl").read_text():
            assert run.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        run.send_signal(signal.SIGUSR2)
        while len(list(folder.rglob("rank-*.json.gz"))) < ranks:
            assert run.poll() is None and time.monotonic() < end
            time.sleep(0.1)
    finally:
        run.terminate()
        run.communicate()
