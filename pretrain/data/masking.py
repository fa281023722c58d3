"""Masked language modelling, the objective of BERT (Devlin et al. 2019, arXiv 1810.04805, section 3.1).

A sequence is CLS, text, SEP. As in RoBERTa's FULL-SENTENCES (arXiv 1907.11692), the text may span several documents,
and there is no second segment and no next sentence prediction.

A fixed number of the text's tokens is chosen for prediction. On average, 80% of the chosen tokens become MASK, 10%
become a random token of text, and 10% stay. The choice differs each time that a block of text is used.
"""

from dataclasses import KW_ONLY, dataclass

import numpy as np

from pretrain.data import noise
from pretrain.data.samples import MadeOfBlocks


@dataclass(frozen=True)
class Masking(MadeOfBlocks):
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

    sequence_length: int
    density: float
    _: KW_ONLY
    cls: int
    sep: int
    mask: int
    end: int
    text: np.ndarray
    seed: int

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        """Return sample ``n``."""
        length = self.sequence_length - 2
        labels = np.concatenate([[self.cls], self.blocks[n][:length], [self.sep]])
        candidates = np.flatnonzero(labels[1:-1] != self.end) + 1
        words = noise.words(self.seed, n, 3 * length).reshape(3, length)
        count = max(noise.share(length, self.density), 1)
        chosen = candidates[noise.choose(words[0, : len(candidates)], count)]
        die = words[1, : len(chosen)] % 10
        random_tokens = self.text[(words[2, : len(chosen)] % len(self.text)).astype(np.int64)]
        tokens = labels.copy()
        tokens[chosen] = np.select([die < 8, die == 8], [self.mask, random_tokens], labels[chosen])
        loss_mask = np.zeros_like(labels)
        loss_mask[chosen] = 1
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
