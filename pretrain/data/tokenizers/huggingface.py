"""Hugging Face ``tokenizers``, read from one JSON file: no code is run, and nothing is downloaded."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from fmoe.errors import UserError, one_line, require
from pretrain.data.tokenizers.base import SPECIAL_NAMES, Declared, Tokenizer, named_sentinels, read_declared
from pretrain.files import replacing

_BYTE = re.compile("<0x[0-9A-F]{2}>")


class HuggingFaceTokenizer(Tokenizer):
    """A loaded ``tokenizer.json``, with the tokens that the files beside it declare.

    A text is encoded without added tokens, truncation or padding. A special token spelled in a text is encoded as text.
    Decoding is exact for byte-level models that do not change the text first, e.g. to lower case.

    `pretrain.data.prepare.prepare` splits a document of more than a megabyte into parts and encodes each. Tokens may
    differ at the borders of the parts, unless the tokenizer keeps newlines as separate tokens. Tokenizers
    that `pretrain.data.tokenizers.train_tokenizer` trains do so.
    """

    def __init__(self, data: bytes, path: Path):
        self.path = path
        self.fingerprint = hashlib.sha256(data).hexdigest()
        declared = read_declared(path)
        model = _parse(data, path)
        self.data = _completed(data, model, path, declared)
        """The file's content, with declared tokens added and special tokens marked as such."""
        if self.data is not data:
            model = _parse(self.data, path)
        model.no_padding()
        model.no_truncation()
        model.encode_special_tokens = True
        self._model = model
        self._id_of = model.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(self._id_of.values(), default=-1)
        marked = {token.content: i for i, token in model.get_added_tokens_decoder().items() if token.special}
        named = (SPECIAL_NAMES | named_sentinels(self._id_of)).intersection(self._id_of) - marked.keys()
        text = self._spelled(named)  # ordinary entries of the vocabulary
        self._special = {name: self._id_of[name] for name in named.difference(text)} | marked
        self._cut([name for name in self._spelled(marked) if len(name) > 1])
        for name in self._spelled(marked):  # text needs it, e.g. "!" as padding
            del self._special[name]
        self._set_roles(declared, {})
        around = model.encode("a", add_special_tokens=True)
        before = [i for i, _ in takewhile(itemgetter(1), zip(around.ids, around.special_tokens_mask, strict=True))]
        if before:  # the post-processor decides
            self.adds_bos = True
            self._roles.pop("bos", None)
        if len(before) == 1:
            self._roles["bos"] = before[0]
        self.before = before
        """Ids that the post-processor puts in front of a text; `encode` does not."""
        self.bos = self._roles.get("bos")

    def _cut(self, names: Sequence[str]) -> None:
        """Split the text inside of ``names``, so that no text is encoded as one of these tokens."""
        if not names:
            return
        tokenizers = require("tokenizers", "pretrain", f"reading {self.path}")
        inside = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names)
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(inside), "isolated")
        before = self._model.pre_tokenizer
        self._model.pre_tokenizer = split if before is None else tokenizers.pre_tokenizers.Sequence([before, split])
        self.data = self._model.to_str().encode()

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        text = [i for i in self._checked(ids) if i not in self.special_ids]
        return self._model.decode(text, skip_special_tokens=False)

    @cached_property
    def byte_ids(self) -> np.ndarray:
        ids = [self._id_of.get(character, -1) for character in _characters_of_bytes()]
        if "ByteLevel" not in self._decoders or {*ids} != {*range(self.vocab_size)} - self.special_ids:
            return super().byte_ids
        return np.array(ids, np.int64)

    @cached_property
    def splits_digits_and_words(self) -> bool:
        """True if the tokenizer has the pre-tokenizer of `train_bytes`, and no normalizer."""
        tokenizers = require("tokenizers", "pretrain", f"reading {self.path}")
        splits = self._model.pre_tokenizer
        ours = _splits(tokenizers)
        return self._model.normalizer is None and splits is not None and splits.__getstate__() == ours.__getstate__()

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """Types of the decoder's steps, such as "ByteLevel"."""
        decoder = json.loads(self._model.to_str()).get("decoder") or {}
        return frozenset(step.get("type") for step in [decoder, *decoder.get("decoders", ())])

    def _bytes_of(self, i: int) -> int:
        piece = self._model.id_to_token(i)
        if piece is None:  # an unused id
            return 0
        if i in self._model.get_added_tokens_decoder():
            return len(piece.encode())
        if "ByteLevel" in self._decoders:  # a character of a piece is a byte
            return len(piece)
        if "ByteFallback" in self._decoders and _BYTE.fullmatch(piece):
            return 1
        if "WordPiece" in self._decoders:  # a piece that begins a word is decoded with a space before it
            return len(piece.encode()) + (-2 if piece.startswith("##") else 1)
        return len(piece.replace("\u2581", " ").encode())


def _parse(data: bytes, path: Path) -> Any:
    tokenizers = require("tokenizers", "pretrain", f"reading {path}")
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the Rust side raises plain Exception
        what = one_line(error, 200)
        raise UserError(f"{path} is damaged, or is not a tokenizer.json of Hugging Face tokenizers: {what}") from error


def _completed(data: bytes, model: Any, path: Path, declared: Declared) -> bytes:
    """Return the content of a tokenizer.json with all declared tokens, and with every token that has a role special.

    Args:
        model: the parsed content.

    Raises:
        UserError: a declared token has another id than ``tokenizers`` gives it.
    """
    ids = model.get_vocab(with_added_tokens=True)
    present = {token.content: token.special for token in model.get_added_tokens_decoder().values()}
    roles = {*SPECIAL_NAMES, *declared.names.values(), *named_sentinels(present)}
    unmarked = {name for name, is_special in present.items() if not is_special and name in roles}
    new: dict[int, Mapping[str, Any]] = {i: token for i, token in declared.added.items() if token["content"] not in ids}
    for name in declared.names.values():
        if name in ids and name not in present and declared.is_special(name):
            new[ids[name]] = {"content": name}
    if not unmarked and not new:
        return data
    content = json.loads(data)
    tokens = content.get("added_tokens") or []
    for token in tokens:
        token["special"] = token["special"] or token["content"] in unmarked
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for i, token in sorted(new.items()):
        special = bool(token.get("special", True)) or token["content"] in roles
        own = {name: bool(token.get(name, default)) for name, default in flags.items()}
        tokens.append({"id": i, "content": token["content"], "special": special, **own})
    completed = json.dumps({**content, "added_tokens": tokens}, ensure_ascii=False).encode()
    found = _parse(completed, path)
    for i, token in sorted(new.items()):
        if (other := found.token_to_id(token["content"])) != i:
            raise UserError(
                f"{declared.files['added_tokens_decoder']} declares the token {token['content']!r} with id {i}, but "
                f"the vocabulary of {path.name} leads to id {other}: correct the id"
            )
    return completed


def _characters_of_bytes() -> list[str]:
    """Return the character that stands for each byte in GPT-2's byte-level BPE (Radford et al. 2019)."""
    # Printable characters of Latin-1 stand for themselves, and the characters from U+0100 on for the other bytes.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _splits(tokenizers: Any) -> Any:
    """Return the pre-tokenizer of `train_bytes`. It isolates newlines and digits, then splits as GPT-2 does."""
    return tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split("\n", "isolated"),
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def load_json(data: bytes, path: Path) -> HuggingFaceTokenizer:
    """Parse a tokenizer from the content of its file; ``path`` names the file in errors.

    Raises:
        UserError: see `pretrain.data.tokenizers.load_tokenizer`.
    """
    return HuggingFaceTokenizer(data, path)


def train_bytes(lines: Iterable[str], output: Path, vocab_size: int, special: Sequence[str]) -> HuggingFaceTokenizer:
    """Train byte-level BPE and write its file. Each byte has a token, and digits and newlines are separate tokens.

    Args:
        special: names of the special tokens, whose ids are 0, 1, ...

    Raises:
        UserError: the text has too few pairs of tokens to merge for the vocabulary.
    """
    tokenizers = require("tokenizers", "pretrain", f"training {output}")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = _splits(tokenizers)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[tokenizers.AddedToken(name, special=True, normalized=False) for name in special],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(lines, trainer)
    if (most := model.get_vocab_size()) < vocab_size:
        raise UserError(
            f"vocab_size={vocab_size} exceeds what this text can fill: use at most {most}, or train on more text"
        )
    with replacing(output) as (file,):
        file.write(model.to_str(pretty=True).encode() + b"\n")
    return load_json(output.read_bytes(), output)
