import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fmoe.errors import UserError
from pretrain.files import refuse_existing, refuse_inputs, replacing, with_ending


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"0")
    with pytest.raises(RuntimeError), replacing(new, old) as (file, _):
        file.write(b"1")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert old.read_bytes() == b"0"


def test_the_last_file_vouches_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between two renames, the old commit record is gone: nobody takes a mix of two runs for a whole."""
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for path in paths:
        path.write_bytes(b"0")

    def rename(source: Path, target: Path) -> None:
        if target == paths[1]:
            raise KeyboardInterrupt
        source.rename(target)

    monkeypatch.setattr("pretrain.files.os.replace", rename)
    with pytest.raises(KeyboardInterrupt), replacing(*paths) as files:
        for file in files:
            file.write(b"1")
    assert [path.read_bytes() for path in paths[:2]] == [b"1", b"0"]
    assert not paths[2].exists()


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write in .*file"), replacing(tmp_path / "file" / "a"):
        pass
    with pytest.raises(UserError, match=r"cannot write .*No space left"), replacing(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_refuse_existing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    refuse_existing([path], overwrite=False)
    path.touch()
    refuse_existing([path], overwrite=True)
    with pytest.raises(UserError, match="exists; pass --overwrite"):
        refuse_existing([path], overwrite=False)
    with pytest.raises(UserError, match="is an input"):
        refuse_existing([path], overwrite=True, inputs=[tmp_path / "." / "a"])


def test_a_prefix_keeps_its_dots() -> None:
    assert with_ending(Path("out/v1.5"), ".bin") == Path("out/v1.5.bin")


def test_outputs_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "folder", tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(UserError, match="exists and is not a file"):
            refuse_existing([path], overwrite=True)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UserError, match="link exists; pass --overwrite"):
        refuse_existing([tmp_path / "link"], overwrite=False)


def test_an_output_that_is_an_input_by_another_name(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("text")
    (tmp_path / "symbolic").symlink_to(path)
    (tmp_path / "hard").hardlink_to(path)
    for name in ("a", "symbolic", "hard"):
        for other in ("a", "symbolic", "hard"):
            with pytest.raises(UserError, match=f"{name} is an input and would be overwritten"):
                refuse_inputs([tmp_path / "new", tmp_path / name], [tmp_path / "none", tmp_path / other])
    refuse_inputs([tmp_path / "new"], [path])


def child(work: Callable[[], None]) -> int:
    """Forks a process that does the work; its number."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid


def writing(paths: list[Path], then: Callable[[], None]) -> None:
    with replacing(*paths) as files:
        for file in files:
            file.write(b"half")
            file.flush()
        then()


def write_all(paths: list[Path]) -> None:
    with replacing(*paths) as files:
        for file in files:
            file.write(b"whole")


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, caplog) -> None:
    paths = [tmp_path / "a.bin", tmp_path / "a.idx"]
    pid = child(lambda: writing(paths, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    os.waitpid(pid, 0)
    others = ["b.bin.1.tmp", "a.bin.tmp", "a.bin.x1.tmp", "xa.bin.99999999.tmp", f"a.bin.{pid}.tmp.old"]
    for name in others:
        (tmp_path / name).touch()
    assert (tmp_path / f"a.bin.{pid}.tmp").stat().st_size == 4
    write_all(paths)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.bin", "a.idx", *others])
    assert len(caplog.messages) == 2
    assert f"a.bin.{pid}.tmp (4 bytes), left by process {pid}, which has ended" in caplog.messages[0]


def test_what_a_live_process_writes_stays(tmp_path: Path, caplog) -> None:
    """One of this machine, by its number; one of another, whose number is nobody's here, by its lock."""
    paths = [tmp_path / "a"]
    ready, begun = os.pipe()
    end, go = os.pipe()

    def wait() -> None:
        (tmp_path / f"a.{os.getpid()}.tmp").rename(tmp_path / "a.99999999.tmp")
        (tmp_path / f"a.{os.getpid()}.tmp").touch()
        os.write(begun, b"1")
        os.read(end, 1)

    pid = child(lambda: writing(paths, wait))
    try:
        os.read(ready, 1)
        write_all(paths)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a", "a.99999999.tmp", f"a.{pid}.tmp"])
        assert sorted(caplog.messages) == sorted(
            f"{tmp_path}/a.{number}.tmp is kept: process {number} may still be writing it" for number in (pid, 99999999)
        )
    finally:
        os.write(go, b"1")
        os.waitpid(pid, 0)
        for descriptor in (ready, begun, end, go):
            os.close(descriptor)


def test_a_temporary_file_of_another_process_is_not_touched(tmp_path: Path) -> None:
    """A process in another container may have the same id; its file is locked."""
    import fcntl

    theirs = tmp_path / f"a.{os.getpid()}.tmp"
    with theirs.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="written by another process"):
            write_all([tmp_path / "a"])
    assert theirs.exists()
    write_all([tmp_path / "a"])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("prefix", [".", "..", "/", "out/.."])
def test_a_prefix_without_a_name(prefix: str) -> None:
    with pytest.raises(UserError, match="has no file name: add one"):
        with_ending(Path(prefix), ".bin")


def test_files_appear_together(tmp_path: Path) -> None:
    paths = [tmp_path / "new" / "a", tmp_path / "new" / "b"]
    with replacing(*paths) as files:
        for file in files:
            file.write(b"1")
        assert not any(path.exists() for path in paths)
    assert [path.read_bytes() for path in paths] == [b"1", b"1"]
    assert sorted(tmp_path.rglob("*.tmp")) == []
