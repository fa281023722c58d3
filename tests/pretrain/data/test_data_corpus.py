import json
from pathlib import Path

import pytest

from fmoe.errors import UserError
from pretrain.data.corpus import SPLITS, write_python_library


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    for i in range(300):
        path = root / f"package{i % 7}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"x = {i}\r\n".encode())
    (root / "latin.py").write_bytes(b"name = '\xe9'")
    for name in ("site-packages", "__pycache__"):
        (root / name).mkdir()
        (root / name / "other.py").touch()
    return root


def test_splits_are_disjoint_whole_and_repeatable(library: Path, tmp_path: Path) -> None:
    splits = write_python_library(tmp_path / "a", library)
    rows = {name: [json.loads(line) for line in splits[name].path.open()] for name in SPLITS}
    assert all(splits[name].documents == len(rows[name]) for name in SPLITS)
    assert all(splits[name].text_bytes == sum(len(row["text"]) for row in rows[name]) for name in SPLITS)
    paths = [row["path"] for name in SPLITS for row in rows[name]]
    assert sorted(paths) == sorted(f"package{i % 7}/module{i}.py" for i in range(300))
    assert len(rows["train"]) > 240
    assert len(rows["validation"]) > 3
    assert len(rows["test"]) > 3
    assert all(row["text"].endswith("\r\n") for row in rows["train"])
    assert sum(split.skipped for split in splits.values()) == 1

    again = write_python_library(tmp_path / "b", library)
    assert all(splits[name].path.read_bytes() == again[name].path.read_bytes() for name in SPLITS)


def test_a_split_depends_on_the_path_alone(library: Path, tmp_path: Path) -> None:
    before = write_python_library(tmp_path / "a", library)["test"].path.read_text()
    (library / "zzz.py").write_text("new")
    (library / "package0" / "module0.py").write_text("changed")
    after = write_python_library(tmp_path / "a", library)["test"].path.read_text()
    names = [[json.loads(line)["path"] for line in text.splitlines()] for text in (before, after)]
    assert set(names[0]) <= set(names[1]) <= {*names[0], "zzz.py"}


def test_a_library_without_sources_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \*\.py below"):
        write_python_library(tmp_path / "out", tmp_path)
    assert list(tmp_path.iterdir()) == []
