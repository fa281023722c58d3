"""Token counts of corpora, over all ranks of a run, and their entropy."""

import logging
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from fmoe.errors import UserError
from pretrain.checkpoint.ranks import Ranks
from pretrain.data.counts import TokenCounter, TokenCounts, chunks
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.opening import naming

_CHUNK = 1 << 22  # tokens counted at a time
# Tokens that a rank counts between two collectives: few enough that no rank waits for long.
_TOKENS_PER_ROUND = 1 << 26

logger = logging.getLogger(__name__)


def unigram_entropy(corpora: Sequence[IndexedCorpus], vocab_size: int) -> float:
    """Return the entropy of the token frequencies in nats: the loss of a model that predicts from them alone.

    Tokens are read only from corpora without counts.

    Raises:
        UserError: no tokens, or a token id outside ``0 <= id < vocab_size``.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for corpus in corpora:
        unigrams = (corpus.counts or count_tokens(corpus.flat)).check(corpus.prefix, vocab_size)
        counts[: len(unigrams)] += unigrams
    total = counts.sum()
    if not total:
        raise UserError("the corpora have no tokens, so their entropy is undefined")
    share = counts[counts > 0] / total
    return float(-(share * np.log(share)).sum())


def count_tokens(tokens: np.ndarray) -> TokenCounts:
    """Count the tokens of a corpus, or of a slice of it, by reading them."""
    counter = TokenCounter()
    for chunk in chunks(tokens, _CHUNK):
        counter.add(chunk)
    return counter.finish()


def check_ids(corpora: Sequence[IndexedCorpus], vocab_size: int) -> None:
    """Raise UserError for a token id outside the vocabulary. Large corpora without token counts are not checked."""
    for corpus in corpora:
        if corpus.counts is None and corpus.num_tokens <= _TOKENS_PER_ROUND:
            corpus.counts = count_tokens(corpus.flat)
        if corpus.counts is not None:
            corpus.counts.check(corpus.prefix, vocab_size)


def count_missing(corpora: Sequence[IndexedCorpus], vocab_size: int) -> None:
    """Count the tokens of the corpora that have no token counts. Collective: each rank reads its share of a corpus.

    Rank 0 then stores the counts next to the corpus, if it is allowed to write there.

    Raises:
        UserError: a token id is outside the model's vocabulary; raised on every rank.
    """
    ranks = Ranks()
    for corpus in corpora:
        # The modification times of files may differ between machines, so rank 0 decides.
        if ranks.total(int(ranks.rank == 0 and corpus.counts is None)):
            if ranks.rank == 0:
                logger.warning("%s has no token counts: reading its %d tokens once", corpus.prefix, corpus.num_tokens)
            corpus.counts = _count_together(corpus, vocab_size, ranks)
        reason = corpus.keep_counts() if ranks.rank == 0 else None
        if reason is not None:
            logger.warning("token counts of %s are not saved, so each new run counts again: %s", corpus.prefix, reason)


def _count_together(corpus: IndexedCorpus, vocab_size: int, ranks: Ranks) -> TokenCounts:
    unigrams = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, corpus.num_tokens, ranks.size * _TOKENS_PER_ROUND):
        with ranks.together(), naming("data.train"):
            begin = start + ranks.rank * _TOKENS_PER_ROUND
            part = count_tokens(corpus.flat[begin : begin + _TOKENS_PER_ROUND]).check(corpus.prefix, vocab_size)
            unigrams[: len(part)] += part
    if ranks.size > 1:
        total = torch.from_numpy(unigrams).to(ranks.device())
        dist.all_reduce(total)
        unigrams = total.cpu().numpy()
    used = np.flatnonzero(unigrams)
    largest = int(used[-1]) if len(used) else -1
    return TokenCounts(0, largest, unigrams[: largest + 1])
