import gzip
import json
from pathlib import Path

import pyarrow
import pytest

from fmoe.errors import UserError
from pretrain.data import documents
from pretrain.data.documents import find_sources, iter_documents

TEXTS = ["one\r\nline\n\n", "", "  grüße\t世界 😀", "x" * 100 + "\n" + "y" * 50]


def whole(paths: list[Path], text_key: str = "text") -> list[str]:
    """The documents with their pieces joined."""
    texts, parts = [], []
    for piece in iter_documents(paths, text_key):
        assert piece.num_bytes == len(piece.text.encode())
        parts.append(piece.text)
        if piece.ends_document:
            texts.append("".join(parts))
            parts = []
    assert not parts
    return texts


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    lines = "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts))
    return write(path, lines.encode())


def write(path: Path, data: bytes) -> Path:
    """Compressed as the name says."""
    if path.suffix == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(data)
    else:
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture(params=[1, 2, 3, 16, 1 << 20], ids=lambda size: f"pieces of {size}")
def piece_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(documents, "PIECE_SIZE", request.param)
    return request.param


@pytest.mark.parametrize("text", TEXTS)
def test_text_file_is_one_document(text: str, piece_size: int, tmp_path: Path) -> None:
    path = tmp_path / "text.md"  # any other suffix is text
    path.write_bytes(text.encode())
    pieces = list(iter_documents([path]))
    assert whole([path]) == [text]
    assert max(piece.num_bytes for piece in pieces) <= 2 * piece_size + 3
    if piece_size == 16:
        cuts = [piece.text for piece in pieces[:-1]]
        assert all(cut.endswith("\n") or "\n" not in cut for cut in cuts)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_json_lines(name: str, piece_size: int, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / name, TEXTS)
    assert whole([path]) == TEXTS
    assert max(len(piece.text) for piece in iter_documents([path])) <= piece_size


def test_json_lines_with_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert whole([path]) == ["a", "b"]


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [*TEXTS, *map(str, range(700))]
    parquet.write_table(pa.table({"id": range(len(texts)), "body": texts}), tmp_path / "a.parquet", row_group_size=300)
    assert whole([tmp_path / "a.parquet"], "body") == texts
    with pytest.raises(UserError, match=r"a\.parquet has no column 'text'; its columns are 'id', 'body'"):
        whole([tmp_path / "a.parquet"])
    with pytest.raises(UserError, match=r"row 1: the value of 'id' is a int, not a string"):
        whole([tmp_path / "a.parquet"], "id")

    parquet.write_table(pa.table({"text": ["a", None]}), tmp_path / "null.parquet")
    with pytest.raises(UserError, match="row 2: the value of 'text' is a NoneType"):
        whole([tmp_path / "null.parquet"])

    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "short.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"short\.parquet cannot be read as a Parquet file"):
        whole([tmp_path / "short.parquet"], "body")


def test_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": TEXTS, "id": range(len(TEXTS))})
    dataset.save_to_disk(str(tmp_path / "saved"))
    assert whole([tmp_path / "saved"]) == TEXTS
    assert [source.name for source in find_sources([tmp_path / "saved"])] == ["saved"]
    with pytest.raises(UserError, match="saved has no column 'body'; its columns are 'text', 'id'"):
        whole([tmp_path / "saved"], "body")

    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(UserError, match=r"name one of test, train, as .*splits/SPLIT"):
        whole([tmp_path / "splits"])
    assert whole([tmp_path / "splits" / "train"]) == TEXTS

    arrow = next((tmp_path / "saved").glob("*.arrow"))
    arrow.write_bytes(b"no arrow")
    with pytest.raises(UserError, match="cannot be read as a folder of datasets"):
        whole([tmp_path / "saved"])


def test_folder_is_read_in_order_and_named_without_this_machines_path(tmp_path: Path) -> None:
    folder = tmp_path / "books"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "1.txt").write_text("third")
    (folder / "a.txt").write_text("first")
    write_jsonl(folder / "a2.jsonl.gz", ["second"])
    (folder / "notes.md").write_text("no")
    write_jsonl(folder / "c.jsonl.zst", ["fourth"])
    write(folder / "d.txt.gz", b"fifth")
    write(folder / "e.txt.zst", b"sixth")
    assert whole([folder]) == ["first", "second", "third", "fourth", "fifth", "sixth"]
    names = ["a.txt", "a2.jsonl.gz", "b/1.txt", "c.jsonl.zst", "d.txt.gz", "e.txt.zst"]
    assert [source.name for source in find_sources([folder])] == [f"books/{name}" for name in names]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a\.jsonl, line 2 is not JSON: .* at column"),
        (b'["text"]', r"line 2 is a JSON list, not an object with the key 'text'"),
        (b'{"body": "a", "id": 1}', r"line 2 has no key 'text'; its keys are 'body', 'id'"),
        (b"{}", r"line 2 has no key 'text'; its keys are none"),
        (b'{"text": ["a"]}', r"line 2: the value of 'text' is a list, not a string"),
        (b'{"text": null}', r"line 2: the value of 'text' is a NoneType, not a string"),
        (b'{"text": "\\ud83d"}', r"line 2: 'text' has the lone surrogate U\+D83D"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b'{"n": ' + b"1" * 10_000 + b"}", "line 2 is not JSON"),
        (b'{"text": "\xff"}', r"a\.jsonl is not UTF-8 at byte 27"),
    ],
    ids=["cut", "list", "key", "empty", "list value", "null", "surrogate", "deep", "digits", "bytes"],
)
def test_a_bad_json_line_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(UserError, match=message):
        whole([path])


def test_other_bad_inputs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no input"):
        whole([])
    with pytest.raises(UserError, match="nothing does not exist"):
        whole([tmp_path / "nothing"])
    with pytest.raises(UserError, match=r"no \*\.txt, .* in the folder"):
        whole([tmp_path])

    for name, kind in (("a.jsonl.gz", "gzip"), ("a.jsonl.zst", "zstd")):
        packed = write_jsonl(tmp_path / name, TEXTS * 100)
        for data in (packed.read_bytes()[:-12], b'{"text": "not packed"}'):
            packed.write_bytes(data)
            with pytest.raises(UserError, match=rf"{name} is not a whole {kind} file"):
                whole([packed])
    write(tmp_path / "b.jsonl.zst", b'{"text": "a"}\n{"text": 1}\n')
    with pytest.raises(UserError, match=r"b\.jsonl\.zst, line 2: the value of 'text' is a int"):
        whole([tmp_path / "b.jsonl.zst"])

    monkeypatch.setattr(documents, "MAX_LINE", 20)
    with pytest.raises(UserError, match=r"a\.jsonl, line 1 is longer than 20 bytes"):
        whole([write_jsonl(tmp_path / "a.jsonl", TEXTS)])


@pytest.mark.parametrize("bad", [0, 7, 39])
def test_bytes_that_are_not_utf8_are_named_by_their_offset(bad: int, piece_size: int, tmp_path: Path) -> None:
    data = bytearray(b"twenty bytes a line\n" * 2)
    data[bad] = 0xFF
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(UserError, match=rf"a\.txt is not UTF-8 at byte {bad}:"):
        whole([tmp_path / "a.txt"])


def test_a_character_cut_by_the_end_of_the_file(piece_size: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab" + "世".encode()[:2])
    with pytest.raises(UserError, match=r"not UTF-8 at byte 2:"):
        whole([tmp_path / "a.txt"])
