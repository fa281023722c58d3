"""Masked language modelling and document masks, token by token."""

import numpy as np
import pytest

from pretrain.data.masking import Masking
from pretrain.data.packing import DocumentMask

CLS = 4
SEP = 5
MASK = 6
END = 3
TEXT = np.arange(20, 220)


class Blocks:
    samples_per_epoch = 9

    def __init__(self, length, ends=()):
        self.length = length
        self.ends = list(ends)

    def __getitem__(self, n):
        block = TEXT[(np.arange(self.length) + 7 * n) % len(TEXT)]
        block[self.ends] = END
        return block


def masking(length=130, density=0.15, seed=1, ends=(), room=1):
    blocks = Blocks(length - 2 + room, ends)
    return Masking(blocks, length, density, cls=CLS, sep=SEP, mask=MASK, end=END, text=TEXT, seed=seed), blocks


@pytest.mark.parametrize(("length", "count"), [(3, 1), (8, 1), (130, 19), (512, 76)])
def test_the_number_is_fixed_and_the_text_comes_back(length, count):
    samples, blocks = masking(length)
    assert samples.samples_per_epoch == 9
    for n in (0, 1, 2, 10**12):
        sample = samples[n]
        assert {(name, len(a), a.dtype.name) for name, a in sample.items()} == {
            (name, length, "int64") for name in ("tokens", "labels", "loss_mask")
        }
        chosen = sample["loss_mask"] == 1
        assert chosen.sum() == sample["loss_mask"].sum() == count
        assert sample["labels"].tolist() == [CLS, *blocks[n][: length - 2], SEP]
        assert (sample["tokens"][~chosen] == sample["labels"][~chosen]).all()
        assert not chosen[0] and not chosen[-1]


def test_eight_one_one():
    """Shares among 38,000 chosen tokens, within 5 sigma; a random token sometimes equals the original."""
    samples, _ = masking()
    tokens, labels = (np.concatenate([samples[n][name] for n in range(2000)]) for name in ("tokens", "labels"))
    chosen = np.concatenate([samples[n]["loss_mask"] for n in range(2000)]) == 1
    tokens, labels = tokens[chosen], labels[chosen]
    total = len(tokens)
    assert total == 38_000
    masked = (tokens == MASK).sum()
    kept = (tokens == labels).sum()
    others = tokens[(tokens != MASK) & (tokens != labels)]
    assert abs(masked - 0.8 * total) < 5 * (0.16 * total) ** 0.5
    assert abs(kept - 0.1 * total * (1 + 1 / len(TEXT))) < 5 * (0.09 * total) ** 0.5
    assert abs(len(others) - 0.1 * total * (1 - 1 / len(TEXT))) < 5 * (0.09 * total) ** 0.5
    assert set(others) == set(TEXT), "every token of text, and no other"


def test_every_place_is_alike():
    samples, _ = masking(length=22)
    count = sum(samples[n]["loss_mask"] for n in range(4000))
    expected = 4000 * 3 / 20
    assert abs(count[1:-1] - expected).max() < 5 * (expected * 0.85) ** 0.5


def test_ends_of_documents_are_no_question():
    samples, _ = masking(length=12, density=0.5, ends=(0, 2, 3, 4, 6, 7, 8))
    for n in range(20):
        assert np.flatnonzero(samples[n]["loss_mask"]).tolist() == [2, 6, 10], "3 candidates, 5 wanted"
    samples, _ = masking(length=6, ends=(0, 1, 2, 3))
    assert samples[0]["loss_mask"].sum() == 0


def test_a_sample_is_a_function_of_seed_and_number():
    (a, _), (b, _), (other, _), (wider, _) = masking(), masking(), masking(seed=2), masking(room=5)
    for n in (5, 0, 5):
        assert all((a[n][name] == b[n][name]).all() and (a[n][name] == wider[n][name]).all() for name in a[n])
    assert (a[0]["loss_mask"] != other[0]["loss_mask"]).any()
    assert (a[0]["loss_mask"] != a[9]["loss_mask"]).any(), "another epoch, other tokens"


def test_the_words_stay_the_same():
    """Drawn values, which another version of numpy must not change."""
    sample = masking(length=42)[0][3]
    assert np.flatnonzero(sample["loss_mask"]).tolist() == [1, 3, 4, 7, 24, 33]
    sample = masking(length=42)[0][6]
    assert {i: int(t) for i, t in enumerate(sample["tokens"]) if sample["loss_mask"][i] and t != MASK} == {
        5: 47,
        21: 82,
    }


class Ends(Blocks):
    def __getitem__(self, n):
        return np.array([9, 9, END, 8, END, END, 7, 7, 7])


def test_documents_by_hand():
    sample = DocumentMask(Ends(9), END)[0]
    assert sample["tokens"].tolist() == [9, 9, END, 8, END, END, 7, 7]
    assert sample["labels"].tolist() == [9, END, 8, END, END, 7, 7, 7]
    assert sample["documents"].tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    assert sample["positions"].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 0, 0, 1, 1]
    assert {array.dtype.name for array in sample.values()} == {"int64"}
