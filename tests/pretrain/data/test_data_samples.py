import math
import pickle
from pathlib import Path

import numpy as np
import pytest

from fmoe.errors import UserError
from pretrain.data.blend import Blend
from pretrain.data.counting import count_tokens, unigram_entropy
from pretrain.data.indexed import IndexedCorpus, IndexedWriter
from pretrain.data.masking import Masking
from pretrain.data.packing import DocumentMask
from pretrain.data.samples import GPTSamples, Segments
from pretrain.data.spans import SpanCorruption, Spans


def corpora_of(folder: Path, lengths: list[list[int]]) -> list[IndexedCorpus]:
    """Corpora in which no token occurs twice: token t is the t-th of all."""
    corpora = []
    token = 0
    for number, documents in enumerate(lengths):
        with IndexedWriter(folder / f"corpus{number}", np.int32) as writer:
            for length in documents:
                writer.append(np.arange(token, token + length))
                writer.end_document()
                token += length
        corpora.append(IndexedCorpus(folder / f"corpus{number}"))
    return corpora


@pytest.fixture
def corpora(tmp_path: Path) -> list[IndexedCorpus]:
    lengths = np.random.default_rng(0).integers(1, 40, size=60).tolist()
    return corpora_of(tmp_path, [lengths[:20], [0, *lengths[20:50], 0, 0], lengths[50:], [300]])


def epoch_of(samples: GPTSamples, number: int) -> np.ndarray:
    """All samples of an epoch, [samples_per_epoch, sequence_length + 1]."""
    first = number * samples.samples_per_epoch
    return np.stack([samples[n] for n in range(first, first + samples.samples_per_epoch)])


def stream_of(blocks: np.ndarray) -> np.ndarray:
    """The blocks joined where one's last token is another's first, which shows that they overlap by that one."""
    by_first = {int(block[0]): block for block in blocks}
    assert len(by_first) == len(blocks)
    (first,) = set(by_first) - {int(block[-1]) for block in blocks}
    parts = [by_first[first][:1]]
    while (block := by_first.get(int(parts[-1][-1]))) is not None:
        parts.append(block[1:])
    return np.concatenate(parts)


@pytest.mark.parametrize("sequence_length", [1, 2, 7, 64, 500])
@pytest.mark.parametrize("number", [0, 3])
def test_an_epoch_predicts_every_token_once(sequence_length: int, number: int, corpora: list[IndexedCorpus]) -> None:
    samples = GPTSamples(corpora, sequence_length, seed=1)
    total = sum(corpus.num_tokens for corpus in corpora)
    assert samples.samples_per_epoch == (total - 1) // sequence_length
    blocks = epoch_of(samples, number)
    assert blocks.dtype == np.int64
    assert blocks.shape == (samples.samples_per_epoch, sequence_length + 1)
    targets = blocks[:, 1:].ravel()
    assert len(set(targets.tolist())) == len(targets)  # none twice
    assert total - 1 - len(targets) < sequence_length  # none missed but the first of all and the tail

    # The stream is whole documents in a row, all but the last.
    stream = stream_of(blocks)
    assert len(stream) == len(targets) + 1
    lengths = {int(corpus.document(i)[0]): len(corpus.document(i)) for corpus in corpora for i in nonempty(corpus)}
    place = 0
    while place < len(stream):
        length = min(lengths[int(stream[place])], len(stream) - place)
        assert stream[place : place + length].tolist() == list(range(stream[place], stream[place] + length))
        place += length


def nonempty(corpus: IndexedCorpus) -> list[int]:
    return np.flatnonzero(corpus.lengths).tolist()


def test_a_sample_depends_on_its_number_alone(corpora: list[IndexedCorpus]) -> None:
    samples = GPTSamples(corpora, 16, seed=1)
    count = 3 * samples.samples_per_epoch
    in_order = [samples[n].tolist() for n in range(count)]
    for n in np.random.default_rng(0).permutation(count)[:100].tolist():
        assert samples[n].tolist() == in_order[n]
    resumed = GPTSamples(corpora, 16, seed=1)
    assert [resumed[n].tolist() for n in range(count - 5, count)] == in_order[-5:]


def test_epochs_and_seeds_differ(corpora: list[IndexedCorpus]) -> None:
    samples = GPTSamples(corpora, 16, seed=1)
    first = epoch_of(samples, 0)
    second = epoch_of(samples, 1)
    other = epoch_of(GPTSamples(corpora, 16, seed=2), 0)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert stream_of(first).tolist() != stream_of(second).tolist()  # the documents, not the blocks alone
    in_order = stream_of(first).reshape(-1)[:-1].reshape(-1, 16)
    assert not np.array_equal(first[:, :-1], in_order)  # and the blocks, not the documents alone
    assert {int(row[0]) for row in first} != {int(row[0]) for row in second}


def test_the_order_is_the_same_on_every_machine(tmp_path: Path) -> None:
    """Pinned: it must outlive releases of numpy and ours, or no run could be resumed."""
    samples = GPTSamples(corpora_of(tmp_path, [[3, 4], [5]]), 3, seed=7)
    assert [samples[n].tolist() for n in (0, 1, 2, 3, 10**12)] == [
        [6, 7, 8, 9],
        [9, 10, 11, 0],
        [3, 4, 5, 6],
        [6, 7, 8, 9],
        [10, 11, 3, 4],
    ]


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_ends_of_the_seeds(seed: int, corpora: list[IndexedCorpus]) -> None:
    assert len(GPTSamples(corpora, 16, seed)[10**15]) == 17


def test_wrong_values_are_named(tmp_path: Path) -> None:
    corpora = corpora_of(tmp_path, [[3, 4], [1]])
    assert GPTSamples(corpora, 7, seed=0).samples_per_epoch == 1
    with pytest.raises(UserError, match=r"a sample takes 9 tokens, but there are only 8 in .*0, .*1: .*_length"):
        GPTSamples(corpora, 8, seed=0)
    with pytest.raises(UserError, match="sequence_length=0 must be at least 1"):
        GPTSamples(corpora, 0, seed=0)
    for seed in (-1, 2**64):
        with pytest.raises(UserError, match=f"seed={seed} must be"):
            GPTSamples(corpora, 3, seed)
    with pytest.raises(UserError, match=r"4 streams of sequence_length=2 need 9 tokens"):
        GPTSamples(corpora, 2, seed=0, streams=4)
    with pytest.raises(UserError, match="no corpus"):
        GPTSamples([], 3, seed=0)
    with pytest.raises(IndexError, match="sample -1 is negative"):
        GPTSamples(corpora, 3, seed=0)[-1]


def test_unigram_entropy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.data.counting._CHUNK", 3)
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.append([0, 0, 0, 0, 1, 1, 5, 9])
        writer.end_document()
    corpus = IndexedCorpus(tmp_path / "a")
    expected = 0.5 * math.log(2) + 0.25 * math.log(4) + 2 * 0.125 * math.log(8)
    assert unigram_entropy([corpus], 10) == pytest.approx(expected, rel=1e-12)
    assert unigram_entropy([corpus, corpus], 100) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(UserError, match=r"has the token id 9, outside model.vocab_size=9"):
        unigram_entropy([corpus], 9)
    with pytest.raises(UserError, match="no tokens"):
        unigram_entropy([], 9)


def test_a_negative_token_is_named(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.int32) as writer:
        writer.append([3, -2])
        writer.end_document()
    with pytest.raises(UserError, match=r"has the token id -2, outside model.vocab_size=9"):
        unigram_entropy([IndexedCorpus(tmp_path / "a")], 9)


@pytest.mark.parametrize("number", [0, 2])
def test_streams_are_contiguous_and_read_side_by_side(number: int, corpora: list[IndexedCorpus]) -> None:
    streams = 7
    length = 16
    blocks = GPTSamples(corpora, length, seed=1, streams=streams)
    total = sum(corpus.num_tokens for corpus in corpora)
    assert blocks.samples_per_epoch == (total - 1) // length // streams * streams
    epoch = epoch_of(blocks, number)
    whole = stream_of(epoch)  # one after the other
    each = (len(whole) - 1) // streams
    for stream in range(streams):
        read = np.concatenate([epoch[stream][:1], *epoch[stream::streams, 1:]])
        assert read.tolist() == whole[stream * each : (stream + 1) * each + 1].tolist()
    segments = Segments(blocks)
    first = number * blocks.samples_per_epoch
    starts = [int(segments[first + n]["starts"][0]) for n in range(blocks.samples_per_epoch)]
    assert starts == [1] * streams + [0] * (blocks.samples_per_epoch - streams)
    sample = segments[first + 9]
    assert [sample["tokens"][0], *sample["labels"]] == epoch[9].tolist()


def test_pickled_samples_are_the_same_and_hold_no_tokens(tmp_path: Path) -> None:
    corpora = corpora_of(tmp_path, [[3] * 20_000, [70_000]])
    blocks = GPTSamples(corpora, 30, seed=1)
    spans = Spans.of(30)
    text = np.arange(10, 20)
    kinds = [
        blocks,
        Segments(GPTSamples(corpora, 30, seed=1, streams=4)),
        Blend([GPTSamples([corpus], 30, seed=1) for corpus in corpora], [2, 1]),
        DocumentMask(blocks, end=2),
        Masking(blocks, 32, 0.15, cls=4, sep=5, mask=6, end=2, text=text, seed=1),
        SpanCorruption(GPTSamples(corpora, spans.block, seed=1), spans, tuple(range(100, 130)), 2, 0, 1),
    ]
    for samples in kinds:
        expected = samples[7]  # draws an epoch
        data = pickle.dumps(samples)
        assert len(data) < 4096, type(samples)
        found = pickle.loads(data)  # noqa: S301
        assert found.samples_per_epoch == samples.samples_per_epoch
        np.testing.assert_equal(found[7], expected)


def test_a_pickled_corpus_keeps_counts_that_are_not_stored(corpora: list[IndexedCorpus]) -> None:
    corpus = corpora[0]
    corpus.counts = count_tokens(corpus.flat)
    corpus._has_kept_counts = False
    Path(f"{corpus.prefix}.json").unlink()
    found = pickle.loads(pickle.dumps(corpus))  # noqa: S301
    assert found.counts.largest == corpus.counts.largest
    assert found.flat.tolist() == corpus.flat.tolist()
