"""sentencepiece tokenizers: one model file with BPE or unigram pieces."""

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from fmoe.errors import UserError
from pretrain.data.files import replacing
from pretrain.data.tokenizers.base import BEGIN, END_OF_DOCUMENT, PAD, SPECIAL_NAMES, UNKNOWN, Tokenizer

ALWAYS_ALONE = ("\n", "\t", "\r")  # separate tokens
LONGEST_LINE = 4096
"""Limit in characters; longer lines are split for training."""
_SPACE_MARK = "\u2581"  # sentencepiece's own spelling of a space


class SentencePieceTokenizer(Tokenizer):
    """A loaded sentencepiece model."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, path: Path, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.vocab_size: int = processor.vocab_size()
        self.end_of_document: int = processor.eos_id()
        self.pad: int | None = processor.pad_id() if processor.pad_id() >= 0 else None
        self._processor = processor
        self._id_of = {processor.id_to_piece(i): i for i in range(self.vocab_size)}
        self.sentinels = self._consecutive_sentinels()
        # In foreign models, special pieces may be user-defined symbols, as Megatron requires, not control symbols.
        self._special = {p: i for p, i in self._id_of.items() if processor.is_control(i) or p in SPECIAL_NAMES}
        self.special_ids = frozenset([*self._special.values(), *self.sentinels, processor.unk_id()])
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
    processor = sentencepiece.SentencePieceProcessor()
    try:
        if not data:
            raise RuntimeError("the file is empty")
        processor.load_from_serialized_proto(data)
        tokenizer = SentencePieceTokenizer(processor, path, hashlib.sha256(data).hexdigest())
    except (RuntimeError, UnicodeDecodeError) as error:  # the latter from a damaged piece
        raise UserError(f"{path} is not a sentencepiece model, or is damaged: {error}") from error
    if not 0 <= tokenizer.end_of_document < tokenizer.vocab_size:
        raise UserError(f"the tokenizer {path} has no end-of-sentence piece: fmoe needs one to end documents")
    return tokenizer


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
    if found := re.search(r"Please set it to a value <= (\d+)", text):
        return UserError(
            f"vocab_size={vocab_size} exceeds what this text can fill: use at most {found[1]}, or train on more text"
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return UserError(
            f"vocab_size={vocab_size} is too small: the special pieces, bytes and characters of this text are "
            f"{found[1]} pieces; raise vocab_size to at least {found[1]}, or lower "
            f"character_coverage={character_coverage}"
        )
    return error
