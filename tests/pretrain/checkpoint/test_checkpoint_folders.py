"""The folder of checkpoints: what is made durable and when, what counts as a step, what is removed."""

import os
from pathlib import Path

import pytest
import torch
from pieces import whole

from fmoe.errors import UserError
from pretrain.checkpoint import SaveError, keep_last, latest, open_checkpoint, remove_leftovers, save, save_parts, steps
from pretrain.checkpoint.folders import step_folders
from pretrain.start.resume import agree_on_intact, find_checkpoint


def test_a_step_is_never_overwritten_and_its_leftovers_are(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    leftover = folder / "step-00000005.tmp"
    leftover.mkdir(parents=True)
    (leftover / "junk").write_text("from a process that died")
    path = save(folder, 5, [whole("w", torch.ones(2))], {}, {})
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "rank-00000.json",
        "shard-00000.safetensors",
        "state.json",
    ]
    with pytest.raises(UserError, match="never overwritten"):
        save(folder, 5, [whole("w", torch.zeros(2))], {}, {})
    assert [p.name for p in folder.iterdir()] == ["step-00000005"]
    assert open_checkpoint(path).read("w").tolist() == [1, 1]
    for step in (lambda: save(folder, -1, [], {}, {}), lambda: save_parts(folder, -1, [], {}, nbytes=0)):
        with pytest.raises(UserError, match="step=-1"):
            step()


def test_all_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    """The order that a power cut cannot break: files, their folder, the rename, the folder above."""
    events, fsync, rename = [], os.fsync, os.rename

    def name_of(descriptor):
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(name_of(descriptor)) or fsync(descriptor))
    monkeypatch.setattr(os, "rename", lambda a, b: events.append("rename") or rename(a, b))
    path = save(tmp_path, 5, [whole("w", torch.ones(2))], {}, {})
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


# Links, archives, and what others put there


def saved(folder, *numbers):
    for step in numbers:
        save(folder, step, [whole("w", torch.full((2,), float(step)))], {}, {})


def listed(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_old_step_that_is_a_link_is_unlinked_and_its_target_stays(tmp_path):
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    saved(folder, 1, 2, 3)
    archive.mkdir()
    (folder / "step-00000001").rename(archive / "one")
    (folder / "step-00000001").symlink_to(archive / "one")
    assert steps(folder) == [1, 2, 3]  # links are followed
    assert open_checkpoint(folder / "step-00000001").step == 1
    assert keep_last(folder, 1) == [1, 2]
    assert listed(folder) == ["step-00000003"]
    assert open_checkpoint(archive / "one").step == 1


@pytest.mark.parametrize("suffix", [".tmp", ".trash"])
def test_leftovers_that_are_links_or_files_are_removed_alone(tmp_path, suffix):
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    saved(folder, 5)
    archive.mkdir()
    (archive / "file").touch()
    (folder / f"step-00000001{suffix}").symlink_to(archive)
    (folder / f"step-00000002{suffix}").symlink_to("nowhere")
    (folder / f"step-00000003{suffix}").touch()
    (folder / f"step-00000004{suffix}").mkdir()
    remove_leftovers(folder)
    assert listed(folder) == ["step-00000005"] and listed(archive) == ["file"]


def test_what_others_put_there_is_left_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    saved(folder, 1, 2)
    others = ["step-00000001.tar", "step-00000009", "step-1", "step-best.tmp", "step-00000007.tar.tmp", "notes.trash"]
    for name in others:
        (folder / name).touch()
    (folder / "step-mine.trash").mkdir()
    remove_leftovers(folder)
    assert keep_last(folder, 1) == [1]
    assert latest(folder).name == "step-00000002" == step_folders(folder)[0].name
    assert listed(folder) == sorted(["step-00000002", "step-mine.trash", *others])


def test_a_link_to_nowhere_is_damaged_and_can_be_passed_over(tmp_path):
    folder = tmp_path / "checkpoints"
    saved(folder, 1)
    (folder / "step-00000002").symlink_to(tmp_path / "unmounted")
    assert steps(folder) == [1]
    with pytest.raises(UserError, match="step-00000002"):
        find_checkpoint(tmp_path, "auto")
    assert agree_on_intact(tmp_path, "auto", fallback=True).step == 1
    assert listed(folder) == ["step-00000001", "step-00000002.damaged"]
    (folder / "step-00000003").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match="step-00000003 already exists"):
        saved(folder, 3)


def test_a_temporary_folder_that_is_a_link_is_replaced(tmp_path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    folder.mkdir()
    (folder / "step-00000001.tmp").symlink_to(elsewhere)
    saved(folder, 1)
    assert listed(folder) == ["step-00000001"] and listed(elsewhere) == ["file"]
    assert not (folder / "step-00000001").is_symlink()


def test_an_old_step_that_cannot_be_removed_is_no_reason_to_end(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "checkpoints"
    saved(folder, 1, 2, 3)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refuse)
    keep_last(folder, 1)
    remove_leftovers(folder)
    assert steps(folder) == [3] and "step-00000001.trash cannot be removed" in caplog.text


def test_a_step_that_somebody_archives_at_that_moment_is_gone(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    saved(folder, 1, 2)
    rename = Path.rename

    def late(path, target):
        if path.name == "step-00000001":
            rename(path, tmp_path / "archived")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    keep_last(folder, 1)
    assert listed(folder) == ["step-00000002"]
