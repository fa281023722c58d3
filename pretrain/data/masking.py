"""Masked language modelling, the objective of BERT (Devlin et al. 2019, arXiv 1810.04805, section 3.1).

A sequence is CLS, text, SEP. As in RoBERTa's FULL-SENTENCES (arXiv 1907.11692), the text may span several documents,
and there is no second segment and no next sentence prediction.

A fixed number of the text's tokens is chosen for prediction. On average, 80% of the chosen tokens become MASK, 10%
become a random token of text, and 10% stay. The choice differs each time that a block of text is used.
"""

import numpy as np

from pretrain.data import noise
from pretrain.data.samples import Blocks


class Masking:
    """Samples of a BERT model.

    For sequence length s, a sample has int64 arrays [s]: ``tokens``; ``labels``, the tokens before masking; and
    ``loss_mask``, 1 at the tokens chosen for prediction.

    Args:
        blocks: source of blocks of at least s - 2 tokens; further tokens are not used.
        sequence_length: s.
        density: share of the s - 2 tokens of text that is chosen, rounded to a number of tokens, at least one.
            End-of-document tokens are never chosen, so a text with few other tokens may have fewer chosen ones.
        cls, sep, mask: ids of these special tokens.
        end: id of the end-of-document token.
        text: ids to draw random tokens from, int64.
        seed: seed of the choice; sample n uses (seed, n).
    """

    def __init__(
        self,
        blocks: Blocks,
        sequence_length: int,
        density: float,
        *,
        cls: int,
        sep: int,
        mask: int,
        end: int,
        text: np.ndarray,
        seed: int,
    ):
        self.samples_per_epoch = blocks.samples_per_epoch
        self._blocks, self._length, self._seed = blocks, sequence_length - 2, seed
        self._count = max(noise.share(self._length, density), 1)
        self._cls, self._sep, self._mask, self._end, self._text = cls, sep, mask, end, text

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        """Return sample ``n``."""
        length = self._length
        labels = np.concatenate([[self._cls], self._blocks[n][:length], [self._sep]])
        candidates = np.flatnonzero(labels[1:-1] != self._end) + 1
        words = noise.words(self._seed, n, 3 * length)
        chosen = candidates[noise.choose(words[: len(candidates)], self._count)]
        what = words[length : length + len(chosen)] % 10
        other = self._text[(words[2 * length : 2 * length + len(chosen)] % len(self._text)).astype(np.int64)]
        tokens, loss_mask = labels.copy(), np.zeros_like(labels)
        tokens[chosen] = np.select([what < 8, what == 8], [self._mask, other], labels[chosen])
        loss_mask[chosen] = 1
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
