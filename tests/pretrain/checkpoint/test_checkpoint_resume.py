"""Choice of the checkpoint to resume from: damage in any file is an error that names it, or is skipped on request."""

import random
import shutil
from dataclasses import replace

import pytest
import torch
from pieces import whole

from fmoe.errors import UserError
from pretrain.checkpoint import open_checkpoint, save
from pretrain.checkpoint.folders import step_folders
from pretrain.config import ParallelConfig, Recipe, TrainConfig
from pretrain.start.job import parse
from pretrain.start.resume import agree_on_intact, changes, check_resumable, find_checkpoint

FILES = ["manifest.json", "rank-00000.json", "shard-00000.safetensors", "state.json"]


def save_run(run, steps=(2, 4)):
    generator = torch.Generator().manual_seed(0)
    for step in steps:
        tensor = torch.randn(64, 8, generator=generator)
        state = {"step": step, "recipe": Recipe().values()}
        rank_state = {"rng": torch.randint(256, (5000,), generator=generator).byte()}
        save(run / "checkpoints", step, [whole("w", tensor)], state, rank_state)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A run with checkpoints of steps 2 and 4; to be copied."""
    run = tmp_path_factory.mktemp("run")
    save_run(run)
    return run


def do_damage(choose, newest):
    """One random damage to a step folder; the files of which one has to be named."""
    kind, name = choose.choice(["flip", "truncate", "missing", "swap", "other step"]), choose.choice(FILES)
    path = newest / name
    match kind:
        case "flip":
            data = bytearray(path.read_bytes())
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
            path.write_bytes(data)
        case "truncate":
            path.write_bytes(path.read_bytes()[: choose.randrange(path.stat().st_size)])
        case "missing":
            path.unlink()
        case "swap":
            other = newest / choose.choice([file for file in FILES if file != name])
            content = path.read_bytes()
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
            return kind, {name, other.name}
        case "other step":
            shutil.copy(newest.parent / "step-00000002" / name, path)
    return kind, {name}


def test_a_hundred_damages(intact, tmp_path):
    choose, kinds = random.Random(5), set()
    before = {path.name: path.read_bytes() for path in (intact / "checkpoints" / "step-00000002").iterdir()}
    for number in range(100):
        run = shutil.copytree(intact, tmp_path / str(number))
        kind, names = do_damage(choose, run / "checkpoints" / "step-00000004")
        kinds.add(kind)
        with pytest.raises(UserError) as caught:
            agree_on_intact(run, "run")
        message = str(caught.value)
        assert any(name in message for name in names), f"{number}, {kind}: {names} not in: {message}"
        assert "step-00000004" in message and "--fallback" in message and "\n" not in message
        find_checkpoint(run, "run", fallback=True)
        checkpoint = agree_on_intact(run, "run", fallback=True)
        assert checkpoint.step == 2
        assert {path.name: path.read_bytes() for path in checkpoint.path.iterdir()} == before
        folders = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert folders == ["step-00000002", "step-00000004.damaged"]
        shutil.rmtree(run)
    assert len(kinds) == 5


def test_nothing_intact_is_refused_also_with_fallback(intact, tmp_path):
    run = shutil.copytree(intact, tmp_path / "run")
    for path in step_folders(run / "checkpoints"):
        (path / "state.json").write_bytes(b"")
    for find in (find_checkpoint, agree_on_intact):
        with pytest.raises(UserError, match=r"step-00000004/state\.json .*no checkpoint is intact \(tried 2\)"):
            find(run, "run", fallback=True)


def test_another_runs_damaged_checkpoint_stays_where_it_is(intact, tmp_path):
    other = shutil.copytree(intact, tmp_path / "other")
    newest = other / "checkpoints" / "step-00000004"
    (newest / "shard-00000.safetensors").unlink()
    for where in (other, other / "checkpoints", newest):
        assert agree_on_intact(tmp_path / "mine", str(where), fallback=True).step == 2
    assert newest.is_dir()


def test_a_link_to_itself_is_damaged(intact, tmp_path):
    run = shutil.copytree(intact, tmp_path / "run")
    (run / "checkpoints" / "step-00000009").symlink_to("step-00000009")
    with pytest.raises(UserError, match="whose newest checkpoint is step-00000009"):
        find_checkpoint(run, str(intact))
    with pytest.raises(UserError, match="step-00000009"):
        find_checkpoint(run, "run")
    assert find_checkpoint(run, "run", fallback=True).step == 4


def test_a_damaged_step_is_set_aside_as_often_as_need_be(intact, tmp_path):
    run = shutil.copytree(intact, tmp_path / "run")
    for _ in range(2):
        (run / "checkpoints" / "step-00000004" / "manifest.json").unlink()
        assert agree_on_intact(run, "auto", fallback=True).step == 2
        save_run(run, steps=[4])
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000004.damaged", "step-00000004.damaged.2"]


def test_what_may_change_and_what_may_not(intact):
    checkpoint = open_checkpoint(intact)
    recipe = Recipe()
    check_resumable(recipe, checkpoint)
    check_resumable(replace(recipe, parallel=ParallelConfig(expert=8), train=TrainConfig(steps=999)), checkpoint)
    for train, message in (
        ({"seed": 5}, "train.seed=5 differs from 1234"),
        ({"steps": 3}, "train.steps=3 is less"),
        ({"precision": "bf16"}, "train.precision=bf16 differs from fp32"),
        ({"global_batch": 8}, "train.global_batch=8"),
    ):
        with pytest.raises(UserError, match=message):
            check_resumable(replace(recipe, train=TrainConfig(**train)), checkpoint)


def test_what_is_otherwise_is_told(intact, tmp_path):
    checkpoint = open_checkpoint(intact)
    recipe = Recipe()
    steps = checkpoint.state["recipe"]["train"]["steps"]
    same = replace(
        recipe, train=TrainConfig(steps=steps), parallel=ParallelConfig(**checkpoint.state["recipe"]["parallel"])
    )
    assert changes(same, checkpoint) == []
    other = replace(same, train=TrainConfig(steps=steps + 1), run=replace(recipe.run, folder="elsewhere"))
    assert changes(other, checkpoint) == [f"train.steps={steps + 1} (was {steps})"]
    file = tmp_path / "mine.py"
    file.write_text("")
    plugged = replace(same, run=replace(recipe.run, imports=(str(file),), callbacks=("mine",)))
    assert changes(plugged, checkpoint) == ["run.callbacks=('mine',) (was ())", "mine.py of run.imports (new)"]


def test_a_run_that_is_not_there(tmp_path):
    options = ["quickstart", "--run.folder", str(tmp_path / "nowhere"), "--resume"]
    with pytest.raises(UserError, match=r"run.folder=.*nowhere does not exist: .*--resume"):
        parse(options, "fmoe train")
    parse([*options, "auto"], "fmoe train")
    assert find_checkpoint(tmp_path / "nowhere", "auto") is None
