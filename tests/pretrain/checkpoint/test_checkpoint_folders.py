"""The folder of checkpoints: what is made durable and when, what counts as a step, what is removed."""

import os
from pathlib import Path

import pytest
import torch

from fmoe.errors import UserError
from pretrain.checkpoint import Piece, SaveError, keep_last, latest, open_checkpoint, save, steps


def one_tensor(name, tensor):
    return Piece(name, tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape), tensor)


def test_a_step_is_never_overwritten_and_its_leftovers_are(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    leftover = folder / "step-00000005.tmp"
    leftover.mkdir(parents=True)
    (leftover / "junk").write_text("from a process that died")
    path = save(folder, 5, [one_tensor("w", torch.ones(2))], {}, {})
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "rank-00000.json",
        "shard-00000.safetensors",
        "state.json",
    ]
    with pytest.raises(UserError, match="never overwritten"):
        save(folder, 5, [one_tensor("w", torch.zeros(2))], {}, {})
    assert [p.name for p in folder.iterdir()] == ["step-00000005"]
    assert open_checkpoint(path).read("w").tolist() == [1, 1]
    with pytest.raises(UserError, match="step -1"):
        save(folder, -1, [], {}, {})


def test_all_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    """The order that a power cut cannot break: files, their folder, the rename, the folder above."""
    events, fsync, rename = [], os.fsync, os.rename

    def name_of(descriptor):
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(name_of(descriptor)) or fsync(descriptor))
    monkeypatch.setattr(os, "rename", lambda a, b: events.append("rename") or rename(a, b))
    path = save(tmp_path, 5, [one_tensor("w", torch.ones(2))], {}, {})
    written = {file.name for file in path.iterdir()}
    at = events.index("rename")
    assert written <= set(events[: at - 1])
    assert events[at - 2 :] == ["manifest.json", "step-00000005.tmp", "rename", tmp_path.name]


def test_a_folder_that_cannot_be_synced_holds_no_checkpoint(tmp_path, monkeypatch):
    def fsync(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SaveError, match="Input/output error"):
        save(tmp_path, 5, [], {}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match=r"file.*: Not a directory") as caught:
        save(tmp_path / "file" / "checkpoints", 1, [], {}, {})
    assert caught.value.errno is not None


def test_steps_latest_and_keep_last(tmp_path):
    assert steps(tmp_path / "none") == []
    assert latest(tmp_path / "none") is None
    for step in (0, 10, 20, 30, 40):
        save(tmp_path, step, [], {}, {})
    for name in ("step-00000050.tmp", "step-00000060", "step-70", "step-00000000.trash"):
        (tmp_path / name).mkdir()
    assert steps(tmp_path) == [0, 10, 20, 30, 40]
    assert latest(tmp_path) == tmp_path / "step-00000040"
    assert keep_last(tmp_path, 2, keep_every=20) == [10]
    assert not (tmp_path / "step-00000000.trash").exists()
    assert keep_last(tmp_path, 1) == [0, 20, 30]
    assert keep_last(tmp_path, 1) == []
    assert steps(tmp_path) == [40]
    for n, every in [(0, None), (1, 0)]:
        with pytest.raises(UserError, match="at least 1"):
            keep_last(tmp_path, n, every)


def test_the_run_its_checkpoints_and_a_step_all_open(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (1, 123456789):
        path = save(folder, step, [], {}, {})
    assert path.name == "step-123456789"
    assert [open_checkpoint(p).path for p in (tmp_path, folder, path)] == [path] * 3
    assert open_checkpoint(folder / "step-00000001").step == 1
