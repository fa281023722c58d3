import json
import os
from pathlib import Path

import numpy as np
import pytest

from fmoe.errors import UserError
from pretrain.data import documents, sources
from pretrain.data import prepare as module
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.prepare import prepare
from pretrain.data.tokenizers import Tokenizer, train_tokenizer


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_corpus_holds_the_documents(texts: list[str], jsonl: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    done = prepare([jsonl], tokenizer.path, tmp_path / "out" / "train", num_workers=1)
    corpus = IndexedCorpus(tmp_path / "out" / "train")
    kept = [text for text in texts if text]
    assert corpus.dtype == np.uint16
    assert [corpus.document(i).tolist() for i in range(corpus.num_documents)] == [
        [*tokenizer.encode(text), tokenizer.end_of_document] for text in kept
    ]
    assert (done.documents, done.tokens) == (len(kept), corpus.num_tokens)
    assert done.text_bytes == sum(len(text.encode()) for text in kept)
    assert done.empty_documents == len(texts) - len(kept)
    assert sorted(path.name for path in done.paths) == ["train.bin", "train.idx", "train.json"]
    assert sorted(files(tmp_path / "out")) == ["train.bin", "train.idx", "train.json"]
    assert corpus.tokenizer_fingerprint == tokenizer.fingerprint
    assert corpus.description["sources"] == ["text.jsonl"]
    assert str(tmp_path.parent) not in json.dumps(corpus.description)


def test_any_number_of_workers_gives_the_same_files(
    jsonl: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 5_000)  # more batches than are in flight
    for num_workers in (1, 2):
        prepare([jsonl], tokenizer.path, tmp_path / str(num_workers) / "a", num_workers=num_workers)
    assert files(tmp_path / "1") == files(tmp_path / "2")


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_the_size_of_pieces_and_batches_changes_nothing(
    size: int, texts: list[str], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines stay whole at these sizes but for 1, where only characters are whole: then the text is what stays."""
    text = "".join(texts[:3])[-5000:] + texts[-1]
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    prepare([tmp_path / "a.txt"], tokenizer.path, tmp_path / "expected", num_workers=1)
    monkeypatch.setattr(sources, "PIECE_SIZE", max(size, 200) if size > 1 else 1)
    monkeypatch.setattr(module, "_BATCH_BYTES", size)
    prepare([tmp_path / "a.txt"], tokenizer.path, tmp_path / "pieces", num_workers=1)
    expected, pieces = (IndexedCorpus(tmp_path / name) for name in ("expected", "pieces"))
    assert pieces.num_documents == 1
    if size > 1:
        assert pieces.flat.tolist() == expected.flat.tolist()
    assert tokenizer.decode(pieces.flat) == tokenizer.decode(expected.flat) == text


def test_empty_documents_are_left_out_and_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": " "}\n{"text": ""}\n')
    (tmp_path / "b.txt").touch()
    done = prepare([tmp_path / "a.jsonl", tmp_path / "b.txt"], tokenizer.path, tmp_path / "out", num_workers=1)
    assert (done.documents, done.empty_documents) == (1, 3)
    assert IndexedCorpus(tmp_path / "out").document(0).tolist() == [*tokenizer.encode(" "), tokenizer.end_of_document]


def test_a_large_vocabulary_takes_int32(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "dtype_for_vocabulary", lambda size: np.dtype(np.int32))
    (tmp_path / "a.txt").write_text("text")
    prepare([tmp_path / "a.txt"], tokenizer.path, tmp_path / "out", num_workers=1)
    assert IndexedCorpus(tmp_path / "out").dtype == np.int32


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"text": "good"}\n' * 5 + "bad\n", {}, r"a\.jsonl, line 6 is not JSON"),
        ('{"text": ""}\n', {}, r"no document with text in 'a\.jsonl' \(1 empty documents\)"),
        ("", {}, r"no document with text in 'a\.jsonl'"),
        ('{"text": "good"}\n', {"num_workers": 0}, "num_workers=0 must be at least 1"),
        ('{"text": "good"}\n', {"text_key": "body"}, "no key 'body'"),
    ],
    ids=["bad line", "empty document", "empty file", "workers", "key"],
)
def test_wrong_inputs_leave_no_files(
    content: str, options: dict, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        prepare([tmp_path / "a.jsonl"], tokenizer.path, tmp_path / "out", **{"num_workers": 1, **options})
    assert sorted(files(tmp_path)) == ["a.jsonl"]


def test_a_dead_worker_is_one_line_and_leaves_no_files(
    jsonl: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer is gone when the worker starts."""
    model = tmp_path / "tokenizer.model"
    model.write_bytes(tokenizer.path.read_bytes())

    def remove_model(*arguments, **options):
        model.unlink()
        return documents.open_sources(*arguments, **options)

    monkeypatch.setattr(module, "open_sources", remove_model)
    with pytest.raises(UserError, match=r"num_workers=2 tokenizing processes died"):
        prepare([jsonl], model, tmp_path / "out", num_workers=2)
    assert list(tmp_path.iterdir()) == []


def test_progress_goes_to_stderr_as_lines(
    jsonl: Path, tokenizer: Tokenizer, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.data.progress._SECONDS_BETWEEN_LINES", 0.0)
    prepare([jsonl], tokenizer.path, tmp_path / "out", num_workers=1, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("tokenizing: ")
    prepare([jsonl], tokenizer.path, tmp_path / "out", num_workers=1)
    assert capfd.readouterr() == ("", "")


def test_progress_on_a_terminal_is_a_bar(
    jsonl: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    prepare([jsonl], tokenizer.path, tmp_path / "out", num_workers=1, progress=True)
    assert IndexedCorpus(tmp_path / "out").num_documents


def test_documents_that_cannot_be_read_are_left_out_when_asked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": null}\n{"text": "\xff"}\n{"text": "b"}\n')
    (tmp_path / "b.txt").write_bytes(b"good\n\xff")
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: the value of 'text' is a NoneType"):
        prepare([tmp_path], tokenizer.path, tmp_path / "out" / "a", num_workers=1)
    for workers in (1, 2):
        prefix = tmp_path / "out" / str(workers)
        done = prepare([tmp_path], tokenizer.path, prefix, num_workers=workers, skip_errors=True)
        assert (done.documents, done.skipped) == (2, 3)
        corpus = IndexedCorpus(prefix)
        assert [tokenizer.decode(corpus.document(i)) for i in range(2)] == ["a", "b"]
        assert corpus.description["skipped_documents"] == 3
        assert corpus.description["first_skipped"] == list(done.first_skipped)
        name = tmp_path.name
        assert [said.split(":")[0].split(" is ")[0] for said in done.first_skipped] == [
            f"{name}/a.jsonl, line 2",
            f"{name}/a.jsonl",
            f"{name}/b.txt",
        ]
        assert str(tmp_path) not in json.dumps(corpus.description)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(UserError, match=r"no document with text.*; 1 unreadable documents, the first: .*b\.txt is not"):
        prepare([tmp_path / "b.txt"], tokenizer.path, tmp_path / "out" / "none", num_workers=1, skip_errors=True)


def test_an_output_that_is_read_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The tokenizer, a file named or in a folder, or of a saved dataset, under its own name or a link's."""
    model = tmp_path / "a.json"
    train_tokenizer([], model, model_type="bytes")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.json").write_text('[{"text": "a"}]')
    (tmp_path / "c.json").symlink_to(tmp_path / "text" / "b.json")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    for inputs, out in (("text", "a"), ("text", "text/b"), ("text/b.json", "text/b"), ("text", "c")):
        with pytest.raises(UserError, match=r"\.json is an input and would be overwritten"):
            prepare([tmp_path / inputs], model, tmp_path / out, num_workers=1)
    with pytest.raises(UserError, match=r"b\.json is an input and would be overwritten"):
        train_tokenizer([tmp_path / "text"], tmp_path / "text" / "b.json", 300, sentinels=0)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before
    assert not list(tmp_path.rglob("*.bin"))


def test_a_name_that_is_not_utf8_is_recorded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.txt")
    path.write_text("text")
    prepare([path], tokenizer.path, tmp_path / "out", num_workers=1)
    assert IndexedCorpus(tmp_path / "out").description["sources"] == ["\\udcff.txt"]
