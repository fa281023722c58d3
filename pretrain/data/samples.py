"""The order of training samples: a pure function of (corpora, sequence length, seed, n), without caches on disk.

In each epoch, the documents of all corpora are concatenated in random order. This stream is cut into blocks
of L + 1 tokens, where L is the sequence length. The blocks overlap by one token and are read in random order. Block b
holds the tokens b L to b L + L. Its first L tokens are inputs and its last L are targets, so an epoch predicts every
token at most once.

The last tokens of the stream, fewer than L, are dropped. They differ between epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fmoe.errors import UserError
from pretrain.data.indexed import IndexedCorpus

# What a permutation orders; part of its key.
_DOCUMENTS = 0
_BLOCKS = 1


class Samples(Protocol):
    """An endless sequence of samples, in which sample n depends only on n.

    A sample is an array of tokens [L + 1], for sequence length L, or arrays by name (`pretrain.models.batch`).
    """

    @property
    def samples_per_epoch(self) -> int:
        """Samples in an epoch of all corpora."""

    def __getitem__(self, n: int) -> np.ndarray | dict[str, np.ndarray]: ...


class TokenBlocks(Samples, Protocol):
    """`Samples` that are arrays of tokens, all of the same length."""

    def __getitem__(self, n: int) -> np.ndarray: ...


@dataclass(frozen=True)
class _Epoch:
    number: int
    order: np.ndarray  # document ids in this epoch's order, int64 [documents]
    ends: np.ndarray  # the end of each of them in the stream, int64 [documents]
    blocks: np.ndarray  # block ids in this epoch's order, int64 [samples_per_epoch]


class GPTSamples:
    """An endless sequence of blocks of tokens, cut from the concatenated documents of all corpora.

    Sample n depends only on n and the arguments, so a resumed run needs only n. Memory: 32 bytes per document and 8 per
    block.

    Args:
        corpora: read as one; each epoch has all of their documents.
        sequence_length: L; a sample has L + 1 tokens.
        seed: 0 to 2^64 - 1.
        streams: if more than 0, the concatenated documents of an epoch are cut into this many streams of equal length.
            Sample n of the epoch is then block ``n // streams`` of stream ``n % streams``.

    Attributes:
        samples_per_epoch: samples before the order repeats or is redrawn: ``(tokens - 1) // sequence_length``, rounded
            down to a multiple of ``streams`` if there are any.

    Raises:
        UserError: no corpus, a value out of range, or too few tokens for a sample (with ``streams``, for a sample of
            each stream).
    """

    def __init__(self, corpora: Sequence[IndexedCorpus], sequence_length: int, seed: int, streams: int = 0):
        names = ", ".join(str(corpus.prefix) for corpus in corpora)
        num_tokens = sum(corpus.num_tokens for corpus in corpora)
        if sequence_length < 1:
            raise UserError(f"sequence_length={sequence_length} must be at least 1")
        if not 0 <= seed < 1 << 64:
            raise UserError(f"seed={seed} must be between 0 and 2^64 - 1")
        if not corpora:
            raise UserError("no corpus: pass at least one")
        if num_tokens <= sequence_length:
            raise UserError(
                f"a sample takes {sequence_length + 1} tokens, but there are only {num_tokens} in {names}: use more "
                "text or a smaller model.sequence_length"
            )
        self.sequence_length = sequence_length
        self.seed = seed
        self.streams = streams
        self.samples_per_epoch = (num_tokens - 1) // sequence_length
        if streams:
            if self.samples_per_epoch < streams:
                raise UserError(
                    f"{streams} streams of sequence_length={sequence_length} need {streams * sequence_length + 1} "
                    f"tokens, but there are only {num_tokens} in {names}: use more text or a smaller train.global_batch"
                )
            self.samples_per_epoch -= self.samples_per_epoch % streams
        self._corpora = tuple(corpora)
        self._first_documents = np.cumsum([0, *(corpus.num_documents for corpus in corpora)])  # per corpus
        lengths = [corpus.lengths for corpus in corpora]
        self._lengths = np.concatenate(lengths)
        self._starts = np.concatenate([np.cumsum(length) - length for length in lengths])  # in the document's corpus
        self._epoch: _Epoch | None = None  # drawn on demand: a run may begin in a later one

    def __getitem__(self, n: int) -> np.ndarray:
        """Return sample ``n`` of the endless sequence, int64 [sequence_length + 1].

        Raises:
            IndexError: ``n`` is negative.
        """
        if n < 0:
            raise IndexError(f"sample {n} is negative")
        number, place = divmod(int(n), self.samples_per_epoch)
        epoch = self._epoch  # a local name: another thread may draw the next epoch meanwhile
        if epoch is None or epoch.number != number:
            epoch = self._epoch = self._draw(number)
        position = int(epoch.blocks[place]) * self.sequence_length
        sample = np.empty(self.sequence_length + 1, dtype=np.int64)
        rank = int(np.searchsorted(epoch.ends, position, side="right"))  # the document that holds this position
        filled = 0
        while filled < len(sample):
            document = int(epoch.order[rank])
            left = int(epoch.ends[rank]) - position
            taken = min(left, len(sample) - filled)
            start = int(self._starts[document]) + int(self._lengths[document]) - left
            corpus = int(np.searchsorted(self._first_documents, document, side="right")) - 1
            sample[filled : filled + taken] = self._corpora[corpus].flat[start : start + taken]
            filled += taken
            position += taken
            rank += 1
        return sample

    def __reduce__(self) -> tuple:
        """Pickle the arguments, of which the rest is computed again."""
        return type(self), (self._corpora, self.sequence_length, self.seed, self.streams)

    def _draw(self, number: int) -> _Epoch:
        order = _permutation(len(self._lengths), self.seed, number, _DOCUMENTS)
        if self.streams:
            blocks = np.arange(self.samples_per_epoch).reshape(self.streams, -1).T.ravel()
        else:
            blocks = epoch_order(self.samples_per_epoch, self.seed, number)
        return _Epoch(number, order, np.cumsum(self._lengths[order]), blocks)


@dataclass(frozen=True)
class MadeOfBlocks:
    """`Samples` of which each is made of the block with its number."""

    blocks: TokenBlocks

    @property
    def samples_per_epoch(self) -> int:
        return self.blocks.samples_per_epoch


@dataclass(frozen=True)
class Segments(MadeOfBlocks):
    """Samples of a GPT with memory (Transformer-XL): segments of text.

    `GPTSamples` cuts an epoch's text into streams of equal length. Each stream in turn gives its next segment.

    A sample has int64 arrays: ``tokens`` and ``labels`` [L], for segments of L tokens, and ``starts`` [1], which is 1
    if the segment is the first of its stream, else 0.

    Args:
        blocks: `GPTSamples` with ``streams`` above 0; their blocks are the segments.
    """

    blocks: GPTSamples

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        """Return sample ``n``."""
        block = self.blocks[n]
        is_start = n % self.samples_per_epoch < self.blocks.streams
        return {"tokens": block[:-1], "labels": block[1:], "starts": np.array([is_start], dtype=np.int64)}


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the random order of an epoch's samples, int64 [size]."""
    return _permutation(size, seed, epoch, _BLOCKS)


def _permutation(size: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """Return a random order of ``range(size)``, int64 [size]."""
    # numpy keeps raw Philox words stable between versions, unlike Generator.permutation (NEP 19).
    key = np.array([seed, 2 * epoch + purpose], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")
