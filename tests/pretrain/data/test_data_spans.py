"""Span corruption: lengths by the paper's rule, and nothing of the text is lost."""

from collections import Counter

import numpy as np
import pytest

from fmoe.errors import UserError
from pretrain.data.spans import SpanCorruption, Spans, corrupt

END = 3
START = 0
SENTINELS = tuple(range(1000, 1100))


class Text:
    """Sample n is the tokens from ``n * 100``, one more than a block."""

    samples_per_epoch = 7

    def __init__(self, length):
        self.length = length

    def __getitem__(self, n):
        return 2000 + np.arange(self.length + 1) + 100 * n


def restore(tokens, targets):
    """The text that a sample was made of: each sentinel of the inputs replaced by what the targets say of it."""
    assert tokens[-1] == targets[-1] == END
    spans = {}
    key = None
    for token in targets[:-1].tolist():
        if token in SENTINELS:
            key = token
            assert key not in spans
            spans[key] = []
        else:
            spans[key].append(token)
    assert list(spans) == list(SENTINELS[: len(spans)]), "sentinels are used in order"
    return [part for token in tokens[:-1].tolist() for part in spans.get(token, [token])]


def test_lengths_of_the_paper():
    """512 tokens into the encoder: 568 of text, 85 left out in 28 spans, 114 out of the decoder."""
    spans = Spans.of(512)
    assert spans == Spans(block=568, noise=85, count=28)
    assert (spans.inputs, spans.targets) == (512, 114)
    assert (Spans.of(1024).block, Spans.of(1024).targets) == (1137, 229)
    assert (Spans.of(512, 0.5, 3.0).inputs, Spans.of(512, 0.15, 10.0).count) == (512, 9)


def t5_lengths(block, density, mean):
    """As the T5 code computes them, in floating point."""
    noise = round(block * density)
    return block - noise + round(noise / mean) + 1, noise + round(noise / mean) + 1


@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.15, 2.0), (0.25, 5.0), (0.5, 3.0)])
def test_lengths_are_those_of_the_t5_code(density, mean):
    for length in range(64, 700, 7):
        block = length
        while t5_lengths(block + 1, density, mean)[0] <= length:
            block += 1
        spans = Spans.of(length, density, mean)
        assert (spans.block, spans.targets) == (block, t5_lengths(block, density, mean)[1]), length


@pytest.mark.parametrize(("length", "density", "mean"), [(1, 0.15, 3.0), (2, 0.15, 3.0), (64, 0.9, 1.0)])
def test_what_has_no_room_is_refused(length, density, mean):
    with pytest.raises(UserError, match=f"sequence_length={length} is too short, or data.noise_density={density}"):
        Spans.of(length, density, mean)


@pytest.mark.parametrize("length", [3, 16, 512])
def test_inputs_and_targets_give_the_text_back(length):
    spans = Spans.of(length)
    text = Text(spans.block)
    samples = SpanCorruption(text, spans, SENTINELS, END, START, seed=5)
    assert samples.samples_per_epoch == 7
    seen = set()
    for n in (0, 1, 2, 10**12):
        sample = samples[n]
        assert {name: (len(array), array.dtype) for name, array in sample.items()} == {
            "tokens": (length, np.int64),
            "decoder_tokens": (spans.targets, np.int64),
            "labels": (spans.targets, np.int64),
        }
        assert restore(sample["tokens"], sample["labels"]) == text[n][: spans.block].tolist()
        assert sample["decoder_tokens"].tolist() == [START, *sample["labels"][:-1]]
        assert sample["tokens"][0] == text[n][0], "the first part is kept"
        assert sample["tokens"][-2] == SENTINELS[spans.count - 1], "the last one is left out"
        seen.add(tuple(np.flatnonzero(np.isin(sample["tokens"], SENTINELS))))
    assert len(seen) > 1 or spans.count == 1, "one span is always the last tokens"


def test_a_sample_is_a_function_of_seed_and_number():
    spans = Spans.of(64)
    a, b, other = (SpanCorruption(Text(spans.block), spans, SENTINELS, END, START, seed) for seed in (1, 1, 2))
    for n in (5, 0, 5):
        assert all((a[n][name] == b[n][name]).all() for name in a[n])
    assert (a[0]["tokens"] != other[0]["tokens"]).any()


def test_the_words_stay_the_same():
    """Drawn values, which another version of numpy must not change."""
    spans = Spans.of(32)
    sample = SpanCorruption(Text(spans.block), spans, SENTINELS, END, START, seed=1)[0]
    assert sample["labels"].tolist() == [1000, 2020, 2021, 2022, 1001, 2032, 2033, END]


def test_every_cut_is_alike():
    """5 of 11 tokens in 2 spans: 4 ways to cut the left out ones times 5 to cut the kept ones."""
    spans = Spans(block=11, noise=5, count=2)
    samples = SpanCorruption(Text(11), spans, SENTINELS, END, START, seed=3)
    count = Counter()
    for n in range(4000):
        cuts = [np.flatnonzero(np.isin(samples[n][name], SENTINELS)).tolist() for name in ("tokens", "labels")]
        count[str(cuts)] += 1
    assert len(count) == 4 * 5
    assert min(count.values()) > 130 and max(count.values()) < 270  # 200 +- 5 sigma


def test_corrupt_by_hand():
    inputs, targets = corrupt(np.arange(10, 18), np.array([2, 1]), np.array([1, 4]), np.array([100, 101]), 3)
    assert inputs.tolist() == [10, 11, 100, 13, 101, 3]
    assert targets.tolist() == [100, 12, 101, 14, 15, 16, 17, 3]


def test_too_few_sentinels_are_named():
    spans = Spans.of(512)
    with pytest.raises(UserError, match=r"the 28 spans of a sample of 512 tokens .* the tokenizer has 27"):
        SpanCorruption(Text(spans.block), spans, SENTINELS[:27], END, START, 0)
