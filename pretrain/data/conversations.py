"""Samples of supervised fine-tuning: whole conversations, packed into sequences, of which answers are predicted.

Best-fit decreasing packs the conversations once. An epoch has all packs, in random order, so sample n depends only on
n, the corpora, the sequence length and the seed.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from fmoe.errors import UserError
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.samples import epoch_order


class Conversations:
    """An endless sequence of samples, each made of whole conversations.

    For sequence length L, a sample has the arrays of `pretrain.data.packing.DocumentMask`, int64 [L]. A conversation is
    a document; ``loss_mask`` is 1 where the label is a token of an answer. Behind the last conversation, padding is
    another document, which predicts nothing.

    A conversation that is longer than L + 1 tokens is cut at its end. It is left out if no answer begins before.

    Args:
        corpora: corpora of conversations; each epoch has all of them.
        sequence_length: L.
        seed: 0 to 2^64 - 1.
        padding: token id of padding.

    Attributes:
        samples_per_epoch: number of packs.
        num_conversations: conversations in the corpora.
        num_cut: conversations that are cut.
        num_left_out: conversations that are left out.
        padding_share: share of the samples' tokens that are padding.

    Raises:
        UserError: no conversation has an answer within the sequence length.
    """

    def __init__(self, corpora: Sequence[IndexedCorpus], sequence_length: int, seed: int, padding: int):
        self.sequence_length = sequence_length
        self.seed = seed
        self.padding = padding
        self._corpora = tuple(corpora)
        self._first_documents = np.cumsum([0, *(corpus.num_documents for corpus in corpora)])  # per corpus
        whole = np.concatenate([corpus.lengths for corpus in corpora]) - 1  # the last token is only a label
        before = [corpus.sequence_lengths[corpus.document_boundaries[:-1]] for corpus in corpora]  # the first answer
        fits = np.concatenate(before) <= sequence_length
        kept = np.flatnonzero(fits)
        self.num_conversations = len(whole)
        self.num_left_out = len(whole) - len(kept)
        self.num_cut = int((fits & (whole > sequence_length)).sum())
        if not len(kept):
            names = ", ".join(str(corpus.prefix) for corpus in corpora)
            raise UserError(f"no conversation of {names} has an answer within model.sequence_length={sequence_length}")
        lengths = np.minimum(whole[kept], sequence_length)
        pack_of = pack(lengths, sequence_length)
        self.samples_per_epoch = int(pack_of.max()) + 1
        self.padding_share = 1 - int(lengths.sum()) / (self.samples_per_epoch * sequence_length)
        self._documents = kept[np.argsort(pack_of, kind="stable")]  # pack after pack
        self._ends = np.cumsum(np.bincount(pack_of))  # of each pack in `_documents`
        self._epoch: tuple[int, np.ndarray] | None = None  # number and order of packs, drawn on demand

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        """Return sample ``n`` of the endless sequence.

        Raises:
            IndexError: ``n`` is negative.
        """
        if n < 0:
            raise IndexError(f"sample {n} is negative")
        number, place = divmod(int(n), self.samples_per_epoch)
        epoch = self._epoch  # a local name: another thread may draw the next epoch meanwhile
        if epoch is None or epoch[0] != number:
            epoch = self._epoch = (number, epoch_order(self.samples_per_epoch, self.seed, number))
        which = int(epoch[1][place])
        documents = self._documents[self._ends[which - 1] if which else 0 : self._ends[which]]
        length = self.sequence_length
        sample = {
            "tokens": np.full(length, self.padding, np.int64),
            "labels": np.full(length, self.padding, np.int64),
            "documents": np.full(length, len(documents), np.int64),
            "positions": np.zeros(length, np.int64),
            "loss_mask": np.zeros(length, np.int64),
        }
        start = 0
        for number, document in enumerate(documents):
            tokens, is_answer = self._conversation(int(document))
            stop = start + len(tokens) - 1
            sample["tokens"][start:stop] = tokens[:-1]
            sample["labels"][start:stop] = tokens[1:]
            sample["documents"][start:stop] = number
            sample["positions"][start:stop] = np.arange(stop - start)
            sample["loss_mask"][start:stop] = is_answer[1:]
            start = stop
        sample["positions"][start:] = np.arange(length - start)
        return sample

    def __reduce__(self) -> tuple:
        """Pickle the arguments, of which the rest is computed again."""
        return type(self), (self._corpora, self.sequence_length, self.seed, self.padding)

    def _conversation(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a conversation, cut to L + 1, and bool of the same shape: True for those of answers."""
        number = int(np.searchsorted(self._first_documents, document, side="right")) - 1
        corpus = self._corpora[number]
        document -= int(self._first_documents[number])
        first, last = corpus.document_boundaries[document : document + 2]
        lengths = corpus.sequence_lengths[first:last]
        is_answer = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        kept = slice(self.sequence_length + 1)
        return corpus.document(document)[kept], is_answer[kept]


def pack(lengths: np.ndarray, size: int) -> np.ndarray:
    """Pack items by best-fit decreasing: from the longest on, each joins the pack that it fills best, or a new one.

    Args:
        lengths: 1 to ``size``, int64 [items].

    Returns:
        The pack of each item, numbered from 0, int64 [items].
    """
    packs = np.empty(len(lengths), np.int64)
    count = 0
    rooms: list[int] = []  # left in packs, ascending and distinct
    packs_of: dict[int, list[int]] = {}  # by room
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room = size
            number = count
            count += 1
        else:
            room = rooms[at]
            number = packs_of[room].pop()
            if not packs_of[room]:
                del rooms[at]
        packs[item] = number
        left = room - length
        if not left:
            continue
        if not packs_of.setdefault(left, []):
            insort(rooms, left)
        packs_of[left].append(number)
    return packs
