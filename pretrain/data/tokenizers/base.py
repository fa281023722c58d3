"""Common interface of tokenizers, with the names of special tokens."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from fmoe.errors import UserError

PAD, UNKNOWN, BEGIN, END_OF_DOCUMENT = "<pad>", "<unk>", "<bos>", "<eod>"  # ids 0, 1, 2, 3
CLS, SEP, MASK = "<cls>", "<sep>", "<mask>"  # ids 4, 5, 6; the sentinels follow
# Roles of special tokens, and their names here and elsewhere; the first one found is used.
ROLES = {
    "pad": (PAD, "[PAD]"),
    "cls": (CLS, "[CLS]", "<s>"),
    "sep": (SEP, "[SEP]", "</s>"),
    "mask": (MASK, "[MASK]"),
}
SPECIAL_NAMES = frozenset(name for names in ROLES.values() for name in names)


def sentinel(number: int) -> str:
    """Return the name of the T5 token that replaces the removed span ``number``: ``<extra_id_0>`` for span 0."""
    return f"<extra_id_{number}>"


class Tokenizer(ABC):
    """A loaded tokenizer. ``decode(encode(text)) == text`` holds for tokenizers that `train_tokenizer` trains.

    Attributes:
        path: the file that the tokenizer was read from.
        fingerprint: SHA-256 of the file, hexadecimal.
        vocab_size: size of the vocabulary; ids are ``0 <= id < vocab_size``.
        end_of_document: id that ends a document (sentencepiece's eos).
        pad: id of padding; None if the tokenizer has none.
        sentinels: ids of ``<extra_id_0>``, ``<extra_id_1>``, ...
        special_ids: ids without text: end of document, padding, sentinels, begin, unknown, cls, sep, mask, ...
    """

    path: Path
    fingerprint: str
    vocab_size: int
    end_of_document: int
    pad: int | None
    sentinels: tuple[int, ...]
    special_ids: frozenset[int]
    _id_of: Mapping[str, int]
    _special: Mapping[str, int]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. A tokenizer that fmoe did not train may give a special id to an unknown character
        or a user-defined symbol."""

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Return the id of each byte, int64 [len(data)]; the bytes need not be UTF-8.

        Raises:
            UserError: the tokenizer does not have one token per byte.
        """
        return self.byte_ids[np.frombuffer(data, np.uint8)]

    def encode_piece(self, piece: str | bytes) -> Sequence[int] | np.ndarray:
        """Return the ids of text or bytes."""
        return self.encode_bytes(piece) if isinstance(piece, bytes) else self.encode(piece)

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids. Bytes that are not UTF-8 become U+FFFD.

        Special tokens are dropped. A sentencepiece model drops only its control symbols.

        Raises:
            UserError: an id is outside the vocabulary.
        """

    @abstractmethod
    def _bytes_of(self, i: int) -> int:
        """Return the number of UTF-8 bytes in the text of id ``i``."""

    @property
    def ids(self) -> Mapping[str, int]:
        """Ids of all tokens by name, special tokens included."""
        return self._id_of

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """Number of UTF-8 bytes in the text of each id, 0 for special ids; int64 [vocab_size].

        Summed over the tokens of a text, they give the text's number of bytes if the tokenizer keeps every text
        exactly. The sum is off by one if the tokenizer adds or drops a space at the beginning.
        """
        return np.array([0 if i in self.special_ids else self._bytes_of(i) for i in range(self.vocab_size)], np.int64)

    @cached_property
    def byte_ids(self) -> np.ndarray:
        """Ids of the bytes 0 to 255; int64 [256].

        Raises:
            UserError: the tokenizer does not have one token per byte.
        """
        raise UserError(
            f"the tokenizer {self.path} does not have one token per byte, which format='bytes' needs: train one "
            "with fmoe data tokenizer --model-type bytes"
        )

    def special(self, piece: str) -> int:
        """Return the id of a special token such as ``"<mask>"``.

        Raises:
            UserError: the tokenizer has no such special token.
        """
        if piece not in self._special:
            raise UserError(f"the tokenizer {self.path} has no special piece {piece!r}")
        return self._special[piece]

    def role(self, name: str) -> int:
        """Return the id of the special token for a role: "pad", "cls", "sep" or "mask".

        `ROLES` lists the names that the token may have.

        Raises:
            UserError: the tokenizer has no such token.
        """
        if name == "pad" and self.pad is not None:
            return self.pad
        for piece in ROLES[name]:
            if piece in self._special:
                return self._special[piece]
        raise UserError(
            f"the tokenizer {self.path} has no piece for {name}: it needs {' or '.join(map(repr, ROLES[name]))}"
        )

    def _checked(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(f"token id {i} is outside the vocabulary of {self.path}, 0 to {self.vocab_size - 1}")
        return ids

    def _consecutive_sentinels(self) -> tuple[int, ...]:
        found: list[int] = []
        while (number := self._id_of.get(sentinel(len(found)))) is not None:
            found.append(number)
        return tuple(found)
