"""Documents of bytes, which need not be UTF-8, and tokens of single bytes."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from fmoe.errors import UserError
from pretrain.data import sources
from pretrain.data.cli import main
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.prepare import prepare
from pretrain.data.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
from pretrain.inference.windows import Text

EVERY_BYTE = bytes(range(256)) * 3 + b"\xef\xbb\xbf\xff\xfe\x00\r\n"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer([], tmp_path_factory.mktemp("bytes") / "bytes.json", model_type="bytes", sentinels=2)


def test_the_id_of_each_byte(single: Tokenizer, texts: list[str]) -> None:
    """The reference is the tokenizer's own encoding of text."""
    ids = single.byte_ids
    assert sorted(ids) == sorted({*range(single.vocab_size)} - single.special_ids)
    for text in (*texts, "".join(map(chr, [*range(0x800), 0xFFFF, *range(0x10000, 0x110000, 0x1000)]))):
        assert single.encode_bytes(text.encode()).tolist() == single.encode(text)
    assert np.all(single.byte_lengths[ids] == 1)


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
@pytest.mark.parametrize("name", ["a.bin", "a", "a.txt.gz", "a.parquet"])
def test_a_file_is_one_document(name: str, size: int, single: Tokenizer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "PIECE_SIZE", size)
    data = gzip.compress(EVERY_BYTE) if name.endswith(".gz") else EVERY_BYTE
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    (tmp_path / "in" / "empty").touch()
    done = prepare([tmp_path / "in"], single.path, tmp_path / "out", num_workers=1, format="bytes")
    corpus = IndexedCorpus(tmp_path / "out")
    assert (done.documents, done.empty_documents, done.text_bytes) == (1, 1, len(EVERY_BYTE))
    tokens = corpus.document(0)
    assert tokens[-1] == single.end_of_document
    byte_of = {int(i): byte for byte, i in enumerate(single.byte_ids)}
    assert bytes(byte_of[int(i)] for i in tokens[:-1]) == EVERY_BYTE


def test_bytes_of_text_give_the_corpus_of_the_text(single: Tokenizer, texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(texts), encoding="utf-8", newline="")
    for format in ("text", "bytes"):
        prepare([tmp_path / "a.txt"], single.path, tmp_path / format, num_workers=1, format=format)
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"text{suffix}").read_bytes() == (tmp_path / f"bytes{suffix}").read_bytes()


def test_a_damaged_archive_is_left_out_whole(single: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(np.random.default_rng(0).bytes(5000))[:2000])
    (tmp_path / "b").write_bytes(b"\xff")
    paths = [tmp_path / "a.gz", tmp_path / "b"]
    with pytest.raises(UserError, match=r"a\.gz is truncated, damaged or not a gzip file"):
        prepare(paths, single.path, tmp_path / "out", num_workers=1, format="bytes")
    done = prepare(paths, single.path, tmp_path / "out", num_workers=1, format="bytes", skip_errors=True)
    assert (done.documents, done.tokens, done.skipped) == (1, 2, 1)


def test_evaluation_reads_bytes(single: Tokenizer, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(EVERY_BYTE)
    found = np.concatenate(list(Text([tmp_path / "a"], single, 265, format="bytes").tokens()))
    assert found.tolist() == [*single.encode_bytes(EVERY_BYTE), single.end_of_document]
    with pytest.raises(UserError, match=r"--data: .*tokenizer\.model does not have one token per byte"):
        Text([tmp_path / "a"], tokenizer, 512, format="bytes")


def test_other_tokenizers_are_refused(tokenizer: Tokenizer, jsonl: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(EVERY_BYTE)
    trained = train_tokenizer([jsonl], tmp_path / "bpe.json", 512)
    for other in (tokenizer, trained):
        with pytest.raises(UserError, match=f"{other.path.name} does not have one token per byte"):
            main(
                [
                    *("prepare", str(tmp_path / "a"), "--format", "bytes"),
                    *("--tokenizer", str(other.path), "--out", str(tmp_path / "out")),
                ]
            )
    with pytest.raises(UserError, match="format='bytes' is not text"):
        train_tokenizer([tmp_path / "a"], tmp_path / "b.model", format="bytes")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "bpe.json"]
    assert load_tokenizer(trained.path).vocab_size == 512
