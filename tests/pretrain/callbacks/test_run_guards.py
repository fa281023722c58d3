"""Guards of a run: steps that are not made, routers that collapse."""

import json
import logging
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from engines import RECIPE, Samples, engine_of, local, trainer_of, values_of
from forks import values
from runs import steps, train

from pretrain.callbacks import CollapseWarning, StepGuard
from pretrain.config import GuardConfig, ParallelConfig
from pretrain.start.codes import EXIT_DIVERGED
from pretrain.start.process import Diverged

# A step that is not finite


def poison(engine, what):
    """Makes rank 1 alone meet a NaN in a step; returns its removal, and the name it is found under there."""
    from megatron_patch.fsdp import gathered_in_turn

    is_here = dist.get_rank() == 1
    parameters = dict(engine.gpt.named_parameters())
    names = {
        "dense gradient": "decoder.layers.0.self_attention.linear_proj.weight",
        "expert gradient": [name for name in parameters if ".experts." in name][-1],
    }
    if what == "loss" and is_here:
        forward = engine.gpt.forward
        engine.gpt.forward = lambda *args, **options: forward(*args, **options) * float("nan")
        return lambda: engine.gpt.__dict__.pop("forward"), "loss"
    if what == "after the reduction" and is_here:
        prepare = engine.optimizer.prepare_grads

        def broken():
            parameters[names["dense gradient"]].main_grad.view(-1)[3] = float("inf")
            return prepare()

        engine.optimizer.prepare_grads = broken
        return lambda: engine.optimizer.__dict__.pop("prepare_grads"), names["dense gradient"]
    handles = []
    for _ in gathered_in_turn(engine.gpt):  # a sharded parameter gets no gradient of one rank
        parameter = dict(engine.gpt.named_parameters()).get(names.get(what))
        if is_here and not hasattr(parameter, "placements"):
            handles.append(parameter.register_hook(lambda gradient: gradient * float("nan")))
    return lambda: [handle.remove() for handle in handles], names.get(what) if is_here else None


def meet_nan(what, sections, mode):
    recipe = replace(RECIPE, **sections)
    recipe = replace(recipe, model=recipe.model.with_values({"moe.gate": "sigmoid"}))
    engine = engine_of(recipe)
    guard = StepGuard(GuardConfig(nonfinite=mode))

    def step(number):
        try:
            trainer = trainer_of(engine, number)
            return engine.train_step(number, Samples(), lambda *seen: guard.check_step(trainer, *seen)).skipped
        except Diverged as error:
            return f"stopped: {error}"

    said = [step(0), step(1)]
    undo, name = poison(engine, what)
    before = values_of(engine)
    said.append(step(2))
    after = values_of(engine)
    undo()
    assert mode == "stop" or all(not layer.gate._load_E.any() for layer in engine.moe_layers), (
        "loads of no step would move the bias"
    )
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    said.append(step(3))
    return said, changed, sorted(before), name, {name: local(p) for name, p in engine.gpt.named_parameters()}


EP2 = {"parallel": ParallelConfig(expert=2)}
NAN_CASES = {
    "loss, EP=2, skip": ("loss", EP2, "skip"),
    "dense gradient, EP=2, stop": ("dense gradient", EP2, "stop"),
    "expert gradient, EP=2, skip": ("expert gradient", EP2, "skip"),
    "after the reduction, DP=2, skip": ("after the reduction", {"parallel": ParallelConfig(data=2)}, "skip"),
    "dense gradient, DP=2, ZeRO-1, bf16, skip": (
        "dense gradient",
        {
            "parallel": ParallelConfig(data=2, shard="optimizer"),
            "train": replace(RECIPE.train, precision="bf16"),
        },
        "skip",
    ),
    "loss, PP=2, skip": ("loss", {"parallel": ParallelConfig(pipeline=2)}, "skip"),
    "expert gradient, PP=2, stop": ("expert gradient", {"parallel": ParallelConfig(pipeline=2)}, "stop"),
    "dense gradient, TP=2, skip": ("dense gradient", {"parallel": ParallelConfig(tensor=2)}, "skip"),
    "expert gradient, DP=2, ZeRO-3, skip": (
        "expert gradient",
        {"parallel": ParallelConfig(data=2, shard="parameters")},
        "skip",
    ),
    "dense gradient, DP=2, overlapped, skip": (
        "dense gradient",
        {"parallel": ParallelConfig(data=2, overlap_gradients=True)},
        "skip",
    ),
}


@pytest.mark.by_default("expert gradient, EP=2, skip", "after the reduction, DP=2, skip")
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
    parallel = NAN_CASES[case][1]["parallel"]
    holds_parts = parallel.dense_data < 2 or parallel.is_fully_sharded
    for key, value in weights.items():
        assert value.isfinite().all(), key
        assert holds_parts or ".experts." in key or torch.equal(value, weights_1[key]), key


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
    assert [reason for pair in curve(seed) if (reason := guard.check_step(trainer_of(), *pair))] == []


def test_no_false_skip_where_nothing_moves():
    guard = StepGuard(GuardConfig())
    for step in range(500):
        assert guard.check_step(trainer_of(), 2.0 + 0.1 * (step % 50 == 0), 1.0 + (step % 50 == 0)) is None


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
        reason = guard.check_step(trainer_of(step=step), loss, norm)
        if resumed is not None:
            assert resumed.check_step(trainer_of(step=step), loss, norm) == reason
        metrics = {}
        guard.on_step(trainer_of(step=step), metrics)
        assert metrics["guard/skipped"] == (reason is not None)
        if reason is not None:
            reasons.append((step, reason))
    ((step, reason),) = reasons
    assert step == 300 and "is a spike" in reason and reason.startswith("loss" if spike[0] > 1 else "gradient norm")


def test_gradients_that_stay_large_end_the_run_with_a_remedy():
    guard = StepGuard(GuardConfig(max_skips=3))
    for loss, norm in curve(7, 200):
        assert guard.check_step(trainer_of(), loss, norm) is None
    for _ in range(3):
        assert "is a spike" in guard.check_step(trainer_of(), loss, 1000 * norm)
    with pytest.raises(
        Diverged, match=r"skip 4 in a row, .*guard.max_skips=3: lower optimizer.lr, or set guard.spike_sigma=0"
    ):
        guard.check_step(trainer_of(), loss, 1000 * norm)


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
    checkpoint = whole / "checkpoints" / "step-00000008"
    train(forks, recipe, "--run.folder", resumed, "--resume", checkpoint, size=2, before=Spike(10))
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
    assert "3 of 4 experts got no token" in caplog.messages[0] and "layer 1" not in caplog.messages[0]


def test_a_uniform_router_is_a_collapse(caplog):
    def windows(config, entropies, experts=4):
        guard, counts = CollapseWarning(config, (2,)), []
        for step, entropy in enumerate(entropies, 1):
            trainer.step = step
            metrics = {"moe/layer_2/load": [1 / experts] * experts, "moe/layer_2/entropy": entropy}
            guard.on_step(trainer, metrics)
            if step % 2 == 1:  # between the steps of a window
                saved = json.loads(json.dumps(guard.state_dict()))
                guard = CollapseWarning(config, (2,))
                guard.load_state_dict(saved)
            else:
                counts.append(metrics["guard/collapsed_layers"])
        return counts

    config, trainer, uniform = GuardConfig(collapse_window=2, collapse_uniform=1e-2), trainer_of(), math.log(4)
    with caplog.at_level(logging.WARNING):
        assert windows(config, [uniform, uniform - 0.03, uniform - 0.015, uniform - 0.004]) == [0, 1]
    (message,) = caplog.messages
    assert message.startswith("step 4: ") and "layer 2: the router is uniform: entropy 1.3768" in message
    assert "0.0095 below ln 4" in message and "guard.collapse_uniform=0.01" in message
    assert windows(replace(config, collapse_uniform=0), [uniform + 1e-7] * 2) == [0]
    assert windows(config, [0.0, 0.0], experts=1) == [0]
