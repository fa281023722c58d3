"""Span corruption, the objective of T5 (Raffel et al. 2020, arXiv 1910.10683, section 3.3).

Spans are removed from a block of tokens. The encoder receives the rest, with a sentinel in place of each span. The
decoder predicts each sentinel and the tokens that it stands for. Both sequences end with an end token.

The number of removed tokens is fixed, and their positions are random. The kept and the removed tokens are each cut into
as many parts as there are spans. All such partitions are equally likely. Kept and removed parts alternate, starting
with a kept one.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from fmoe.errors import UserError
from pretrain.data import noise
from pretrain.data.samples import MadeOfBlocks


@dataclass(frozen=True)
class Spans:
    """Lengths of a T5's sample in tokens. All training samples have the same lengths, so nothing is padded.

    Attributes:
        block: tokens of text.
        noise: tokens removed from the text.
        count: number of removed spans.
        inputs: tokens of the encoder: kept tokens, one sentinel per span, and the end token.
        targets: tokens of the decoder: removed tokens, one sentinel per span, and the end token.
    """

    block: int
    noise: int
    count: int

    @property
    def inputs(self) -> int:
        return self.block - self.noise + self.count + 1

    @property
    def targets(self) -> int:
        return self.noise + self.count + 1

    @classmethod
    @lru_cache
    def of(cls, sequence_length: int, density: float = 0.15, mean_span: float = 3.0) -> "Spans":
        """Return the lengths for the longest block that becomes ``sequence_length`` encoder tokens.

        As in the T5 code, a share ``density`` of a block is removed, in spans of ``mean_span`` tokens on average. The
        numbers of removed tokens and of spans are rounded to integers (halves to even) and are at least one.

        Raises:
            UserError: the sequence is too short, or the density too high, to keep a token before each removed span.
        """
        above = 3  # a block whose inputs are too long
        while cls.of_block(above, density, mean_span).inputs <= sequence_length:
            above *= 2
        fits = bisect_right(range(2, above), sequence_length, key=lambda n: cls.of_block(n, density, mean_span).inputs)
        longest = cls.of_block(max(fits + 1, 2), density, mean_span)
        if longest.inputs != sequence_length or longest.block - longest.noise < longest.count:
            raise UserError(
                f"model.sequence_length={sequence_length} is too short, or data.noise_density={density} too high, "
                f"with data.mean_span={mean_span}: the inputs need at least one kept token before each removed span, "
                "and a sentinel in its place"
            )
        return longest

    @classmethod
    def of_block(cls, block: int, density: float, mean_span: float) -> "Spans":
        """Return the lengths for a block of ``block`` tokens, at least two. Unlike `of`, accept fewer kept tokens than
        spans."""
        left_out = min(max(noise.share(block, density), 1), block - 1)
        return cls(block, left_out, max(round(left_out / Fraction(repr(mean_span))), 1))


@dataclass(frozen=True)
class SpanCorruption(MadeOfBlocks):
    """Samples of a T5.

    A sample has int64 arrays: ``tokens`` [inputs] for the encoder, and ``decoder_tokens`` and ``labels`` [targets] for
    the decoder; `Spans` has both lengths. ``decoder_tokens`` is a start token followed by the labels without their last
    token.

    Args:
        blocks: source of blocks of at least ``spans.block`` tokens; further tokens are not used.
        spans: lengths of a sample.
        sentinels: ids of the sentinels, at least one per span.
        end: id that ends inputs and targets.
        start: id of the decoder's first token.
        seed: seed of the span positions; sample n uses (seed, n).

    Raises:
        UserError: fewer sentinels than spans.
    """

    spans: Spans
    sentinels: tuple[int, ...]
    end: int
    start: int
    seed: int

    def __post_init__(self) -> None:
        count = self.spans.count
        if len(self.sentinels) < count:
            raise UserError(
                f"the {count} spans of a sample of {self.spans.inputs} tokens need a sentinel each, but the tokenizer "
                f"has {len(self.sentinels)}: train a tokenizer with --sentinels {count}"
            )

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        """Return sample ``n``."""
        spans = self.spans
        tokens = self.blocks[n][: spans.block]
        words = noise.words(self.seed, n, spans.block)
        left_out = _parts(spans.noise, spans.count, words[: spans.noise - 1])
        kept = _parts(spans.block - spans.noise, spans.count, words[spans.noise : -1])
        inputs, targets = corrupt(tokens, kept, left_out, self.sentinels[: spans.count], self.end)
        decoder_tokens = np.concatenate([[self.start], targets[:-1]])
        return {"tokens": inputs, "decoder_tokens": decoder_tokens, "labels": targets}


def corrupt(
    tokens: np.ndarray, kept: np.ndarray, left_out: np.ndarray, sentinels: Sequence[int], end: int
) -> tuple[np.ndarray, np.ndarray]:
    """Replace spans of a block by sentinels. Return the encoder's inputs and the decoder's targets.

    The parts of the block are alternately kept and removed, beginning with a kept one.

    Args:
        tokens: int64 [block].
        kept, left_out: lengths of the kept and of the removed parts, int64 [spans]; they add up to the block.
        sentinels: id of each removed part's sentinel.
        end: id that ends inputs and targets.
    """
    stops = np.cumsum(np.stack([kept, left_out], axis=1).ravel())
    parts = np.split(tokens, stops[:-1])
    inputs = []
    targets = []
    for sentinel, kept_part, removed_part in zip(sentinels, parts[::2], parts[1::2], strict=True):
        inputs += [kept_part, [sentinel]]
        targets += [[sentinel], removed_part]
    return np.concatenate([*inputs, [end]]), np.concatenate([*targets, [end]])


def _parts(total: int, count: int, words: np.ndarray) -> np.ndarray:
    """Draw ``count`` positive integers with the sum ``total``, uniformly among all such lists; int64 [count]."""
    # ``words`` has a random word for each gap between two tokens; ``count - 1`` gaps become cuts.
    cuts = noise.choose(words, count - 1) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))
