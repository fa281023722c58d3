"""Blocks whose documents do not attend to each other."""

from dataclasses import dataclass

import numpy as np

from pretrain.data.samples import MadeOfBlocks


@dataclass(frozen=True)
class DocumentMask(MadeOfBlocks):
    """Samples of a GPT whose tokens attend only to their own document.

    For sequence length s, a sample has int64 arrays [s]: ``tokens``; ``labels``; ``documents``, the index of each
    token's document in the sample; ``positions``, the position of each token in its document; and ``loss_mask``, 0
    where the next token belongs to another document.

    An end-of-document token belongs to the document that it ends. A block may start with the rest of a document, whose
    positions also begin at 0.

    Args:
        blocks: source of blocks of s + 1 tokens.
        end: id of the end-of-document token.
    """

    end: int

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        """Return sample ``n``."""
        return mask_documents(self.blocks[n], self.end)


def mask_documents(block: np.ndarray, end: int) -> dict[str, np.ndarray]:
    """Convert one block [s + 1] to a sample of `DocumentMask`."""
    tokens = block[:-1]
    is_end = (tokens == end).astype(np.int64)
    documents = np.cumsum(is_end) - is_end
    starts = np.searchsorted(documents, documents)  # of each token's document
    return {
        "tokens": tokens,
        "labels": block[1:],
        "documents": documents,
        "positions": np.arange(len(tokens)) - starts,
        "loss_mask": 1 - is_end,
    }
