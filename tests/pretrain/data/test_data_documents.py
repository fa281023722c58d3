import gzip
import json
import os
from pathlib import Path

import pyarrow
import pytest

from fmoe.errors import UserError
from pretrain.data import sources
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
    monkeypatch.setattr(sources, "PIECE_SIZE", request.param)
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

    twice = pa.table([["a"], [1], ["b"]], names=["text", "n", "text"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(UserError, match=r"twice\.parquet has 2 columns 'text'"):
        whole([tmp_path / "twice.parquet"])

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
    with pytest.raises(UserError, match=r"pass one of test, train, as .*splits/SPLIT"):
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
        (b"[" * 100_000, "line 2 is not readable JSON"),
        (b'{"n": ' + b"1" * 10_000 + b"}", "line 2 is not readable JSON"),
        (b'{"text": "a", "n": 1, "text": "b"}', "line 2 is not readable JSON: an object has the key 'text' twice"),
        (b'{"text": "\xff"}', r"a\.jsonl is not UTF-8 at byte 27"),
    ],
    ids=["cut", "list", "key", "empty", "list value", "null", "surrogate", "deep", "digits", "a key twice", "bytes"],
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
            with pytest.raises(UserError, match=rf"{name} is truncated, damaged or not a {kind} file"):
                whole([packed])
    write(tmp_path / "b.jsonl.zst", b'{"text": "a"}\n{"text": 1}\n')
    with pytest.raises(UserError, match=r"b\.jsonl\.zst, line 2: the value of 'text' is a int"):
        whole([tmp_path / "b.jsonl.zst"])

    monkeypatch.setattr(sources, "MAX_LINE", 20)
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


def write_as_named(path: Path, data: bytes) -> Path:
    """Compressed as the name says, in any case."""
    small = write(path.with_name("small" + path.suffix.lower()), data)
    return small.rename(path)


JSON_NAMES = ["a.json", "a.ndjson", "a.jsonlines", "A.Json", "a.json.gz", "a.jsonl.GZ", "a.JSONL.ZST"]
TEXT_NAMES = ["a.TXT", "a.text", "a.Txt.Gz", "a.txt.ZST"]


@pytest.mark.parametrize("name", [*JSON_NAMES, *TEXT_NAMES])
def test_names_of_text_and_json_lines(name: str, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    path = write_as_named(tmp_path / name, lines.encode())
    assert whole([path]) == whole([tmp_path]) == ([lines] if name in TEXT_NAMES else TEXTS)


@pytest.mark.parametrize("name", ["a.json", "a.JSON.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_objects(name: str, indent: int | None, piece_size: int, tmp_path: Path) -> None:
    rows = [{"id": 10**i, "text": text, "more": [{"a": [1, 2.5]}]} for i, text in enumerate(TEXTS)]
    text = "\ufeff \n" + json.dumps(rows, indent=indent, ensure_ascii=False) + "\n "
    assert whole([write_as_named(tmp_path / name, text.encode())]) == TEXTS
    assert whole([write_as_named(tmp_path / "empty.json", b" [ ]")]) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{\n "text": "a"\n}', r"a\.json, line 1 is not JSON: .*; a \.json file must hold one JSON object per line"),
        ('[{"text": "a"}', "item 1 must be followed by a comma, or by the bracket"),
        ('[{"text": "a"} {"text": "b"}]', "item 1 must be followed by a comma, or by the bracket"),
        ('[{"text": "a"},]', r"item 2 is not JSON"),
        ('[{"text": "a"}, {"text": "b]', r"item 2 is not JSON"),
        ('[{"text": "a"}] 1', "item 1 must be followed by a comma, or by the bracket"),
        ('["a"]', r"item 1 is a JSON str, not an object"),
        ('[{"text": "a"}, {"body": "b"}]', r"item 2 has no key 'text'; its keys are 'body'"),
        ("[" * 100_000, "item 1 is not readable JSON"),
        ('[{"text": "a", "text": "b"}]', "item 1 is not readable JSON: an object has the key 'text' twice"),
    ],
)
def test_json_that_is_neither_lines_nor_an_array(content: str, message: str, piece_size: int, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=message):
        whole([tmp_path / "a.json"])


@pytest.mark.parametrize("name", ["a.csv", "a", "a.txt.bz2", "a.jsonl.xz", "a.docx", ".jsonl", "a.gz", "a.txt.zst.gz"])
def test_an_unknown_suffix_is_refused_unless_the_format_is_told(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(path, b'{"text": "one"}\n')
    with pytest.raises(UserError, match=r"has the suffix .*--format text\|jsonl\|json\|parquet"):
        find_sources([path])
    assert whole_of([path], "text") == ['{"text": "one"}\n']
    assert whole_of([path], "jsonl") == whole_of([path], "json") == ["one"]
    with pytest.raises(UserError, match=r"cannot be read as a Parquet file|is a Parquet file in a compressed"):
        whole_of([path], "parquet")
    with pytest.raises(UserError, match="format='csv' must be one of auto, text, jsonl, json, parquet"):
        whole_of([path], "csv")


def whole_of(paths: list[Path], format: str) -> list[str]:
    return [piece.text for piece in iter_documents(paths, format=format)]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.txt.gz", "a.jsonl.zst"])
def test_byte_order_marks(name: str, piece_size: int, tmp_path: Path) -> None:
    text = "one \ufeff" if "txt" in name else '{"text": "one \ufeff"}'
    assert whole([write(tmp_path / name, text.encode("utf-8-sig"))]) == ["one \ufeff"]
    for encoding in ("utf-16", "utf-16-be", "utf-32"):
        mark = "\ufeff" if encoding.endswith("be") else ""
        path = write(tmp_path / name, (mark + text).encode(encoding))
        with pytest.raises(
            UserError, match=rf"is {encoding[:6].upper()}, by its first bytes: convert it with iconv -f"
        ) as error:
            whole([path])
        assert "\n" not in str(error.value)


def test_hidden_files_and_what_is_no_text_are_left_out_and_counted(tmp_path: Path, caplog) -> None:
    folder = tmp_path / ".books"  # named by the user
    for name in (".git/x.txt", ".git/y.txt", ".hidden.txt", "sub/.z.jsonl", "notes.md", "image.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("no")
    (folder / "a.txt").write_text("yes")
    (folder / "settings.json").write_text('{\n "a": 1\n}\n')
    (folder / "vocabulary.json").write_text('{"text_": 1}')
    (folder / "names.json").write_text('["a"]')
    (folder / "broken.txt").symlink_to("nowhere")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "self").symlink_to(".", target_is_directory=True)
    os.mkfifo(folder / "fifo.txt")
    assert [source.name for source in find_sources([folder])] == [".books/a.txt"]
    (said,) = caplog.messages
    assert "skipped 3 hidden files or folders; 6 other files or links (suffixes .md, .png); 3 .json" in said
    assert whole([folder / ".hidden.txt"]) == ["no"]  # named by the user


def test_a_folder_of_a_told_format(tmp_path: Path) -> None:
    for name in ("a.py", "b", "c.json", ".d"):
        (tmp_path / name).write_text(name)
    assert whole_of([tmp_path], "text") == ["a.py", "b", "c.json"]


def test_what_is_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    for path, message in (
        (tmp_path / "a.txt", "is a FIFO, not a file or a folder"),
        (Path("/dev/null"), "is a device, not a file"),
        (tmp_path / "loop.txt", "Too many levels of symbolic links"),
        (tmp_path / "none.txt", "does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            find_sources([path])


def test_names_are_printable(tmp_path: Path) -> None:
    for name in (b"a\nb\x1b[31m.txt", b"\xff.jsonl"):
        (tmp_path / os.fsdecode(name)).write_bytes(b"\xff")
    names = [source.name.split("/")[1] for source in find_sources([tmp_path])]
    assert sorted(names) == ["\\udcff.jsonl", "a\\nb\\x1b[31m.txt"]
    for path in tmp_path.iterdir():
        with pytest.raises(UserError) as error:
            whole([path])
        assert str(error.value).isprintable()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_a_file_that_changes_while_it_is_read(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "PIECE_SIZE", 4)
    path = write_jsonl(tmp_path / name, ["one", "two"])
    pieces = iter_documents([path])
    next(pieces)
    with path.open("ab") as file:
        file.write(b'{"text": "three"}\n')
    with pytest.raises(UserError, match="changed while it was read"):
        list(pieces)


BAD_LINES = [
    b'{"text": "a"}',
    b'{"text": null}',
    b'{"text": "\xff"}',
    b"nonsense",
    b'{"body": 1}',
    b'{"text": "\\ud83d"}',
    b"[1]",
    b'{"text": "' + b"x" * 80 + b'"}',
    b'{"text": "b"}',
]


def read_with_skips(path: Path) -> tuple[list[str], sources.Skips]:
    skips = sources.Skips()
    texts, parts = [], []
    for piece in iter_documents([path], on_error=skips):
        parts.append(piece.text)
        if piece.ends_document:
            texts.append("".join(parts))
            parts = []
    assert not parts, "a document was left out in part"
    return texts, skips


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson.gz", "a.json.zst"])
def test_rows_that_cannot_be_read_are_left_out(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE", 64)
    path = write(tmp_path / name, b"\n".join(BAD_LINES))
    texts, skips = read_with_skips(path)
    assert texts == ["a", "b"]
    assert skips.count == 7 and len(skips.first) == 5
    places = ["line 2: the value", "byte 39", "line 4 is not JSON", "line 5 has no key", "line 6: 'text' has the lone"]
    assert all(place in said for place, said in zip(places, skips.first, strict=True))
    with pytest.raises(UserError, match="line 2: the value of 'text' is a NoneType"):
        whole([path])


def test_items_and_table_rows_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.json").write_text('[{"text": "a"}, 1, {"text": null}, {"text": "b"}]')
    parquet.write_table(pyarrow.table({"text": ["a", None, None, "b"]}), tmp_path / "b.parquet")
    for path in sorted(tmp_path.iterdir()):
        texts, skips = read_with_skips(path)
        assert (texts, skips.count) == (["a", "b"], 2)
    with pytest.raises(UserError, match="no column 'body'"):  # of no row: no document to leave out
        list(iter_documents([tmp_path / "b.parquet"], "body", on_error=sources.Skips()))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_with_a_bad_byte_is_left_out_whole(name: str, piece_size: int, tmp_path: Path) -> None:
    path = write(tmp_path / name, b"line\n" * 9 + b"\xff\n")
    texts, skips = read_with_skips(path)
    assert texts == [] and skips.count == 1 and "byte 45" in skips.first[0]


def test_the_rest_of_a_damaged_archive_is_left_out(tmp_path: Path) -> None:
    rows = [os.urandom(1000).hex() for _ in range(50)]
    path = write_jsonl(tmp_path / "a.jsonl.gz", rows)
    path.write_bytes(path.read_bytes()[:20_000])
    texts, skips = read_with_skips(path)
    assert 0 < len(texts) < 50 and texts == rows[: len(texts)]
    assert skips.count == 1 and "not a gzip file" in skips.first[0]
