"""Token counts: made while a corpus is written, or once; opening a run's inputs reads no token."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from forks import Raised, values

from fmoe.errors import UserError
from pretrain.config import load_recipe
from pretrain.data import counts
from pretrain.data.cli import main
from pretrain.data.counting import count_tokens, unigram_entropy
from pretrain.data.indexed import _HEADER, _MAGIC, IndexedCorpus, IndexedWriter, corpus_paths
from pretrain.data.inputs import open_inputs
from pretrain.tracking import read_metrics


def write(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.append(document)
            writer.end_document()
    return prefix


def forget(prefix: Path) -> None:
    """Leaves the corpus as one that was prepared before counts were kept."""
    json_path = corpus_paths(prefix)[1]
    description = json.loads(json_path.read_text())
    del description["counts"]
    json_path.write_text(json.dumps(description))


class NoRead(np.ndarray):
    """Tokens that nobody may look at."""

    def __array_ufunc__(self, *args, **kwargs):
        raise AssertionError("the tokens were read")

    def __array_function__(self, *args, **kwargs):
        raise AssertionError("the tokens were read")


@pytest.mark.parametrize("pending", [1, 5, 1 << 20])
def test_the_writer_counts(pending: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "_PENDING", pending)
    corpus = IndexedCorpus(write(tmp_path / "a", [[5, 1, 1], [], [65_535, 1], [0] * 7]))
    assert (corpus.counts.least, corpus.counts.largest) == (0, 65_535)
    assert corpus.counts.unigrams.tolist() == np.bincount(corpus.flat).tolist()
    assert "counts" not in corpus.description
    assert json.loads((tmp_path / "a.json").read_text())["counts"]["largest"] == 65_535
    assert IndexedCorpus(write(tmp_path / "none", [])).counts.unigrams.tolist() == []


@pytest.mark.parametrize("token", [-2, 1 << 24, np.iinfo(np.int64).max])
def test_an_id_that_no_vocabulary_has(token: int, tmp_path: Path) -> None:
    corpus = IndexedCorpus(write(tmp_path / "a", [[3, token, 7]], np.int64))
    assert corpus.counts.unigrams is None
    with pytest.raises(UserError, match=f"has the token id {token}, outside model.vocab_size=9"):
        unigram_entropy([corpus], 9)


def test_entropy_from_counts_reads_no_token(tmp_path: Path) -> None:
    corpus = IndexedCorpus(write(tmp_path / "a", [[0, 0, 0, 1], [4]]))
    expected = unigram_entropy([corpus], 5)
    corpus.flat = corpus.flat.view(NoRead)
    assert unigram_entropy([corpus], 5) == expected > 0
    corpus.counts = None
    with pytest.raises(AssertionError, match="tokens were read"):
        unigram_entropy([corpus], 5)


def huge_corpus(prefix: Path, tokens: int) -> None:
    """A sparse .bin of zeros, and index and description as `fmoe data prepare` would write them."""
    write(prefix, [[0]])
    bin_path, json_path, idx_path = corpus_paths(prefix)
    longest = 2**31 - 1
    lengths = np.array([longest] * (tokens // longest) + [tokens % longest], dtype=np.int64)
    pointers = 2 * (np.cumsum(lengths) - lengths)
    boundaries = np.arange(len(lengths) + 1)
    header = _HEADER.pack(_MAGIC, 1, 8, len(lengths), len(boundaries))
    parts = (lengths.astype("<i4"), pointers.astype("<i8"), boundaries.astype("<i8"))
    idx_path.write_bytes(header + b"".join(part.tobytes() for part in parts))
    os.truncate(bin_path, 2 * tokens)
    import hashlib

    description = json.loads(json_path.read_text())
    description |= {"tokens": tokens, "counts": description["counts"] | {"unigrams": [tokens]}}
    description["sha256"]["idx"] = hashlib.sha256(idx_path.read_bytes()).hexdigest()
    json_path.write_text(json.dumps(description))


def test_inputs_open_without_reading_tokens(recipe_file, tmp_path: Path) -> None:
    """100 GB: to read it takes minutes."""
    huge_corpus(tmp_path / "huge", 50 * 10**9)
    recipe = load_recipe(str(recipe_file(data={"train": (str(tmp_path / "huge"),)})), [])
    begin = time.process_time()
    inputs = open_inputs(recipe)
    assert time.process_time() - begin < 5
    assert inputs.unigram_entropy == 0.0
    assert inputs.train.samples_per_epoch == (50 * 10**9 - 1) // 16


def test_a_run_with_a_corpus_of_large_ids_is_refused_before_it_starts(recipe_file, tmp_path: Path) -> None:
    recipe = load_recipe(str(recipe_file(data={"train": (str(write(tmp_path / "a", [[0] * 99, [384]])),)})), [])
    with pytest.raises(UserError, match=r"data.train: .*a has the token id 384, outside model.vocab_size=384"):
        open_inputs(recipe)


def test_tokens_that_are_newer_than_their_counts_are_not_trusted(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3]])
    bin_path, json_path, _ = corpus_paths(prefix)
    bin_path.write_bytes(np.array([9, 9, 9], dtype=np.uint16).tobytes())
    later = json_path.stat().st_mtime_ns + 1_000_000_000
    os.utime(bin_path, ns=(later, later))
    corpus = IndexedCorpus(prefix)
    assert corpus.counts is None
    counts.keep(prefix, bin_path, count_tokens(corpus.flat))
    assert IndexedCorpus(prefix).counts.unigrams.tolist() == [0] * 9 + [3]
    os.utime(bin_path, ns=(later + 1, later + 1))  # replaced again
    assert IndexedCorpus(prefix).counts is None


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({"unigrams": [0, 1, 1, 2]}, True),
        ({"unigrams": [0, -1, 2, 2]}, True),
        ({"unigrams": "many"}, True),
        ({"unigrams": [2**63 - 1, 2**63 - 1, 2, 3]}, True),  # their sum is 3 in int64
        ({"unigrams": ["0", "1", "1", "1"]}, True),
        ({"unigrams": [[0], [1], [1], [1]]}, True),
        ({"least": 1}, True),
        ({"largest": 1 << 24}, True),
        ({"version": 2}, False),
    ],
    ids=str,
)
def test_counts_that_do_not_fit_the_corpus(change: dict, is_refused: bool, tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3]])
    json_path = corpus_paths(prefix)[1]
    description = json.loads(json_path.read_text())
    description["counts"] |= change
    json_path.write_text(json.dumps(description))
    if is_refused:
        with pytest.raises(UserError, match=r"a\.json is damaged"):
            IndexedCorpus(prefix)
    else:
        assert IndexedCorpus(prefix).counts is None


def test_a_damaged_memory_of_counts_is_no_reason_to_stop(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3]])
    forget(prefix)
    for content in (b"", b"{", b"[]", b"\xff", b'{"bin": 1}'):
        counts.counts_path(prefix).write_bytes(content)
        assert IndexedCorpus(prefix).counts is None
        reason = counts.keep(prefix, corpus_paths(prefix)[0], count_tokens(IndexedCorpus(prefix).flat))
        is_other = f"{counts.counts_path(prefix)} exists and is not a file of counts"
        assert reason == (None if content == b'{"bin": 1}' else is_other)
    assert IndexedCorpus(prefix).counts is not None
    write(prefix, [[1], [1]])  # as large as before
    forget(prefix)
    assert IndexedCorpus(prefix).counts is None


def test_counts_that_cannot_be_kept(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 3]])
    corpus, bin_path = IndexedCorpus(prefix), corpus_paths(prefix)[0]
    counts.counts_path(prefix).mkdir()
    before = sorted(tmp_path.iterdir())
    assert counts.keep(prefix, bin_path, corpus.counts)
    assert sorted(tmp_path.iterdir()) == before


def counted(prefixes: list[Path], vocab_size: int, share: int):
    """On each rank: counts and entropy of corpora without counts, ``share`` tokens a rank at a time."""
    from pretrain.data import counting, inputs

    counting._TOKENS_PER_ROUND = share
    opened = inputs.Inputs(None, None, tuple(map(IndexedCorpus, prefixes)), None)
    assert any(corpus.counts is None for corpus in opened.corpora)
    found = inputs.with_counts(opened, vocab_size)
    return [corpus.counts.unigrams.tolist() for corpus in found.corpora], found.unigram_entropy


@pytest.mark.parametrize("share", [1, 3, 1 << 20])
def test_ranks_count_together_and_remember(share: int, two_ranks, tmp_path: Path) -> None:
    choose = np.random.default_rng(0)
    prefixes = [write(tmp_path / name, [choose.integers(0, 50, size=20).tolist()]) for name in "ab"]
    corpora = [IndexedCorpus(prefix) for prefix in prefixes]
    expected = [corpus.counts.unigrams.tolist() for corpus in corpora], unigram_entropy(corpora, 64)
    for prefix in prefixes:
        forget(prefix)
    assert values(two_ranks.run(counted, prefixes, 64, share)) == [expected] * 2
    assert [IndexedCorpus(prefix).counts.unigrams.tolist() for prefix in prefixes] == expected[0]


def test_a_large_id_without_counts_is_an_error_on_every_rank(two_ranks, tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1] * 10, [70]])
    forget(prefix)
    for result in two_ranks.run(counted, [prefix], 64, 6):
        assert isinstance(result, Raised) and "the token id 70, outside model.vocab_size=64" in result.trace
    assert not counts.counts_path(prefix).exists()


def test_show_prints_the_ids(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prefix = write(tmp_path / "a", [[1, 2, 2, 9]])
    main(["show", str(prefix)])
    assert "token ids: 3 distinct, the largest is 9" in capsys.readouterr().out


def test_a_run_counts_a_corpus_once(forks, recipe_file, tiny_corpus, tmp_path: Path) -> None:
    """One from before counts were kept; validation has none either."""
    for prefix in (tiny_corpus.train, tiny_corpus.validation):
        for path in corpus_paths(prefix):
            shutil.copy2(path, tmp_path / path.name)
        forget(tmp_path / prefix.name)
    expected = unigram_entropy([IndexedCorpus(tiny_corpus.train)], 384)
    recipe = recipe_file(data={"train": (str(tmp_path / "train"),), "validation": (str(tmp_path / "validation"),)})
    for name in ("first", "second"):
        (end,) = forks.command("pretrain", recipe, "--run.folder", tmp_path / name)
        assert end.code == 0 and "counts" not in end.err, end.err
        row = read_metrics(tmp_path / name / "metrics.jsonl")[0]
        assert row["corpus/unigram_entropy"] == pytest.approx(expected, rel=1e-12)
        assert IndexedCorpus(tmp_path / "train").counts is not None
    assert json.loads(counts.counts_path(tmp_path / "train").read_text())["counts"]["version"] == 1
