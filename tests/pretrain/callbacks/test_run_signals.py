"""Runs that are stopped by a signal, and runs that hang: how they end, and what they leave."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from runs import BeforeStep, checkpoints, descendants, steps, train

from pretrain.start.codes import EXIT_HANG, EXIT_REQUEUE
from pretrain.tracking import read_metrics

TIMEOUT = 200  # half a minute on two idle cores


class SlowSteps(BeforeStep):
    """So slow that a signal comes in the midst of them; rank 1 is sent one when it begins a step."""

    def __init__(self, seconds, signals=None, step=None):
        self.seconds, self.signals, self.step = seconds, signals, step

    def act(self, trainer):
        time.sleep(self.seconds)
        if trainer.step == self.step and trainer.processes.rank == 1:
            os.kill(os.getpid(), self.signals)


@pytest.fixture(scope="module")
def undisturbed(forks, write_tiny_recipe, tmp_path_factory):
    """(recipe, rows) of a run of 6 steps that nobody stops."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = write_tiny_recipe(
        folder / "recipe.toml",
        parallel={"expert": 2},
        train={"steps": 6, "validation_every": 6},
        checkpoint={"every": 4},
        model={"dropout": 0.1},
    )
    train(forks, recipe, "--run.folder", folder / "run", size=2)
    return recipe, steps(folder / "run")


@pytest.mark.by_default("SIGTERM")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_to_one_rank_stops_both_with_a_checkpoint(forks, undisturbed, tmp_path, name):
    recipe, rows = undisturbed
    folder = tmp_path / "run"
    command = ("pretrain", recipe, "--run.folder", folder)
    ends = forks.command(*command, size=2, before=SlowSteps(0, getattr(signal, name), 2))
    assert [end.code for end in ends] == [EXIT_REQUEUE] * 2, ends[0].err + ends[1].err
    assert "stopped at step 3 by a signal" in ends[0].out and "finished" not in ends[0].out
    assert checkpoints(folder) == ["step-00000003"]
    train(forks, *command[1:], "--resume", "auto", size=2)
    assert steps(folder) == rows


def test_a_signal_in_the_last_step_is_a_finished_run(forks, undisturbed, tmp_path):
    recipe, rows = undisturbed
    ends = forks.command(
        "pretrain", recipe, "--run.folder", tmp_path / "run", size=2, before=SlowSteps(0, signal.SIGTERM, 5)
    )
    assert [end.code for end in ends] == [0, 0] and "finished at step 6" in ends[0].out
    assert steps(tmp_path / "run") == rows


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGTERM to all", "SIGUSR1 to all"])
def test_fmoe_train_stops_with_its_workers(recipe_file, tmp_path, name):
    """SIGTERM, SIGUSR1: code 75 and a checkpoint. SIGKILL, which nobody can answer: the workers are gone all the same,
    after a checkpoint too."""
    folder = tmp_path / "run"
    steps_, every = 100_000, 50_000
    recipe = recipe_file(
        run={"folder": str(folder)},
        parallel={"expert": 2},
        train={"steps": steps_, "validation_every": every},
        checkpoint={"every": every},
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "LOCAL_", "WORLD_"))}
    (tmp_path / "pretrain.py").write_text("raise SystemExit(0)")  # not the one that is started
    (tmp_path / "random.py").write_text("raise SystemExit(0)")
    output = (tmp_path / "output").open("w+")
    run = subprocess.Popen(
        [Path(sys.executable).parent / "fmoe", "train", recipe],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + TIMEOUT
        while not ((folder / "metrics.jsonl").exists() and len(read_metrics(folder / "metrics.jsonl")) > 3):
            assert run.poll() is None and time.monotonic() < deadline, Path(output.name).read_text()
            time.sleep(0.05)
        below = descendants(run.pid)
        assert len(below) >= 2  # the ranks
        number = getattr(signal, name.split()[0])
        sent = time.monotonic()
        for pid in [run.pid, *below] if name.endswith("to all") else [run.pid]:  # as schedulers do
            os.kill(pid, number)
        code = run.wait(TIMEOUT)
        while any(is_alive(pid) for pid in below):
            assert time.monotonic() - sent < 30, "a worker is left behind"
            time.sleep(0.05)
        seconds = time.monotonic() - sent
    finally:
        run.kill()
    text = Path(output.name).read_text()
    print(f"{name}: all gone after {seconds:.1f} s")  # 3 s on two idle cores; the bound is for busy ones
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else EXIT_REQUEUE), text
    if name == "SIGTERM":
        assert "Traceback" not in text and "stopped at step" in text, text
    (checkpoint,) = (folder / "checkpoints").iterdir()
    last = read_metrics(folder / "metrics.jsonl")[-1]["step"]
    assert checkpoint.name == f"step-{last:08d}"


# Hangs


class HangAtStep:
    """Rank 1 stands still when it begins a step."""

    def __init__(self, step):
        self.step = step

    def __call__(self):
        from pretrain.engine import Engine

        backward = Engine.backward

        def standing_still(engine, step, samples):
            if step == self.step and engine.processes.rank == 1:
                threading.Event().wait()
            return backward(engine, step, samples)

        Engine.backward = standing_still


class HangInValidation:
    """Rank 1 stands still at the first micro batch of a validation."""

    def __call__(self):
        from pretrain.engine import Engine

        evaluate = Engine.evaluate

        def standing_still(engine, samples, count):
            progress = engine.on_progress

            def first():
                progress()
                if engine.processes.rank == 1:
                    threading.Event().wait()

            engine.on_progress = first
            return evaluate(engine, samples, count)

        Engine.evaluate = standing_still


@pytest.mark.slow
def test_a_hang_in_the_validation_before_the_first_step_ends_the_run(forks, recipe_file, tmp_path):
    folder = tmp_path / "run"
    recipe = recipe_file(parallel={"expert": 2}, guard={"hang_minutes": 0.1}, checkpoint={"every": 1})
    ends = forks.command("pretrain", recipe, "--run.folder", folder, size=2, before=HangInValidation())
    assert [end.code for end in ends] == [EXIT_HANG] * 2, ends[0].err + ends[1].err
    for rank, end in enumerate(ends):
        assert f"rank {rank}: no progress for 0.1 minutes before step 1" in end.err
        assert "standing_still" in (folder / "stacks" / f"rank-{rank}.txt").read_text()


def test_a_hang_leaves_the_stacks_of_all_ranks(forks, recipe_file, tmp_path):
    folder = tmp_path / "run"
    recipe = recipe_file(parallel={"expert": 2}, guard={"hang_minutes": 0.1}, checkpoint={"every": 1})
    ends = forks.command("pretrain", recipe, "--run.folder", folder, size=2, before=HangAtStep(2))
    assert [end.code for end in ends] == [EXIT_HANG] * 2, ends[0].err + ends[1].err
    for rank, end in enumerate(ends):
        assert f"rank {rank}: no progress for 0.1 minutes in step 3" in end.err
        text = (folder / "stacks" / f"rank-{rank}.txt").read_text()
        assert "Thread" in text and "train_step" in text
    assert "standing_still" in (folder / "stacks" / "rank-1.txt").read_text()
    assert "standing_still" in (folder / "stacks" / "rank-0.txt").read_text()
