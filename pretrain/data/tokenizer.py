"""Tokenizers that give every text back exactly, trained here or elsewhere.

sentencepiece models and (`pretrain.data.huggingface`) those of Hugging Face ``tokenizers``, which end in ``.json``.
"""

import hashlib
import io
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import sentencepiece

from fmoe.errors import UserError
from pretrain.data.documents import Piece, find_sources, read_source
from pretrain.data.files import refuse_inputs, replacing
from pretrain.data.sources import Skips, stop

MODEL_TYPES = ("bpe", "unigram", "bytes")
DEFAULT_VOCAB_SIZE = 2048
DEFAULT_MAX_BYTES = 16 << 20
PAD, UNKNOWN, BEGIN, END_OF_DOCUMENT = "<pad>", "<unk>", "<bos>", "<eod>"  # ids 0, 1, 2, 3
CLS, SEP, MASK = "<cls>", "<sep>", "<mask>"  # ids 4, 5, 6; the sentinels follow
# What a special piece is for, and the names that it has here and elsewhere, the first one found is taken.
ROLES = {
    "pad": (PAD, "[PAD]"),
    "cls": (CLS, "[CLS]", "<s>"),
    "sep": (SEP, "[SEP]", "</s>"),
    "mask": (MASK, "[MASK]"),
}
SPECIAL_NAMES = frozenset(name for names in ROLES.values() for name in names)
_ALWAYS_ALONE = ("\n", "\t", "\r")
_LONGEST_SENTENCE = 4096  # characters; a longer line enters training in parts
_SPACE_MARK = "\u2581"  # sentencepiece's own spelling of a space

logger = logging.getLogger(__name__)


def sentinel(number: int) -> str:
    """The piece that stands for the masked span ``number`` of T5."""
    return f"<extra_id_{number}>"


def default_sentinels(vocab_size: int) -> int:
    """T5's 100 where they are a small part of the vocabulary, else 1/64 of it: 32 of 2,048, enough for 512 tokens."""
    return min(100, vocab_size // 64)


def train_tokenizer(
    inputs: Iterable[str | Path],
    output: Path,
    vocab_size: int | None = None,
    model_type: str = "bpe",
    max_bytes: int = DEFAULT_MAX_BYTES,
    *,
    text_key: str = "text",
    sentinels: int | None = None,
    character_coverage: float = 0.9999,
    format: str = "auto",
    skip_errors: bool = False,
) -> "Tokenizer":
    """Trains a tokenizer on a sample of the text and writes its model file.

    Text is taken as it is: no normalisation, no space put in front, no spaces dropped; a character outside the
    vocabulary falls back to its UTF-8 bytes; newline, tab and carriage return are always tokens of their own; the
    spelling of a special piece in a text is only text. The same inputs give the same file, byte for byte.

    Args:
        inputs: files and folders as `iter_documents` reads them; all are read through once.
        output: the model file; replaced where it exists. One that ends in ``.json`` is of Hugging Face ``tokenizers``,
            byte-level BPE with the same special pieces: every byte has a piece, and coverage means nothing.
        vocab_size: pieces in all, the special ones (7 and the sentinels), 256 bytes and 3 line characters included;
            None for `DEFAULT_VOCAB_SIZE`.
        model_type: "bpe", "unigram" (10 to 20 times slower to train), or "bytes": a token a byte, of no text at all,
            in a ``.json``, with 7 special pieces, the sentinels (none unless told) and 256 others.
        max_bytes: UTF-8 bytes of the sample. From a larger corpus every 2nd, 4th, 8th, ... line is taken, so that the
            sample is spread evenly over all of it.
        text_key: key or column of the text in JSON lines and tables.
        sentinels: pieces ``<extra_id_N>`` for T5; `default_sentinels` where None.
        character_coverage: share of the text's characters that get a piece of their own, the rarest are left to bytes.
        format: of all files, one of `pretrain.data.sources.FORMATS`; "auto" goes by their suffixes.
        skip_errors: leave out documents that cannot be read; a warning counts them.

    Raises:
        UserError: a value out of range, unreadable inputs, no text, too little text for the vocabulary, or a vocabulary
            too small for the text's characters.
    """
    inputs = list(inputs)
    is_json = output.suffix.lower() == ".json"
    if model_type == "bytes":
        return _bytes(output, vocab_size, 0 if sentinels is None else sentinels)
    vocab_size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    sentinels = default_sentinels(vocab_size) if sentinels is None else sentinels
    if not inputs:
        raise UserError(f"no text to train a tokenizer of model_type={model_type!r} on: only 'bytes' needs none")
    if is_json and model_type != "bpe":
        raise UserError(
            f"model_type={model_type!r} is of sentencepiece; {output.name} holds byte-level BPE, model_type='bpe'"
        )
    if model_type not in MODEL_TYPES:
        raise UserError(f"model_type={model_type!r} is none of {', '.join(MODEL_TYPES)}")
    for name, value, least in (("max_bytes", max_bytes, 1), ("sentinels", sentinels, 0)):
        if value < least:
            raise UserError(f"{name}={value} is less than {least}")
    if vocab_size < (least := 7 + sentinels + 256 + len(_ALWAYS_ALONE)):
        raise UserError(
            f"vocab_size={vocab_size} is less than {least}: 7 special pieces, sentinels={sentinels}, 256 bytes and "
            f"{len(_ALWAYS_ALONE)} line characters"
        )
    if not 0.5 <= character_coverage <= 1:
        raise UserError(f"character_coverage={character_coverage} is not between 0.5 and 1")
    sources = find_sources(inputs, text_key, format=format)
    refuse_inputs([output], [file for source in sources for file in source.files()])
    skips = Skips()
    on_error = skips if skip_errors else stop
    pieces = (piece for source in sources for piece in read_source(source, text_key, on_error))
    sentences = sample_lines(pieces, max_bytes)
    if skips.count:
        logger.warning("%d documents are left out, which cannot be read, the first: %s", skips.count, skips.first[0])
    if not sentences:
        raise UserError(f"no text to train a tokenizer on in {', '.join(map(str, inputs))}")
    special = _special(sentinels)
    if is_json:
        from pretrain.data.huggingface import train_bytes  # tokenizers, only where they are needed

        return train_bytes(sentences, output, vocab_size, special)

    model = io.BytesIO()
    sentencepiece.set_min_log_level(2)  # errors only: they come as exceptions
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
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
            user_defined_symbols=list(_ALWAYS_ALONE),
            control_symbols=special[4:],
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece=PAD,
            unk_piece=UNKNOWN,
            bos_piece=BEGIN,
            eos_piece=END_OF_DOCUMENT,
            max_sentence_length=4 * _LONGEST_SENTENCE,  # bytes; sentencepiece leaves longer ones out
            num_threads=2,  # a constant: it is stored in the model, and unigram's sums depend on it
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(error, vocab_size, character_coverage) from error
    with replacing(output) as (file,):
        file.write(model.getvalue())
    return Tokenizer.load(output)


def _special(sentinels: int) -> list[str]:
    return [PAD, UNKNOWN, BEGIN, END_OF_DOCUMENT, CLS, SEP, MASK, *map(sentinel, range(sentinels))]


def _bytes(output: Path, vocab_size: int | None, sentinels: int) -> "Tokenizer":
    """The tokenizer of single bytes, written."""
    from pretrain.data.huggingface import train_bytes  # tokenizers, only where they are needed

    if sentinels < 0:
        raise UserError(f"sentinels={sentinels} is less than 0")
    if output.suffix.lower() != ".json":
        raise UserError(f"model_type='bytes' is written as .json, not {output.name}")
    size = 7 + sentinels + 256
    if vocab_size not in (None, size):
        raise UserError(
            f"vocab_size={vocab_size} is not {size}: model_type='bytes' has 7 special pieces, sentinels={sentinels} "
            "and 256 bytes"
        )
    return train_bytes([], output, size, _special(sentinels))


def sample_lines(pieces: Iterable[Piece], max_bytes: int) -> list[str]:
    """Every s-th line of the text, with s the smallest power of two for which they stay within ``max_bytes``.

    One pass in bounded memory: when the lines held pass the limit, s doubles and every second one is let go. Lines
    come without their newline; empty ones are left out, long ones cut.
    """
    lines: list[str] = []
    seen, stride, size = 0, 1, 0
    for piece in pieces:
        for line in _sentences(piece.text):
            if seen % stride == 0:
                lines.append(line)
                size += len(line.encode())
            seen += 1
            while size > max_bytes and len(lines) > 1:
                lines, stride = lines[::2], stride * 2
                size = sum(len(kept.encode()) for kept in lines)
    return lines


def _sentences(text: str) -> Iterable[str]:
    for line in text.split("\n"):
        cuts = [*range(0, len(line), _LONGEST_SENTENCE), len(line)]
        yield from (line[start:stop] for start, stop in pairwise(cuts))


def _explained(error: RuntimeError, vocab_size: int, character_coverage: float) -> Exception:
    """sentencepiece's complaint about the vocabulary as one line of ours; any other error as it is."""
    text = str(error)
    if found := re.search(r"Please set it to a value <= (\d+)", text):
        return UserError(
            f"vocab_size={vocab_size} is more than this text can fill: at most {found[1]}, or train on more text"
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return UserError(
            f"vocab_size={vocab_size} is too small: the special pieces, bytes and characters of this text take "
            f"{found[1]} before the first merge; raise it or lower character_coverage={character_coverage}"
        )
    return error


class Tokenizer:
    """A loaded sentencepiece model. ``decode(encode(text)) == text`` holds for models of `train_tokenizer`.

    Attributes:
        path: the model file.
        fingerprint: SHA-256 of the model file, hexadecimal.
        vocab_size: pieces; ids are ``0 <= id < vocab_size``.
        end_of_document: id that ends a document (sentencepiece's eos).
        pad: id of padding, or None in a model from elsewhere that has none.
        sentinels: ids of ``<extra_id_0>``, ``<extra_id_1>``, ...
        special_ids: ids that stand for no text: those above, begin, unknown, cls, sep, mask, ...
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, path: Path, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.vocab_size: int = processor.vocab_size()
        self.end_of_document: int = processor.eos_id()
        self.pad: int | None = processor.pad_id() if processor.pad_id() >= 0 else None
        self._processor = processor
        self._id_of = {processor.id_to_piece(i): i for i in range(self.vocab_size)}
        self.sentinels = self._consecutive_sentinels()
        # In models from elsewhere they may be user-defined symbols, as Megatron wants them, and no control symbols.
        self._special = {p: i for p, i in self._id_of.items() if processor.is_control(i) or p in SPECIAL_NAMES}
        self.special_ids = frozenset([*self._special.values(), *self.sentinels, processor.unk_id()])
        # Where lines are independent, they are encoded apart: faster than a long text at once.
        self._newline = self._id_of["\n"] if self._lines_are_independent() else None
        # sentencepiece writes a space as U+2581 and so would give a literal U+2581 back as a space: spell it in bytes.
        mark = [self._id_of.get(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
        self._mark = None if self._newline is None or None in mark else mark

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a model file: a sentencepiece model or, if its name ends in ``.json``, one of Hugging Face tokenizers.

        Raises:
            UserError: missing, no such model, or one without a piece that ends documents (sentencepiece's eos).
        """
        path = Path(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {path}: {error.strerror}") from error
        if path.suffix.lower() == ".json":
            from pretrain.data.huggingface import load_json  # tokenizers, only where they are needed

            return load_json(data, path)
        sentencepiece.set_min_log_level(2)
        processor = sentencepiece.SentencePieceProcessor()
        try:
            if not data:
                raise RuntimeError("the file is empty")
            processor.load_from_serialized_proto(data)
            tokenizer = cls(processor, path, hashlib.sha256(data).hexdigest())
        except (RuntimeError, UnicodeDecodeError) as error:  # the latter from a damaged piece
            raise UserError(f"{path} is not a sentencepiece model, or damaged: {error}") from error
        if not 0 <= tokenizer.end_of_document < tokenizer.vocab_size:
            raise UserError(f"the tokenizer {path} has no end-of-sentence piece, which ends documents here")
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """The ids of a text; no special id is ever among them."""
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
        """The text of ids; special ids are nothing in it, bytes that are not UTF-8 become U+FFFD.

        Raises:
            UserError: an id outside the vocabulary.
        """
        return self._processor.decode(self._checked(ids))

    @property
    def ids(self) -> Mapping[str, int]:
        """Of all pieces by their spelling, special ones included."""
        return self._id_of

    def score(self, i: int) -> float:
        """Of a piece of a sentencepiece model: its log probability (unigram), or minus the rank of its merge (bpe)."""
        return self._processor.get_score(i)

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of the text that each id stands for, 0 of special ones; int64 [vocab_size].

        Their sum over the tokens of a text are the bytes of what `decode` gives, if the tokenizer keeps every text as
        it is. One that drops or adds a space at the begin of a text is off by that."""
        return np.array([0 if i in self.special_ids else self._bytes_of(i) for i in range(self.vocab_size)], np.int64)

    def _bytes_of(self, i: int) -> int:
        if self._processor.is_byte(i):
            return 1
        return len(self._processor.id_to_piece(i).replace(_SPACE_MARK, " ").encode())

    def special(self, piece: str) -> int:
        """The id of a special piece such as ``"<mask>"``.

        Raises:
            UserError: this model has no such special piece.
        """
        if piece not in self._special:
            raise UserError(f"the tokenizer {self.path} has no special piece {piece!r}")
        return self._special[piece]

    def role(self, name: str) -> int:
        """The id of the special piece that is for ``name``, one of `ROLES`, whatever it is called in this model.

        Raises:
            UserError: this model has none.
        """
        if name == "pad" and self.pad is not None:
            return self.pad
        for piece in ROLES[name]:
            if piece in self._special:
                return self._special[piece]
        raise UserError(f"the tokenizer {self.path} has no piece for {name}, {' or '.join(map(repr, ROLES[name]))}")

    def _lines_are_independent(self) -> bool:
        """Whether a newline is a token of its own and nothing is added or dropped at line ends, as in our models."""
        if any("\n" in piece and piece != "\n" for piece in self._id_of) or "\n" not in self._id_of:
            return False
        line = self._processor.encode(" a ")
        return self._processor.encode(" a \n a ") == [*line, self._id_of["\n"], *line]

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
