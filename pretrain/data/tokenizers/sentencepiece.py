"""sentencepiece tokenizers: one model file with BPE or unigram pieces."""

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from fmoe.errors import UserError, require
from pretrain.data.tokenizers.base import (
    BEGIN,
    END_OF_DOCUMENT,
    PAD,
    SPECIAL_NAMES,
    UNKNOWN,
    Declared,
    Tokenizer,
    named_sentinels,
    read_declared,
)
from pretrain.files import replacing

ALWAYS_ALONE = ("\n", "\t", "\r")  # separate tokens
LONGEST_LINE = 4096
"""Limit in characters; longer lines are split for training."""
_SPACE_MARK = "\u2581"  # sentencepiece's own spelling of a space


class SentencePieceTokenizer(Tokenizer):
    """A loaded sentencepiece model."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.path = path
        self.fingerprint = hashlib.sha256(data).hexdigest()
        declared = read_declared(path)
        self.data = _with_control_symbols(data, path, declared)
        """The model, with all special tokens as control symbols."""
        self._processor = processor = _processor(self.data)
        self.vocab_size: int = processor.vocab_size()
        self._id_of = _ids(processor)
        self._newline = self._mark = None  # for `_spelled`
        named = (SPECIAL_NAMES | named_sentinels(self._id_of)).intersection(self._id_of)
        special = named.difference(self._spelled(named))
        self._special = {
            piece: i
            for piece, i in self._id_of.items()
            if processor.is_control(i) or processor.is_unknown(i) or piece in special
        }
        own = {"bos": processor.bos_id(), "eos": processor.eos_id(), "pad": processor.pad_id()}
        self._set_roles(declared, {role: i for role, i in own.items() if i >= 0})
        # Lines are encoded separately if they are independent, which is faster than encoding a long text at once.
        self._newline = self._id_of["\n"] if self._lines_are_independent() else None
        # sentencepiece writes a space as U+2581, so it would decode a literal U+2581 to a space: spell it in bytes.
        pieces = [f"<0x{byte:02X}>" for byte in _SPACE_MARK.encode()]
        mark = [self._id_of[piece] for piece in pieces if piece in self._id_of]
        self._mark = None if self._newline is None or len(mark) < len(pieces) else mark

    def encode(self, text: str) -> list[int]:
        if self._mark is not None and _SPACE_MARK in text:
            first, *rest = text.split(_SPACE_MARK)
            ids = self.encode(first)
            for part in rest:
                ids += self._mark
                ids += self.encode(part)
            return ids
        if self._newline is None:
            return self._processor.encode(text)
        ids = []
        for line in self._processor.encode(text.split("\n"), num_threads=1):
            ids += line
            ids.append(self._newline)
        ids.pop()  # n lines, n - 1 newlines
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._processor.decode(self._checked(ids))

    def score(self, i: int) -> float:
        """Return the log probability of a piece (unigram), or the negative rank of its merge (bpe)."""
        return self._processor.get_score(i)

    def _bytes_of(self, i: int) -> int:
        if self._processor.is_byte(i):
            return 1
        return len(self._processor.id_to_piece(i).replace(_SPACE_MARK, " ").encode())

    def _lines_are_independent(self) -> bool:
        """Return whether a text may be encoded line by line, with a newline token between the lines."""
        if any("\n" in piece and piece != "\n" for piece in self._id_of) or "\n" not in self._id_of:
            return False
        line = self._processor.encode(" a ")
        return self._processor.encode(" a \n a ") == [*line, self._id_of["\n"], *line]


def load_model(data: bytes, path: Path) -> SentencePieceTokenizer:
    """Parse a tokenizer from the content of its file; ``path`` names the file in errors.

    Raises:
        UserError: see `pretrain.data.tokenizers.load_tokenizer`.
    """
    sentencepiece.set_min_log_level(2)
    try:
        return SentencePieceTokenizer(data, path)
    except (RuntimeError, UnicodeDecodeError) as error:  # the latter from a damaged piece
        raise UserError(f"{path} is not a sentencepiece model, or is damaged: {error}") from error


def _processor(data: bytes) -> sentencepiece.SentencePieceProcessor:
    if not data:
        raise RuntimeError("the file is empty")
    processor = sentencepiece.SentencePieceProcessor()
    processor.load_from_serialized_proto(data)
    return processor


def _ids(processor: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
    return {processor.id_to_piece(i): i for i in range(processor.vocab_size())}


def _with_control_symbols(data: bytes, path: Path, declared: Declared) -> bytes:
    """Return a model without user-defined symbols that have a role, since a text could spell these.

    Such symbols, which Megatron requires, and declared tokens become control symbols.
    """
    processor = _processor(data)
    ids = _ids(processor)
    roles = SPECIAL_NAMES | named_sentinels(ids)
    declared_names = set(declared.names.values())
    if not any(
        name in ids and not (processor.is_control(ids[name]) or processor.is_unknown(ids[name]))
        for name in roles | declared_names
    ):
        return data
    proto = parse_model(data, path)
    for piece in proto.pieces:
        is_symbol = piece.type == piece.USER_DEFINED and piece.piece in roles | declared_names
        if is_symbol or (piece.type == piece.NORMAL and declared.is_special(piece.piece)):
            piece.type = piece.CONTROL
    return proto.SerializeToString()


def parse_model(data: bytes, path: Path) -> Any:
    """Return sentencepiece's ``ModelProto`` of a model; ``path`` names the file in errors."""
    require("google.protobuf", "pretrain", f"reading {path}")
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    return messages.ModelProto.FromString(data)


def train_model(
    lines: Iterable[str],
    output: Path,
    vocab_size: int,
    special: Sequence[str],
    model_type: str,
    character_coverage: float,
) -> SentencePieceTokenizer:
    """Train a model on lines of text and write its file.

    Args:
        special: names of the special tokens, whose ids are 0, 1, ...
        model_type, character_coverage: see `pretrain.data.tokenizers.train_tokenizer`.

    Raises:
        UserError: the vocabulary is too large for the text, or too small for its characters.
    """
    model = io.BytesIO()
    sentencepiece.set_min_log_level(2)  # errors only: they are raised as exceptions
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            character_coverage=character_coverage,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,  # one piece for an indentation
            split_digits=True,
            byte_fallback=True,
            user_defined_symbols=list(ALWAYS_ALONE),
            control_symbols=special[4:],
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece=PAD,
            unk_piece=UNKNOWN,
            bos_piece=BEGIN,
            eos_piece=END_OF_DOCUMENT,
            max_sentence_length=4 * LONGEST_LINE,  # bytes; sentencepiece skips longer ones
            num_threads=2,  # a constant: it is stored in the model, and unigram's sums depend on it
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(error, vocab_size, character_coverage) from error
    with replacing(output) as (file,):
        file.write(model.getvalue())
    return load_model(output.read_bytes(), output)


def _explained(error: RuntimeError, vocab_size: int, character_coverage: float) -> Exception:
    """Convert an error about the vocabulary's size to a UserError; return any other error unchanged."""
    text = str(error)
    most = re.search(r"Please set it to a value <= (\d+)", text)
    if most:
        return UserError(
            f"vocab_size={vocab_size} exceeds what this text can fill: use at most {most[1]}, or train on more text"
        )
    least = re.search(r"smaller than required_chars\. \d+ vs (\d+)", text)
    if least:
        return UserError(
            f"vocab_size={vocab_size} is too small: the special pieces, bytes and characters of this text are "
            f"{least[1]} pieces; raise vocab_size to at least {least[1]}, or lower "
            f"character_coverage={character_coverage}"
        )
    return error
