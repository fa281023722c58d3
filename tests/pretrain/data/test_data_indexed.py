import json
import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from fmoe.errors import UserError
from pretrain.data import indexed
from pretrain.data.indexed import IndexedCorpus, IndexedWriter, corpus_paths, dtype_for_vocabulary

HEADER = 34  # bytes


def write(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.append(document)
            writer.end_document()
    return prefix


@pytest.fixture
def documents() -> list[list[int]]:
    choose = random.Random(0)
    return [[choose.randrange(65_536) for _ in range(choose.randrange(1, 40))] for _ in range(50)]


@pytest.fixture
def prefix(documents: list[list[int]], tmp_path: Path) -> Path:
    return write(tmp_path / "v1.5", documents)


@pytest.fixture
def megatron():
    return pytest.importorskip("megatron.core.datasets.indexed_dataset")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_what_was_written_is_read(dtype: type, tmp_path: Path) -> None:
    documents = [[1, 2, 3], [], [np.iinfo(dtype).max], [0] * 1000]
    corpus = IndexedCorpus(write(tmp_path / "a", documents, dtype))
    assert (corpus.num_documents, corpus.num_tokens, corpus.dtype) == (4, 1004, np.dtype(dtype))
    assert corpus.lengths.tolist() == [3, 0, 1, 1000]
    assert [corpus.document(i).tolist() for i in range(4)] == documents
    assert corpus.flat.tolist() == [token for document in documents for token in document]
    assert corpus.tokens(0, 1, 3).tolist() == [2, 3]
    assert corpus.tokens(1, 0, 0).tolist() == []
    assert corpus.description["documents"] == 4
    assert corpus.tokenizer_fingerprint is None
    corpus.verify()


def test_places_out_of_range(prefix: Path) -> None:
    corpus = IndexedCorpus(prefix)
    for i in (-1, 50):
        with pytest.raises(IndexError, match=f"document {i} is out of range: .* has 50"):
            corpus.document(i)
    length = len(corpus.document(7))
    for start, stop in ((-1, 1), (1, 0), (0, length + 1)):
        with pytest.raises(IndexError, match=rf"tokens\[{start}:{stop}\] of document 7"):
            corpus.tokens(7, start, stop)
    with pytest.raises(ValueError, match="read-only"):
        corpus.flat[0] = 1


def test_a_corpus_of_nothing(tmp_path: Path) -> None:
    corpus = IndexedCorpus(write(tmp_path / "a", []))
    assert (corpus.num_documents, corpus.num_tokens, len(corpus.flat)) == (0, 0, 0)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2, "uint16"), (65_536, "uint16"), (65_537, "int32")])
def test_dtype_for_vocabulary(vocab_size: int, dtype: str) -> None:
    assert dtype_for_vocabulary(vocab_size) == np.dtype(dtype)


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_megatron_reads_ours(chunk: int, documents, tmp_path: Path, megatron, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_CHUNK", chunk)
    theirs = megatron.IndexedDataset(str(write(tmp_path / "a", documents)))
    assert [theirs[i].tolist() for i in range(len(theirs))] == documents
    assert theirs.document_indices.tolist() == list(range(51))
    assert theirs.sequence_lengths.tolist() == [len(document) for document in documents]
    assert IndexedCorpus(tmp_path / "a").document(49).tolist() == documents[49]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_megatrons(dtype: type, documents: list[list[int]], tmp_path: Path, megatron) -> None:
    """Documents of several sequences, as its T5 and BERT data have, and an empty one."""
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=dtype)
    expected = []
    for start in range(0, 50, 5):
        parts = documents[start : start + 5]
        expected.append([token for part in parts for token in part])
        builder.add_document(expected[-1], [len(part) for part in parts])
    builder.add_document([], [])
    builder.finalize(str(tmp_path / "a.idx"))
    corpus = IndexedCorpus(tmp_path / "a")
    assert corpus.num_documents == 11
    assert [corpus.document(i).tolist() for i in range(11)] == [*expected, []]
    assert corpus.lengths.tolist() == [*map(len, expected), 0]
    assert corpus.sequence_lengths.tolist() == [len(document) for document in documents]
    assert corpus.document_boundaries.tolist() == [*range(0, 51, 5), 50]
    assert corpus.description == {}
    with pytest.raises(UserError, match="no checksum"):
        corpus.verify()


def test_the_same_bytes_as_megatron(documents: list[list[int]], prefix: Path, tmp_path: Path, megatron) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "a.idx"))
    ours, _, our_index = corpus_paths(prefix)
    assert ours.read_bytes() == (tmp_path / "a.bin").read_bytes()
    assert our_index.read_bytes() == (tmp_path / "a.idx").read_bytes()


def test_a_document_longer_than_a_sequence_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_LONGEST_SEQUENCE", 10)
    documents = [list(range(25)), list(range(10)), [], [1]]
    corpus = IndexedCorpus(write(tmp_path / "a", documents))
    assert corpus.sequence_lengths.tolist() == [10, 10, 5, 10, 0, 1]
    assert [corpus.document(i).tolist() for i in range(4)] == documents


def test_pieces_of_a_document_are_joined(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.append([1, 2])
        writer.append(np.array([3], dtype=np.int64))
        writer.append([])
        writer.end_document()
        writer.describe(tokenizer={"sha256": "abc"})
    corpus = IndexedCorpus(tmp_path / "a")
    assert corpus.document(0).tolist() == [1, 2, 3]
    assert corpus.tokenizer_fingerprint == "abc"


@pytest.mark.parametrize("tokens", [[65_536], [-1], [0.5], np.array([1, 70_000])], ids=str)
def test_tokens_that_do_not_fit_leave_no_files(tokens, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not fit uint16"), IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.append(tokens)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_writer_leaves_the_old_corpus(prefix: Path) -> None:
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}
    with pytest.raises(RuntimeError), IndexedWriter(prefix, np.int32) as writer:
        writer.append([1])
        raise RuntimeError
    with pytest.raises(ValueError, match=r"without end_document"), IndexedWriter(prefix, np.int32) as writer:
        writer.append([1])
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before
    with pytest.raises(ValueError, match="float32 must be one of uint8, int32, int64, uint16"):
        IndexedWriter(prefix, np.float32)


def test_missing_files_are_named(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(prefix.parent)  # a clone may have the corpus of `make train`
    with pytest.raises(UserError, match=r"no corpus at .*v1\.5\.idx: .* does not exist; pass the prefix"):
        IndexedCorpus(prefix.with_name("v1.5.idx"))
    corpus_paths(prefix)[0].unlink()
    with pytest.raises(UserError, match=r"no corpus at .*v1\.5: .*v1\.5\.bin does not exist$"):
        IndexedCorpus(prefix)
    text = prefix.with_name("a.txt")
    text.touch()
    for missing, command in (
        (text, f"fmoe data prepare {text} "),
        (prefix.with_name("none"), f"fmoe data prepare TEXT --tokenizer FILE --out {prefix.with_name('none')}"),
        ("data/pylib/out/train", "fmoe data example pylib"),
    ):
        with pytest.raises(UserError, match=re.escape(command)):
            IndexedCorpus(missing)


def damage(prefix: Path, place: int, data: bytes) -> None:
    """Writes into the index, without the description whose checksum would give it away."""
    _, json_path, idx_path = corpus_paths(prefix)
    json_path.unlink(missing_ok=True)
    content = bytearray(idx_path.read_bytes())
    content[place : place + len(data)] = data
    idx_path.write_bytes(content)


LENGTHS, POINTERS, BOUNDARIES = HEADER, HEADER + 4 * 50, HEADER + 12 * 50


@pytest.mark.parametrize(
    ("place", "data", "message"),
    [
        (0, b"XX", "is not an index"),
        (9, b"\x02", "version 2"),
        (17, b"\x06", "type code 6"),
        (17, b"\x00", "type code 0"),
        (17, b"\x03", "type code 3"),  # int16: as wide as uint16
        (17, b"\x04", "sequence 1 does not begin"),
        (18, struct.pack("<Q", 2**64 - 1), "18446744073709551615 sequences"),
        (18, struct.pack("<Q", 49), "49 sequences"),
        (26, struct.pack("<Q", 2**62), "boundaries take"),
        (18, struct.pack("<QQ", 52, 48), "does not begin|has the length"),  # fits the size of the file
        (18, struct.pack("<QQ", 0, 126), "boundaries do not go"),
        (LENGTHS, struct.pack("<i", -3), "sequence 0 has the length -3"),
        (LENGTHS + 8, struct.pack("<i", 2**31 - 1), "sequence 3 does not begin"),
        (LENGTHS + 4 * 49, struct.pack("<i", 2**31 - 1), r"\.bin has .* bytes"),
        (POINTERS, struct.pack("<q", 2), "sequence 0 does not begin"),
        (POINTERS + 8, struct.pack("<q", -(2**63)), "sequence 1 does not begin"),
        (BOUNDARIES, struct.pack("<q", 1), "do not go from 0"),
        (BOUNDARIES + 8, struct.pack("<q", -1), "not ascending"),
        (BOUNDARIES + 8, struct.pack("<qq", 2**63 - 1, -(2**63)), "not ascending"),
        (BOUNDARIES + 8 * 50, struct.pack("<q", 51), "do not go from 0 to 50"),
        (BOUNDARIES + 8 * 51, b"\0", "50 sequences"),
        (BOUNDARIES + 8 * 51, bytes(50), "multimodal"),
    ],
)
@pytest.mark.parametrize("chunk", [3, 1 << 20], ids=lambda size: f"chunks of {size}")
def test_damage_is_named(
    place: int, data: bytes, message: str, chunk: int, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "_CHUNK", chunk)
    damage(prefix, place, data)
    with pytest.raises(UserError, match=message) as caught:
        IndexedCorpus(prefix)
    assert "\n" not in str(caught.value)


def test_no_damaged_header_is_taken_for_a_corpus(prefix: Path) -> None:
    choose = random.Random(1)
    content = corpus_paths(prefix)[2].read_bytes()
    for _ in range(300):
        header = bytearray(content[:HEADER])
        for _ in range(choose.choice([1, 1, 2, 8])):
            header[choose.randrange(HEADER)] = choose.choice([0, 1, 0x7F, 0x80, 0xFF, choose.randrange(256)])
        if header == content[:HEADER]:
            continue
        damage(prefix, 0, bytes(header))
        with pytest.raises(UserError):
            IndexedCorpus(prefix)


def test_no_damaged_index_is_taken_for_a_corpus(prefix: Path) -> None:
    """Anywhere in the index: the checksum catches what is still a consistent index, such as a moved boundary."""
    choose = random.Random(2)
    idx_path = corpus_paths(prefix)[2]
    content = idx_path.read_bytes()
    for _ in range(300):
        damaged = bytearray(content)
        damaged[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        idx_path.write_bytes(damaged[: choose.choice([len(content), choose.randrange(len(content))])])
        with pytest.raises(UserError):
            IndexedCorpus(prefix)
    idx_path.write_bytes(content)
    IndexedCorpus(prefix)


def test_a_thousand_indices_without_a_checksum(prefix: Path) -> None:
    """Megatron's own have none: what is read of a damaged one is an error, or tokens that are in the file."""
    choose, refused = random.Random(3), 0
    bin_path, json_path, idx_path = corpus_paths(prefix)
    json_path.unlink()
    content, tokens = idx_path.read_bytes(), np.fromfile(bin_path, "<u2")
    for number in range(1000):
        damaged = bytearray(content)
        span = HEADER if number % 2 else len(content)
        for _ in range(choose.choice([1, 1, 2, 8])):
            damaged[choose.randrange(span)] = choose.choice([0, 1, 0x7F, 0x80, 0xFF, choose.randrange(256)])
        idx_path.write_bytes(damaged if number % 5 else damaged[: choose.randrange(len(content))])
        try:
            corpus = IndexedCorpus(prefix)
        except UserError:
            refused += 1
            continue
        read = [corpus.document(i) for i in range(corpus.num_documents)]
        assert np.array_equal(np.concatenate(read), tokens), f"index {number}"
    assert refused > 700


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"sha256": "a"}', b'{"sha256": {"idx": "a"}, "tokenizer": 3}'],
    ids=["empty", "cut", "list", "bytes", "deep", "string", "number"],
)
def test_a_bad_description_is_one_line(content: bytes, prefix: Path) -> None:
    corpus_paths(prefix)[1].write_bytes(content)
    with pytest.raises(UserError, match=r"v1\.5\.json is damaged"):
        IndexedCorpus(prefix)


def test_damaged_tokens_are_found_by_verify(prefix: Path) -> None:
    bin_path, json_path, _ = corpus_paths(prefix)
    data = bytearray(bin_path.read_bytes())
    data[100] ^= 1
    bin_path.write_bytes(data)
    assert json.loads(json_path.read_text())["dtype"] == "uint16"
    with pytest.raises(UserError, match=r"v1\.5\.bin differs from its SHA-256"):
        IndexedCorpus(prefix).verify()
    bin_path.write_bytes(data[:-2])
    with pytest.raises(UserError, match=r"v1\.5\.bin has \d+ bytes, but its index v1\.5\.idx describes"):
        IndexedCorpus(prefix)
