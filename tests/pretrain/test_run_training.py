"""Runs of `python -m pretrain`: stopped, killed, resumed, at another split, and always the same losses."""

import shutil
import signal

import pytest
from forks import Ended
from runs import KillAtStep, checkpoints, steps, train

from pretrain.tracking import read_metrics

# Of a case: half of the run's steps, and sections of the recipe.
BF16 = {"train": {"precision": "bf16"}}
CASES = {
    "ep2": (8, {"parallel": {"expert": 2}}),
    "ep2-sharded": (4, {"parallel": {"expert": 2, "shard": "optimizer"}}),
    "dp2-sharded-bf16": (4, {"parallel": {"data": 2, "shard": "optimizer"}} | BF16),
    "bf16, dropout and gshard": (4, {"model": {"dropout": 0.1, "moe.gate": "gshard", "moe.top_k": 2}} | BF16),
    "some layers have experts": (2, {"model": {"moe.layers": (2,)}}),
    "sigmoid gate": (4, {"model": {"moe.gate": "sigmoid", "moe.top_k": 2}}),
    "dense": (2, {"model": {"moe.num_experts": 0, "moe.top_k": 1}, "optimizer": {"warmup_steps": 1}}),
}


@pytest.mark.by_default("ep2", "bf16, dropout and gshard")
@pytest.mark.parametrize("case", CASES)
def test_resume_at_half_time_is_the_run_that_was_not_stopped(forks, recipe_file, tmp_path, case):
    half, sections = CASES[case]
    size = 2 if "parallel" in sections else 1
    sections = sections | {"train": {"steps": 2 * half} | sections.get("train", {}), "checkpoint": {"every": half}}
    recipe = recipe_file(**sections)
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    train(forks, recipe, "--run.folder", whole, size=size)
    checkpoint = whole / "checkpoints" / f"step-{half:08d}"
    train(forks, recipe, "--run.folder", resumed, "--resume", checkpoint, size=size)
    expected = steps(whole)
    found = steps(resumed)
    assert sorted(expected) == list(range(2 * half + 1))
    assert found == {step: row for step, row in expected.items() if step > half}
    assert expected[2 * half]["val/loss"] < expected[0]["val/loss"]


@pytest.mark.slow
def test_killed_and_resumed_with_auto_ends_the_same(forks, recipe_file, tmp_path):
    recipe = recipe_file(
        checkpoint={"every": 2, "keep": 2, "asynchronous": False}, train={"steps": 10}, parallel={"expert": 2}
    )
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    train(forks, recipe, "--run.folder", whole, size=2)
    command = ("pretrain", recipe, "--run.folder", killed, "--resume", "auto")
    # The first start finds no checkpoint and begins anew; the first death comes before there is one, the second after.
    for step in (1, 7):
        ends = forks.command(*command, size=2, before=KillAtStep(step))
        assert [end.code for end in ends] == [-signal.SIGKILL] * 2
    assert checkpoints(killed) == ["step-00000004", "step-00000006"]
    assert max(row["step"] for row in read_metrics(killed / "metrics.jsonl")) == 7
    train(forks, *command[1:], size=2)
    assert steps(killed) == steps(whole)
    assert checkpoints(killed) == ["step-00000008", "step-00000010"]


def test_one_rank_dies_and_the_other_does_not_wait_for_ever(forks, recipe_file, tmp_path):
    recipe = recipe_file(parallel={"expert": 2})
    alive, dead = forks.command(
        "pretrain", recipe, "--run.folder", tmp_path / "run", size=2, before=KillAtStep(3, rank=1)
    )
    assert dead.code == -signal.SIGKILL
    assert isinstance(alive, Ended) and alive.code not in (0, 2)
    assert list(steps(tmp_path / "run")) == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def finished(forks, write_tiny_recipe, tmp_path_factory):
    """(recipe, folder) of a run of 4 steps, with checkpoints at 2 and 4; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_tiny_recipe(folder / "recipe.toml", checkpoint={"every": 2})
    assert "finished at step 4" in train(forks, recipe, "--run.folder", folder / "run")
    return recipe, folder / "run"


def test_a_finished_run_is_not_begun_again_and_a_longer_one_goes_on(forks, finished, tmp_path):
    recipe, run = finished
    folder = shutil.copytree(run, tmp_path / "run")
    assert "finished at step 4" in train(forks, recipe, "--run.folder", folder, "--resume")
    assert steps(folder) == steps(run)
    train(forks, recipe, "--run.folder", folder, "--resume", "--train.steps", "6")
    assert list(steps(folder)) == list(range(7))
    assert [name[-1] for name in checkpoints(folder)] == ["4", "6"]


def test_a_finished_run_leaves_nothing_for_another_folder(forks, finished, tmp_path):
    recipe, run = finished
    (end,) = forks.command("pretrain", recipe, "--run.folder", tmp_path / "other", "--resume", run)
    assert "step 4" in end.out or "train.steps=4" in end.err, f"it does not say that no step is left: {end}"
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("resumed", ["an earlier step", "another run"])
def test_what_would_end_in_a_mixed_record_is_refused_at_once(forks, finished, tmp_path, resumed):
    """Checkpoints are never overwritten: a run can go back, or take another's checkpoint, in a new folder only."""
    recipe, run = finished
    folder = shutil.copytree(run, tmp_path / "run")
    checkpoint = (folder if resumed == "an earlier step" else run) / "checkpoints" / "step-00000002"
    record = (folder / "metrics.jsonl").read_bytes()
    (end,) = forks.command("pretrain", recipe, "--run.folder", folder, "--resume", checkpoint)
    assert (folder / "metrics.jsonl").read_bytes() == record, "the record was cut"
    assert end.code == 2
    assert f"run.folder={folder}" in end.err and end.err.count("\n") == 1, end.err
