"""Common interface of tokenizers, with the names and the declarations of special tokens."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fmoe.errors import UserError
from pretrain.files import read_object

# ids 0, 1, 2, 3
PAD = "<pad>"
UNKNOWN = "<unk>"
BEGIN = "<bos>"
END_OF_DOCUMENT = "<eod>"
# ids 4, 5, 6; the sentinels follow
CLS = "<cls>"
SEP = "<sep>"
MASK = "<mask>"
# Roles of special tokens, and their names here and elsewhere; the first one found is used.
ROLES = {
    "bos": (BEGIN, "<s>", "<|begin_of_text|>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "[BOS]"),
    "eos": (
        END_OF_DOCUMENT,
        "<|endoftext|>",
        "<|end_of_text|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<eos>",
        "</s>",
        "[EOS]",
        "[SEP]",
    ),
    "pad": (PAD, "[PAD]"),
    "cls": (CLS, "[CLS]", "<s>"),
    "sep": (SEP, "[SEP]", "</s>"),
    "mask": (MASK, "[MASK]"),
}
SPECIAL_NAMES = frozenset(name for names in ROLES.values() for name in names)
# Names of tokenizers in a Hugging Face folder, and of the files that declare their special tokens.
PUBLISHED_NAMES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
SETTINGS = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
_UNKNOWN_TEXT = "\U000e0fff"  # a character without a meaning
# Surroundings in which a text may spell the name of a special token.
_AROUND = (("", ""), (" ", " "), ("a", "b"), ("\n", "\n"))


@dataclass(frozen=True)
class Declared:
    """Special tokens that the files beside a tokenizer declare, as transformers reads them.

    Attributes:
        names: name by role, for the roles of `ROLES`.
        added: properties of added tokens by id: ``content``, ``special`` and other fields of ``tokenizers.AddedToken``.
        others: names of other special tokens.
        adds_bos: the value of ``add_bos_token``.
        files: the file that declares each key, such as ``eos_token``; ``added_tokens_decoder`` stands for ``added``.
    """

    names: Mapping[str, str]
    added: Mapping[int, Mapping[str, Any]]
    others: tuple[str, ...]
    adds_bos: bool
    files: Mapping[str, Path]

    def is_special(self, name: str) -> bool:
        """Return whether an ordinary entry of the vocabulary becomes a special token, which text cannot spell.

        Padding may be declared as a token that text needs, such as ``"!"``.
        """
        return len(name) > 1 and (
            name == self.names.get("eos") or (name in self.names.values() and name in SPECIAL_NAMES)
        )


def read_declared(path: Path) -> Declared:
    """Read the special tokens that are declared beside a tokenizer.

    With ``added_tokens_decoder``, tokenizer_config.json alone counts. Otherwise, special_tokens_map.json comes before
    it, and added_tokens.json has the added tokens.

    Args:
        path: the tokenizer's file. Only a name that transformers uses has declarations beside it.

    Raises:
        UserError: a file is unreadable or is not a JSON object; a token is neither a string nor an object with a
            string ``content``, or its id is not a number.
    """
    if path.name not in PUBLISHED_NAMES:
        return Declared({}, {}, (), False, {})
    settings = read_object(path.with_name(SETTINGS)) or {}
    files = dict.fromkeys(settings, path.with_name(SETTINGS))
    decoder = settings.get("added_tokens_decoder")
    ids: dict[str, Any] = {}
    if decoder is None:
        others = read_object(path.with_name(SPECIAL_MAP)) or {}
        settings |= others
        files |= dict.fromkeys(others, path.with_name(SPECIAL_MAP))
        ids = read_object(path.with_name(ADDED)) or {}
        files["added_tokens_decoder"] = path.with_name(ADDED)
    names = {}
    for role in ROLES:
        key = f"{role}_token"
        if settings.get(key) not in (None, ""):
            names[role] = _content(files[key], key, settings[key])
    extra: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values = settings.get(key) or ()
        extra += [_content(files[key], key, t) for t in (values.values() if isinstance(values, dict) else values)]
    added: dict[int, Mapping[str, Any]] = {}
    file = files["added_tokens_decoder"]
    try:
        for name, number in ids.items():
            added[int(number)] = {"content": name, "special": False}
        for number, token in (decoder or {}).items():
            added[int(number)] = {**token, "content": _content(file, "added_tokens_decoder", token)}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} has an added token without a valid id: {error}") from error
    return Declared(names, added, tuple(extra), settings.get("add_bos_token") is True, files)


def _content(path: Path, key: str, token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str) or not content:
        raise UserError(f"{path}: {key}={str(token)[:80]} must be a token, or an object with its content")
    return content


def sentinel(number: int) -> str:
    """Return the name of the T5 token that replaces the removed span ``number``: ``<extra_id_0>`` for span 0."""
    return f"<extra_id_{number}>"


class Tokenizer(ABC):
    """A loaded tokenizer. ``decode(encode(text)) == text`` holds for tokenizers that `train_tokenizer` trains.

    Attributes:
        path: the file that the tokenizer was read from.
        fingerprint: SHA-256 of the file, hexadecimal.
        vocab_size: size of the vocabulary; ids are ``0 <= id < vocab_size``.
        end_of_document: id that ends a document (eos).
        end_by_name: id that would end a document without a declaration, as in older versions; None if there is none.
        bos: id that begins a document if ``data.bos`` is set; None if the tokenizer has none.
        adds_bos: the tokenizer's own settings put a token in front of a text.
        pad: id of padding; None if the tokenizer has none.
        sentinels: ids of ``<extra_id_0>``, ``<extra_id_1>``, ...
        special_ids: ids without text: end of document, padding, sentinels, begin, unknown, cls, sep, mask, ...
    """

    path: Path
    fingerprint: str
    vocab_size: int
    end_of_document: int
    end_by_name: int | None
    bos: int | None
    adds_bos: bool
    pad: int | None
    sentinels: tuple[int, ...]
    special_ids: frozenset[int]
    _id_of: Mapping[str, int]
    _special: Mapping[str, int]
    _roles: dict[str, int]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. The only special id that a text can have is that of an unknown character."""

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
        """Return the id of the special token for a role: "bos", "eos", "pad", "cls", "sep" or "mask".

        `ROLES` lists the names that the token may have, if the files beside the tokenizer do not declare it.

        Raises:
            UserError: the tokenizer has no such token.
        """
        found = self._roles.get(name)
        if found is None:
            raise UserError(
                f"the tokenizer {self.path} has no piece for {name}: it needs {' or '.join(map(repr, ROLES[name]))}"
            )
        return found

    def end_documents_with(self, i: int) -> None:
        """Let the special token ``i`` end documents."""
        self.end_of_document = self._roles["eos"] = i

    def _checked(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(f"token id {i} is outside the vocabulary of {self.path}, 0 to {self.vocab_size - 1}")
        return ids

    def _set_roles(self, declared: Declared, own: Mapping[str, int]) -> None:
        """Set the attributes that follow from `_special`.

        A role's token is the declared one, that of the tokenizer itself (``own``), or the first of `ROLES`.

        Raises:
            UserError: no token ends documents, or the declared one is missing.
        """
        eos = declared.names.get("eos")
        if eos is not None and eos not in self._id_of:
            raise UserError(
                f"the tokenizer {self.path} has no token {eos!r}, which is eos_token in {declared.files['eos_token']}: "
                "correct eos_token"
            )
        special = self._special
        if eos is not None and eos not in special:
            raise UserError(
                f"the tokenizer {self.path} encodes the text {eos!r} as the token that ends documents, which eos_token "
                f"in {declared.files['eos_token']} names: use another eos_token"
            )
        by_name = [self._id_of[name] for name in ROLES["eos"] if name in self._id_of]
        self.end_by_name = own.get("eos", by_name[0] if by_name else None)
        self._roles = dict(own)
        for role, names in ROLES.items():
            known = [special[name] for name in names if name in special]
            if declared.names.get(role) in special:
                self._roles[role] = special[declared.names[role]]
            elif known:
                self._roles.setdefault(role, known[0])
        if "eos" not in self._roles:
            raise UserError(
                f"the tokenizer {self.path} has no piece that ends documents: add a special token {ROLES['eos'][0]}, "
                f"or name one as eos_token in {self.path.with_name(SETTINGS)}"
            )
        self.end_of_document = self._roles["eos"]
        if self.end_of_document in self.encode(_UNKNOWN_TEXT):
            raise UserError(
                f"the tokenizer {self.path} encodes unknown characters as token {self.end_of_document}, which ends "
                f"documents: name another eos_token in {self.path.with_name(SETTINGS)}"
            )
        self.bos = self._roles.get("bos")
        self.pad = self._roles.get("pad")
        self.adds_bos = declared.adds_bos and self.bos is not None
        found: list[int] = []
        while (number := special.get(sentinel(len(found)))) is not None:
            found.append(number)
        self.sentinels = tuple(found)
        self.special_ids = frozenset([*special.values(), *self._roles.values()])

    def _spelled(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that a text can spell: `encode` gives their ids. Left out is the token of unknown
        characters."""
        unknown = self.encode(_UNKNOWN_TEXT)
        return [
            name
            for name in names
            if self._id_of[name] not in unknown
            and any(self._id_of[name] in self.encode(before + name + after) for before, after in _AROUND)
        ]


def named_sentinels(ids: Iterable[str]) -> set[str]:
    """Return the names of sentinels among the names of tokens."""
    return {name for name in ids if name.startswith("<extra_id_")}
