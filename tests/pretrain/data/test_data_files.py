import errno
from pathlib import Path

import pytest

from fmoe.errors import UserError
from pretrain.data.files import beside, refuse_existing, replacing


def test_files_appear_together(tmp_path: Path) -> None:
    paths = [tmp_path / "new" / "a", tmp_path / "new" / "b"]
    with replacing(*paths) as files:
        for file in files:
            file.write(b"1")
        assert not any(path.exists() for path in paths)
    assert [path.read_bytes() for path in paths] == [b"1", b"1"]
    assert sorted(tmp_path.rglob("*.tmp")) == []


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

    monkeypatch.setattr("pretrain.data.files.os.replace", rename)
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
    with pytest.raises(UserError, match="exists; --overwrite"):
        refuse_existing([path], overwrite=False)
    with pytest.raises(UserError, match="is an input"):
        refuse_existing([path], overwrite=True, inputs=[tmp_path / "." / "a"])


def test_a_prefix_keeps_its_dots() -> None:
    assert beside(Path("out/v1.5"), ".bin") == Path("out/v1.5.bin")
