"""Guards of a run: steps that are not made, routers that collapse, signals, hangs."""

import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forks import values
from test_run_split_engine import RECIPE, Samples, engine_of
from test_run_training import steps, train

from pretrain.callbacks import CollapseWarning, StepGuard
from pretrain.config import GuardConfig, ParallelConfig, load_recipe
from pretrain.exit_codes import EXIT_DIVERGED, EXIT_HANG, EXIT_REQUEUE, Diverged
from pretrain.tracking import read_metrics

TIMEOUT = 100


def trainer_of(engine=None, step=0):
    """What a guard needs of a trainer."""
    processes = SimpleNamespace(is_main=True, rank=0, world_size=1)
    return SimpleNamespace(engine=engine, step=step, processes=processes, inputs=SimpleNamespace(train=Samples()))


# A step that is not finite


def values_of(engine):
    """Everything that a skipped step must leave as it is."""
    found = {name: value.detach().clone() for name, value in engine.gpt.state_dict().items() if torch.is_tensor(value)}
    for number, part in enumerate(engine.optimizer.chained_optimizers):
        for group in part.optimizer.param_groups:
            for place, main in enumerate(group["params"]):
                found |= {
                    f"{number} {place} {key}": value.clone() for key, value in part.optimizer.state[main].items()
                }
                found[f"{number} {place} main"] = main.detach().clone()
    return found


def poison(engine, what):
    """Makes rank 1 alone meet a NaN in a step; returns what takes it away again, and the name it is found under."""
    parameters = dict(engine.gpt.named_parameters())
    names = {
        "dense gradient": "decoder.layers.0.self_attention.linear_proj.weight",
        "expert gradient": next(name for name in parameters if ".layers.1." in name and ".experts." in name),
    }
    if what == "loss":
        forward = engine.gpt.forward
        engine.gpt.forward = lambda *args, **options: forward(*args, **options) * float("nan")
        return lambda: engine.gpt.__dict__.pop("forward"), "loss"
    if what == "after the reduction":
        prepare = engine.optimizer.prepare_grads

        def broken():
            parameters[names["dense gradient"]].main_grad.view(-1)[3] = float("inf")
            return prepare()

        engine.optimizer.prepare_grads = broken
        return lambda: engine.optimizer.__dict__.pop("prepare_grads"), names["dense gradient"]
    handle = parameters[names[what]].register_hook(lambda gradient: gradient * float("nan"))
    return handle.remove, names[what]


def meet_nan(what, sections, mode):
    recipe = replace(RECIPE, **sections)
    recipe = replace(recipe, model=replace(recipe.model, gate="sigmoid"))
    engine = engine_of(recipe)
    guard = StepGuard(GuardConfig(nonfinite=mode))

    def step(number):
        try:
            trainer = trainer_of(engine, number)
            return engine.train_step(number, Samples(), lambda *seen: guard.judge(trainer, *seen)).skipped
        except Diverged as error:
            return f"stopped: {error}"

    said = [step(0), step(1)]
    undo, name = poison(engine, what) if dist.get_rank() == 1 else (lambda: None, None)
    before = values_of(engine)
    said.append(step(2))
    after = values_of(engine)
    undo()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    said.append(step(3))
    return said, changed, sorted(before), name, {name: p.detach() for name, p in engine.gpt.named_parameters()}


EP2 = {"parallel": ParallelConfig(expert=2)}
NAN_CASES = {
    "loss, EP=2, skip": ("loss", EP2, "skip"),
    "dense gradient, EP=2, stop": ("dense gradient", EP2, "stop"),
    "expert gradient, EP=2, skip": ("expert gradient", EP2, "skip"),
    "after the reduction, DP=2, skip": ("after the reduction", {"parallel": ParallelConfig(data=2)}, "skip"),
    "dense gradient, DP=2, distributed, bf16, skip": (
        "dense gradient",
        {
            "parallel": ParallelConfig(data=2),
            "optimizer": replace(RECIPE.optimizer, distributed=True),
            "train": replace(RECIPE.train, precision="bf16"),
        },
        "skip",
    ),
}


@pytest.mark.parametrize("case", NAN_CASES)
def test_nan_on_one_rank_ends_the_step_on_both_and_changes_nothing(forks, case):
    what, _, mode = NAN_CASES[case]
    (said, changed, kept, _, weights), (other, changed_1, _, name, weights_1) = values(
        forks.run(2, meet_nan, *NAN_CASES[case])
    )
    assert said == other
    first, second, bad, good = said
    assert first is second is good is None, "steps that are finite are made"
    assert changed == changed_1 == []
    assert any("expert_bias" in key for key in kept) and any("exp_avg_sq" in key for key in kept)
    assert f"{name} on rank 1" in bad and "on rank 0" not in bad, bad
    assert ("the loss is" if what == "loss" else "the gradient is") in bad
    assert bad.startswith("stopped: step 3: ") if mode == "stop" else not bad.startswith("stopped")
    assert ("finite when computed again" in bad) == (what == "after the reduction")
    for key, value in weights.items():
        assert value.isfinite().all() and (".experts." in key or torch.equal(value, weights_1[key])), key


class PoisonSteps:
    """NaN in rank 1's loss in some steps, counted from 0."""

    def __init__(self, *steps):
        self.steps = steps

    def __call__(self):
        from pretrain.engine import Engine

        backward = Engine.backward

        def broken(engine, step, samples):
            loss = backward(engine, step, samples)
            if step in self.steps and engine.processes.rank == 1:
                engine.last_loss = loss = loss * float("nan")
            return loss

        Engine.backward = broken


def test_runs_with_nan(forks, recipe_file, tmp_path):
    recipe = recipe_file(parallel={"expert": 2}, train={"steps": 5}, checkpoint={"every": 1, "keep": 0})
    stopped = tmp_path / "stopped"
    ends = forks.command("pretrain", recipe, "--run.folder", stopped, size=2, before=PoisonSteps(2))
    assert [end.code for end in ends] == [EXIT_DIVERGED] * 2, ends[0].err
    said = [line for end in ends for line in end.err.splitlines() if "error" in line]
    assert len(said) == 1 and "step 3: the loss is not finite, first in: loss on rank 1" in said[0]
    assert list(steps(stopped)) == [0, 1, 2]
    skipped = tmp_path / "skipped"
    # The very first step too: a checkpoint before the optimizer has any state.
    ends = forks.command(
        "pretrain", recipe, "--run.folder", skipped, "--guard.nonfinite", "skip", size=2, before=PoisonSteps(0, 3)
    )
    assert [end.code for end in ends] == [0, 0], ends[0].err
    rows = steps(skipped)
    assert [rows[step]["guard/skipped"] for step in range(1, 6)] == [1, 0, 0, 1, 0]
    assert rows[4]["loss"] is None and rows[4]["loss_nonfinite"] == "nan"
    assert ends[0].err.count("is skipped") == 2 and "is skipped" not in ends[1].err
    again = tmp_path / "again"
    train(forks, recipe, "--run.folder", again, "--resume", skipped / "checkpoints" / "step-00000004", size=2)
    assert steps(again)[5] == rows[5]
    ends = forks.command(
        "pretrain",
        *(recipe, "--run.folder", tmp_path / "limit", "--guard.nonfinite", "skip", "--guard.max_skips", "2"),
        size=2,
        before=PoisonSteps(1, 2, 3),
    )
    assert [end.code for end in ends] == [EXIT_DIVERGED] * 2
    assert "step 4: " in ends[0].err and "guard.max_skips=2" in ends[0].err


# Spikes


def curve(seed, count=2000):
    """(loss, gradient norm) of a run: a falling, noisy loss whose noise lasts, norms that are noisy by factors."""
    noise, slow = random.Random(seed), 0.0
    for step in range(count):
        slow = 0.9 * slow + noise.gauss(0, 0.02)
        loss = 2.5 + 5.5 * math.exp(-step / 150) + slow + noise.gauss(0, 0.06)
        norm = (0.5 + 4 * math.exp(-step / 60)) * math.exp(noise.gauss(0, 0.35))
        # Now and then a batch of a kind that is rare.
        if noise.random() < 0.01:
            loss, norm = loss + 0.3, norm * 2.5
        yield loss, norm


@pytest.mark.parametrize("seed", range(3))
def test_no_false_skip_in_2000_steps(seed):
    guard = StepGuard(GuardConfig())
    assert [reason for pair in curve(seed) if (reason := guard.judge(trainer_of(), *pair))] == []


def test_no_false_skip_where_nothing_moves():
    guard = StepGuard(GuardConfig())
    for step in range(500):
        assert guard.judge(trainer_of(), 2.0 + 0.1 * (step % 50 == 0), 1.0 + (step % 50 == 0)) is None


@pytest.mark.parametrize("spike", [(10, 1), (1, 1000)], ids=["loss", "gradient norm"])
def test_a_spike_is_skipped_once_also_after_a_resume(spike):
    guard, resumed, reasons = StepGuard(GuardConfig()), None, []
    for step, (loss, norm) in enumerate(curve(7, 400)):
        if step == 250:
            saved = json.loads(json.dumps(guard.state_dict()))
            resumed = StepGuard(GuardConfig())
            resumed.load_state_dict(saved)
        if step in (30, 300):  # the first comes before there is a history
            loss, norm = loss * spike[0], norm * spike[1]
        reason = guard.judge(trainer_of(step=step), loss, norm)
        if resumed is not None:
            assert resumed.judge(trainer_of(step=step), loss, norm) == reason
        metrics = {}
        guard.on_step(trainer_of(step=step), metrics)
        assert metrics["guard/skipped"] == (reason is not None)
        if reason is not None:
            reasons.append((step, reason))
    ((step, reason),) = reasons
    assert step == 300 and "is a spike" in reason and reason.startswith("loss" if spike[0] > 1 else "gradient norm")


class Spike:
    """Ten times the loss at one step, on one rank of two: mean 5.5 times."""

    def __init__(self, step):
        self.step = step

    def __call__(self):
        from pretrain.engine import Engine

        backward = Engine.backward

        def spiked(engine, step, samples):
            return backward(engine, step, samples) * (10 if step == self.step and engine.processes.rank == 1 else 1)

        Engine.backward = spiked


def test_a_spike_in_a_run_and_its_history_in_the_checkpoint(forks, recipe_file, tmp_path):
    recipe = recipe_file(
        parallel={"expert": 2},
        train={"steps": 16, "validation_every": 16},
        checkpoint={"every": 8},
        guard={"spike_window": 16, "spike_history": 6, "collapse_window": 5},
    )
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(forks, recipe, "--run.folder", whole, size=2, before=Spike(10))
    rows = steps(whole)
    assert [step for step in rows if rows[step].get("guard/skipped")] == [11]
    # With a history of 2 steps alone the guard would not have skipped step 11; the collapse window goes on as well.
    train(forks, recipe, "--run.folder", resumed, "--resume", whole / "checkpoints" / "step-00000008", size=2,
          before=Spike(10))  # fmt: skip
    assert steps(resumed) == {step: row for step, row in rows.items() if step > 8}
    assert [step for step in rows if "guard/collapsed_layers" in rows[step]] == [5, 10, 15]


# Routers


def test_one_warning_for_a_collapse(caplog):
    config, trainer, counts = GuardConfig(collapse_window=10), trainer_of(), []
    guard = CollapseWarning(config, (1, 3))
    even, one = [0.25] * 4, [1.0, 0.0, 0.0, 0.0]
    with caplog.at_level(logging.WARNING):
        for step in range(1, 121):
            trainer.step = step
            is_bad = 25 <= step < 70 or step >= 100
            # No step of a healthy layer is even: what counts is the window.
            healthy = [float(step % 4 == expert) for expert in range(4)]
            metrics = {"moe/layer_1/load": healthy, "moe/layer_3/load": one if is_bad else even}
            guard.on_step(trainer, metrics)
            counts += [metrics["guard/collapsed_layers"]] if step % 10 == 0 else []
            assert step % 10 == 0 or "guard/collapsed_layers" not in metrics
            if step in (35, 64):
                saved = json.loads(json.dumps(guard.state_dict()))
                guard = CollapseWarning(config, (1, 3))
                guard.load_state_dict(saved)
    assert counts == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1]
    assert len(caplog.messages) == 2, caplog.messages
    assert caplog.messages[0].startswith("step 40: ") and "layer 3: load CV 1.73" in caplog.messages[0]
    assert "3 of 4 experts got nothing" in caplog.messages[0] and "layer 1" not in caplog.messages[0]


# Signals


class SlowSteps:
    """So slow that a signal comes in the midst of them; rank 1 is sent one when it begins a step."""

    def __init__(self, seconds, signals=None, step=None):
        self.seconds, self.signals, self.step = seconds, signals, step

    def __call__(self):
        from pretrain.trainer import Trainer

        make_step = Trainer._step

        def slow(trainer, *args):
            time.sleep(self.seconds)
            if trainer.step == self.step and trainer.processes.rank == 1:
                os.kill(os.getpid(), self.signals)
            return make_step(trainer, *args)

        Trainer._step = slow


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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_to_one_rank_stops_both_with_a_checkpoint(forks, undisturbed, tmp_path, name):
    recipe, rows = undisturbed
    folder = tmp_path / "run"
    command = ("pretrain", recipe, "--run.folder", folder)
    ends = forks.command(*command, size=2, before=SlowSteps(0, getattr(signal, name), 2))
    assert [end.code for end in ends] == [EXIT_REQUEUE] * 2, ends[0].err + ends[1].err
    assert "stopped at step 3 by a signal" in ends[0].out and "finished" not in ends[0].out
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]
    train(forks, *command[1:], "--resume", "auto", size=2)
    assert steps(folder) == rows


def test_a_signal_in_the_last_step_is_a_finished_run(forks, undisturbed, tmp_path):
    recipe, rows = undisturbed
    ends = forks.command(
        "pretrain", recipe, "--run.folder", tmp_path / "run", size=2, before=SlowSteps(0, signal.SIGTERM, 5)
    )
    assert [end.code for end in ends] == [0, 0] and "finished at step 6" in ends[0].out
    assert steps(tmp_path / "run") == rows


def descendants(pid):
    """Living processes below a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] + [below for child in children for below in descendants(child)]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_fmoe_train_stops_with_its_workers(recipe_file, tmp_path, name):
    """SIGTERM: code 75 and a checkpoint. SIGKILL, which nobody can answer: the workers are gone all the same."""
    folder = tmp_path / "run"
    steps_, every = 100_000, 50_000
    recipe = recipe_file(
        run={"folder": str(folder)},
        parallel={"expert": 2},
        train={"steps": steps_, "validation_every": every},
        checkpoint={"every": every},
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "LOCAL_", "WORLD_"))}
    output = (tmp_path / "output").open("w+")
    run = subprocess.Popen(
        [Path(sys.executable).parent / "fmoe", "train", recipe],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + TIMEOUT
        while not ((folder / "metrics.jsonl").exists() and len(read_metrics(folder / "metrics.jsonl")) > 3):
            assert run.poll() is None and time.monotonic() < deadline, Path(output.name).read_text()
            time.sleep(0.05)
        below = descendants(run.pid)
        assert len(below) >= 3  # torchrun and two workers
        run.send_signal(getattr(signal, name))
        sent = time.monotonic()
        code = run.wait(TIMEOUT)
        while any(is_alive(pid) for pid in below):
            assert time.monotonic() - sent < 30, "a worker is left behind"
            time.sleep(0.05)
        seconds = time.monotonic() - sent
    finally:
        run.kill()
    text = Path(output.name).read_text()
    print(f"{name}: all gone after {seconds:.1f} s")
    assert code == (EXIT_REQUEUE if name == "SIGTERM" else -signal.SIGKILL), text
    assert seconds < 10
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


def test_a_hang_leaves_the_stacks_of_all_ranks(forks, recipe_file, tmp_path):
    folder = tmp_path / "run"
    recipe = recipe_file(parallel={"expert": 2}, guard={"hang_minutes": 0.05}, checkpoint={"every": 1})
    ends = forks.command("pretrain", recipe, "--run.folder", folder, size=2, before=HangAtStep(2))
    assert [end.code for end in ends] == [EXIT_HANG] * 2, ends[0].err + ends[1].err
    for rank, end in enumerate(ends):
        assert f"rank {rank}: no progress for 0.05 minutes in step 3" in end.err
        text = (folder / "stacks" / f"rank-{rank}.txt").read_text()
        assert "Thread" in text and "train_step" in text
    assert "standing_still" in (folder / "stacks" / "rank-1.txt").read_text()
    assert "standing_still" in (folder / "stacks" / "rank-0.txt").read_text()


# The recipe


@pytest.mark.parametrize(
    "options, message",
    [
        (["--guard.spike_history", "9", "--guard.spike_window", "8"], "guard.spike_history=9 is more than"),
        (["--guard.hang_minutes", "-1"], "guard.hang_minutes=-1.0 is not 0 or more"),
        (["--guard.max_skips", "0"], "guard.max_skips=0 is not positive"),
        (["--guard.collapse_dead", "1.5"], "guard.collapse_dead=1.5 is not in [0, 1]"),
    ],
)
def test_a_wrong_guard_is_one_line(options, message):
    with pytest.raises(ValueError, match="guard") as error:
        load_recipe("quickstart", options)
    assert str(error.value).startswith(message)
