import gzip
import json
from pathlib import Path

import pytest

from fmoe.errors import UserError
from pretrain.data.corpus import SPLITS, write_documentation, write_python_library


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


PROSE = "Sentences of a page that explains how a program is used. " * 8


def read_all(splits) -> dict[str, dict]:
    return {row["path"]: row for split in splits.values() for row in map(json.loads, split.path.open())}


def test_documentation(tmp_path: Path) -> None:
    doc, library, licenses = tmp_path / "doc", tmp_path / "library", tmp_path / "common-licenses"
    for folder in (doc / "tool" / "html", library / "pkg" / "test", licenses):
        folder.mkdir(parents=True)
    (doc / "tool" / "README").write_text(PROSE + "readme")
    (doc / "tool" / "README.Debian").write_text(PROSE + "readme")  # repeated
    (doc / "tool" / "html" / "guide.txt.gz").write_bytes(gzip.compress((PROSE + "guide").encode()))
    (doc / "tool" / "broken.txt.gz").write_bytes(b"no archive")
    (doc / "tool" / "table.txt").write_text("0.125 | 17 | #42\n" * 100)
    (doc / "tool" / "short.txt").write_text("short")
    (doc / "tool" / "copyright").write_text(PROSE + "copyright")
    (doc / "tool" / "latin.txt").write_bytes(PROSE.encode() + b"\xe9")
    (licenses / "BSD").write_text(PROSE + "license")
    for name in ("pkg/a.py", "pkg/test/b.py"):
        (library / name).write_text(f'"""{PROSE}{name}"""\ndef f():\n    """Inner."""\n    raise SystemExit\n')
    (library / "pkg" / "bad.py").write_text("def (")
    splits = write_documentation(tmp_path / "out", tmp_path, library)
    found = read_all(splits)
    own = {path: row for path, row in found.items() if path.split("/")[0] not in ("packages", "topics")}
    assert sorted(own) == [
        "common-licenses/BSD",
        "doc/tool/README",
        "doc/tool/html/guide.txt.gz",
        "docstrings/pkg/a.py",
    ]
    assert own["docstrings/pkg/a.py"]["text"] == PROSE + "pkg/a.py\n\nInner."
    assert own["doc/tool/html/guide.txt.gz"]["text"] == PROSE + "guide"
    assert own["doc/tool/README"]["license"] == "see tool/copyright"
    assert sum(split.skipped for split in splits.values()) == 1
    assert {path.split("/")[0] for path in found} >= {"packages"} and all(row["license"] for row in found.values())
    again = write_documentation(tmp_path / "again", tmp_path, library)
    assert all(splits[name].path.read_bytes() == again[name].path.read_bytes() for name in SPLITS)


def test_documentation_that_is_missing(tmp_path: Path, caplog, monkeypatch) -> None:
    write_documentation(tmp_path / "out", tmp_path, tmp_path)
    assert [said.split(f"{tmp_path}")[0] for said in caplog.messages] == [
        "no usable docstrings below ",
        "no usable texts in ",
        "no usable texts in ",
    ]
    monkeypatch.setattr("pretrain.data.corpus._descriptions", lambda: iter(()))
    monkeypatch.setattr("pretrain.data.corpus._topics", lambda: iter(()))
    with pytest.raises(UserError, match="this machine has no usable descriptions of installed packages, "):
        write_documentation(tmp_path / "none", tmp_path, tmp_path)
    assert not list((tmp_path / "none").iterdir())
