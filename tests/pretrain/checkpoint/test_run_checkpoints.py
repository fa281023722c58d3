"""Commands: what is written in the background, damaged, started warm, kept, killed."""

import errno
import math
import os
import random
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import BeforeStep, checkpoints, steps, tensor_hash, train

from fmoe.errors import UserError
from pretrain.checkpoint import open_checkpoint
from pretrain.config import DataConfig, Recipe, RunConfig, TrainConfig
from pretrain.start.resume import check_data, find_checkpoint
from pretrain.start.run import summarize
from pretrain.tracking import JsonlTracker, read_metrics


class SlowDisk:
    """Every write of a shard takes ``seconds`` more, and fails for step ``failing``, with a full disk."""

    def __init__(self, seconds, failing=None):
        self.seconds, self.failing = seconds, failing

    def __call__(self):
        save = sys.modules["pretrain.checkpoint.save"]  # the package has a function of that name
        write_shard = save.write_shard

        def slow(path, tensors):
            time.sleep(self.seconds)
            if self.failing is not None and f"{self.failing:08d}" in path.parent.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return write_shard(path, tensors)

        save.write_shard = slow


@pytest.mark.by_default("2")
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_written_in_the_background_is_what_a_stop_would_have_written(forks, recipe_file, tmp_path, size):
    recipe = recipe_file(checkpoint={"every": 2, "keep": 0}, parallel={"expert": size}, train={"steps": 6})
    folders = {}
    for name in ("background", "foreground"):
        folders[name] = tmp_path / name
        option = "--checkpoint.asynchronous" if name == "background" else "--checkpoint.no-asynchronous"
        before = SlowDisk(0.3) if name == "background" else None
        train(forks, recipe, "--run.folder", folders[name], option, size=size, before=before)
    assert checkpoints(folders["background"]) == checkpoints(folders["foreground"]) != []
    for step in checkpoints(folders["background"]):
        written = [
            {path.name: path.read_bytes() for path in (folder / "checkpoints" / step).iterdir()}
            for folder in folders.values()
        ]
        for name in written[0].keys() - {"state.json", "manifest.json"}:
            assert written[0][name] == written[1][name], f"{step}/{name}"
        states = [open_checkpoint(folder / "checkpoints" / step).state for folder in folders.values()]
        for state in states:
            state["recipe"].pop("run"), state["recipe"].pop("checkpoint")
        assert states[0] == states[1]
    assert steps(folders["background"]) == steps(folders["foreground"])


@pytest.mark.by_default("at the end")
@pytest.mark.parametrize("failing", [2, 6], ids=["under way", "at the end"])
def test_an_error_in_the_background_ends_the_run_on_every_rank(forks, recipe_file, tmp_path, failing):
    recipe = recipe_file(checkpoint={"every": 2}, parallel={"expert": 2}, train={"steps": 6})
    folder = tmp_path / "run"
    ends = forks.command("pretrain", recipe, "--run.folder", folder, size=2, before=SlowDisk(0.1, failing))
    assert [end.code for end in ends] == [2, 2], ends
    for end in ends:
        assert f"step-{failing:08d}.tmp" in end.err and "No space left on device" in end.err
        assert "needs" in end.err and "are free" in end.err
        assert "finished" not in end.out
    assert checkpoints(folder) == [f"step-{step:08d}" for step in (2, 4) if step < failing]
    train(forks, recipe, "--run.folder", folder, "--resume", "auto", size=2)
    assert list(steps(folder)) == list(range(7))


@pytest.fixture(scope="module")
def finished(forks, write_tiny_recipe, tmp_path_factory):
    """(recipe, folder) of a run of 6 steps with checkpoints at 2, 4 and 6; to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_tiny_recipe(folder / "recipe.toml", checkpoint={"every": 2, "keep": 0}, train={"steps": 6})
    train(forks, recipe, "--run.folder", folder / "run")
    return recipe, folder / "run"


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.by_default("shard-00000.safetensors-2")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("shard-00000.safetensors", 1),
        ("shard-00000.safetensors", 2),
        ("rank-00000.json", 1),
        ("state.json", 1),
        ("manifest.json", 1),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_passed_over(forks, finished, tmp_path, name, size):
    recipe, run = finished
    folder = shutil.copytree(run, tmp_path / "run")
    flip(folder / "checkpoints" / "step-00000006" / name)
    options = ["--run.folder", folder, "--train.steps", "7", "--parallel.expert", size]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for end in forks.command("pretrain", recipe, *options, "--resume", "auto", size=size):
        assert end.code == 2
        assert name in end.err and "step-00000006" in end.err and "--fallback" in end.err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    ends = forks.command("pretrain", recipe, *options, "--resume", "auto", "--fallback", size=size)
    assert [end.code for end in ends] == [0] * size, ends
    assert any(name in end.err and "trying the previous checkpoint" in end.err for end in ends), ends
    assert "step-00000006.damaged" in checkpoints(folder)
    open_checkpoint(folder / "checkpoints" / "step-00000006").verify()  # saved again
    assert list(steps(folder)) == list(range(8))
    if size == 1:
        expected, found = steps(run), steps(folder)
        assert [found[step]["loss"] for step in range(1, 5)] == [expected[step]["loss"] for step in range(1, 5)]


def test_the_same_after_fallback_as_before(forks, finished, tmp_path):
    recipe, run = finished
    folder = shutil.copytree(run, tmp_path / "run")
    flip(folder / "checkpoints" / "step-00000006" / "shard-00000.safetensors")
    train(forks, recipe, "--run.folder", folder, "--resume", "--fallback")
    assert steps(folder) == steps(run)
    assert tensor_hash(folder) == tensor_hash(run)


def test_other_data_under_the_same_name_are_refused(forks, recipe_file, tiny_corpus, tmp_path):
    from pretrain.data.prepare import prepare

    corpus = tmp_path / "train"
    text = tiny_corpus.train.with_suffix(".jsonl")
    prepare([text], tiny_corpus.tokenizer, corpus, num_workers=1)
    recipe = recipe_file(checkpoint={"every": 2}, data={"train": (str(corpus),)})
    train(forks, recipe, "--run.folder", tmp_path / "run")
    lines = text.read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(reversed(lines)))  # as many tokens
    prepare([tmp_path / "other.jsonl"], tiny_corpus.tokenizer, corpus, num_workers=1)
    (end,) = forks.command("pretrain", recipe, "--run.folder", tmp_path / "run", "--resume", "--train.steps", "6")
    assert end.code == 2 and "data.train has changed" in end.err, end


def test_a_warm_start_takes_the_weights_alone(forks, finished, tmp_path):
    recipe, run = finished
    folder, options = tmp_path / "warm", ["--train.init-from", run, "--optimizer.lr", "0.001"]
    train(forks, recipe, "--run.folder", folder, *options, "--train.steps", "3")
    rows, old = steps(folder), steps(run)
    assert list(rows) == [0, 1, 2, 3], "it begins at step 0"
    assert rows[0]["val/loss"] == old[6]["val/loss"], "the weights are not those of the last step"
    assert rows[1]["lr"] == pytest.approx(0.0005), "the schedule begins anew"
    state = open_checkpoint(folder).state
    assert (state["step"], state["optimizer"]["step"], state["data"]["next_sample"]) == (3, 3, 12)
    # Interrupted, it goes on with its own checkpoints, not with the others' weights.
    train(forks, recipe, "--run.folder", folder, *options, "--train.steps", "5", "--resume", "auto")
    assert list(steps(folder)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.by_default(1, 4, 6)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model.hidden-size", "64"], ["has shape", "expected"]),
        (["--moe.num-experts", "8"], ["has shape", "expected"]),
        (["--model.num-layers", "3"], ["has no tensor model/decoder.layers.2."]),
        (["--model.no-tie-embeddings"], ["has no tensor model/output_layer"]),
        (["--moe.gate", "sigmoid", "--moe.top-k", "2"], ["has no tensor", "expert_bias_E"]),
        (["--moe.num-experts", "0"], ["which is not in the model"]),
        (["--train.init-from", "nowhere"], ["train.init_from: nowhere is not a checkpoint"]),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_weights_that_do_not_fit_are_refused(forks, finished, tmp_path, options, says):
    recipe, run = finished
    (end,) = forks.command("pretrain", recipe, "--run.folder", tmp_path / "warm", "--train.init-from", run, *options)
    assert end.code == 2 and all(part in end.err for part in says), end
    assert not (tmp_path / "warm").exists()


def test_leftovers_of_the_dead_are_removed_and_some_steps_are_kept_for_good(forks, finished, tmp_path):
    recipe, run = finished
    folder = shutil.copytree(run, tmp_path / "run")
    for name in ("step-00000005.tmp", "step-00000001.trash"):
        (folder / "checkpoints" / name).mkdir()
    options = ["--train.steps", "7", "--checkpoint.keep", "1", "--checkpoint.keep-every", "4"]
    train(forks, recipe, "--run.folder", folder, "--resume", *options)
    assert checkpoints(folder) == [f"step-{step:08d}" for step in (4, 7)]


class KillLater(BeforeStep):
    """Ends the process as `kill -9` does ``delay`` seconds after it began step ``step``."""

    def __init__(self, step, delay):
        self.step, self.delay = step, delay

    def act(self, trainer):
        if trainer.step == self.step:
            threading.Timer(self.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()


@pytest.mark.parametrize(
    ("total", "deaths"),
    [
        pytest.param(16, 2, marks=pytest.mark.slow),
        pytest.param(200, 50, marks=pytest.mark.slow),
    ],
)
def test_killed_again_and_again_ends_with_the_same_weights(forks, recipe_file, tmp_path, total, deaths):
    """Two processes, jitter and dropout, checkpoints in the background; deaths at any moment."""
    recipe = recipe_file(
        model={"dropout": 0.1, "moe.jitter": 0.1},
        checkpoint={"every": 1 if deaths == 50 else 3, "keep": 2},
        train={"steps": total, "validation_every": total},
        parallel={"expert": 2},
        tracking={"wandb": False, "tensorboard": False},
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(forks, recipe, "--run.folder", whole, size=2)
    choose = random.Random(total)
    for number in range(deaths):
        begin, end = number * total // deaths, (number + 1) * total // deaths
        step = choose.randrange(begin, max(begin + 1, end - 2))
        dies = KillLater(step, choose.uniform(0, 0.05))
        ends = forks.command("pretrain", recipe, "--run.folder", killed, "--resume", "auto", size=2, before=dies)
        assert -signal.SIGKILL in [end.code for end in ends], ends
        rows = [row["step"] for row in read_metrics(killed / "metrics.jsonl")]  # readable at once
        assert len(rows) == len(set(rows))
    train(forks, recipe, "--run.folder", killed, "--resume", "auto", size=2)
    assert steps(killed) == steps(whole)
    assert tensor_hash(killed) == tensor_hash(whole)


def test_data_that_moved_are_the_same_data(forks, recipe_file, tiny_corpus, tmp_path):
    (tmp_path / "here").mkdir()
    for path in tiny_corpus.folder.iterdir():
        shutil.copy(path, tmp_path / "here" / path.name)
    recipe = recipe_file(
        checkpoint={"every": 2},
        data={"train": ("here/train",), "tokenizer": "here/tokenizer.model", "validation": ()},
        run={"folder": str(tmp_path / "run")},
    )
    (end,) = forks.command("pretrain", recipe, "--train.steps", "2", "--optimizer.warmup-steps", "1", folder=tmp_path)
    assert end.code == 0, end.err
    (tmp_path / "here").rename(tmp_path / "there")
    data = ["--data.train", "there/train", "--data.tokenizer", "there/tokenizer.model"]
    more = ["--train.steps", "3", "--resume"]
    (end,) = forks.command("pretrain", recipe, *data, *more, folder=tmp_path)
    assert end.code == 0 and "finished at step 3" in end.out, end.err
    data.insert(2, "there/train")
    (end,) = forks.command("pretrain", recipe, *data, *more, "--train.steps", "5", folder=tmp_path)
    assert end.code == 2 and "data.train has 2 corpora" in end.err


@pytest.mark.parametrize("has_digest", [True, False])
def test_data_are_compared_by_content_or_else_by_path(monkeypatch, tmp_path, has_digest):
    monkeypatch.chdir(tmp_path)
    digest = "a" * 64 if has_digest else None
    then = {"train": ("here/train",), "tokenizer": "here/tokenizer.model"}
    was = {"next_sample": 8, "samples_per_epoch": 5, "corpora": [digest], "tokenizer": digest}
    state = {"recipe": {"data": then}, "data": was}
    checkpoint = SimpleNamespace(step=2, path=Path("step-00000002"), state=state)
    inputs = SimpleNamespace(
        train=SimpleNamespace(samples_per_epoch=5), fingerprints=(digest,), tokenizer_fingerprint=digest
    )

    def check(train, tokenizer, changed=inputs):
        recipe = Recipe(train=TrainConfig(global_batch=4), data=DataConfig(train=(train,), tokenizer=tokenizer))
        check_data(recipe, changed, checkpoint)

    check("here/train", "here/tokenizer.model")
    check(str(tmp_path / "here" / "train"), f"{tmp_path}/./here/tokenizer.model")
    others = [("there/train", "here/tokenizer.model", "data.train"), ("here/train", "there.model", "data.tokenizer")]
    for corpus, tokenizer, key in others:
        if has_digest:
            check(corpus, tokenizer)
        else:
            with pytest.raises(UserError, match=f"{key}=there.* differs from here"):
                check(corpus, tokenizer)
    if has_digest:
        for name, value in (("fingerprints", ("b" * 64,)), ("tokenizer_fingerprint", "b" * 64)):
            key = "data.train" if name == "fingerprints" else "data.tokenizer"
            with pytest.raises(UserError, match=f"{key} has changed"):
                check("here/train", "here/tokenizer.model", SimpleNamespace(**(vars(inputs) | {name: value})))


def test_a_run_that_died_before_its_first_checkpoint_is_told_what_to_do(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "checkpoints").mkdir()
    for resume in (None, "run"):
        with pytest.raises(UserError, match=r"run.folder=.*--resume auto"):
            find_checkpoint(tmp_path, resume)
    assert find_checkpoint(tmp_path, "auto") is None


ROWS = {
    "nan": ({"loss": math.nan}, "training loss nan"),
    "infinite": ({"loss": math.inf, "val/loss": -math.inf}, "training loss inf, validation loss -inf"),
    "validation": ({"loss": 1.5, "val/loss": math.nan}, "training loss 1.5000, validation loss nan"),
    "nothing but a step": ({}, "finished at step 3:"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_finished_run_whose_last_loss_is_not_finite_says_so(tmp_path, capsys, name):
    row, text = ROWS[name]
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", None)
    tracker.log(2, {"loss": 2.0 if name != "validation" else math.nan})
    tracker.log(3, row)
    tracker.close()
    summarize(replace(Recipe(), run=RunConfig(folder=str(tmp_path))))
    out = capsys.readouterr().out
    assert text in out and str(tmp_path / "metrics.jsonl") in out
