"""Tokenizers, trained here or elsewhere: sentencepiece models, and models of Hugging Face ``tokenizers``, whose file
names end in ``.json``. Tokenizers trained here decode every text exactly.
"""

import logging
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from fmoe.errors import UserError
from pretrain.data.corpus import example_command
from pretrain.data.documents import Piece, open_sources, read_source
from pretrain.data.sources import Skips, stop
from pretrain.data.streams import Mixture
from pretrain.data.tokenizers.base import (
    BEGIN,
    CLS,
    END_OF_DOCUMENT,
    MASK,
    PAD,
    SEP,
    UNKNOWN,
    Tokenizer,
    sentinel,
)
from pretrain.data.tokenizers.huggingface import load_json, train_bytes
from pretrain.data.tokenizers.sentencepiece import ALWAYS_ALONE, LONGEST_LINE, load_model, train_model
from pretrain.files import refuse_inputs

__all__ = ["Tokenizer", "default_sentinels", "load_tokenizer", "sample_lines", "train_tokenizer"]

MODEL_TYPES = ("bpe", "unigram", "bytes")
DEFAULT_VOCAB_SIZE = 2048
DEFAULT_MAX_BYTES = 16 << 20

logger = logging.getLogger(__name__)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a sentencepiece model or, if the file name ends in ``.json``, a Hugging Face tokenizer.

    Raises:
        UserError: the file is missing, is neither of these, or has no end-of-document token; a file beside it that
            declares special tokens is damaged or contradicts it.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        command = example_command(path) or f"fmoe data tokenizer TEXT --out {path}"
        hint = f"; make it with {command}" if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"cannot read the tokenizer {path}: {error.strerror}{hint}") from error
    return load_json(data, path) if path.suffix.lower() == ".json" else load_model(data, path)


def default_sentinels(vocab_size: int) -> int:
    """Return the default number of sentinels, T5's tokens ``<extra_id_N>``: 1/64 of ``vocab_size``, at most 100."""
    return min(100, vocab_size // 64)


def train_tokenizer(
    inputs: Iterable[str | Path] | Mixture,
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
) -> Tokenizer:
    """Train a tokenizer on a sample of the text and write its model file.

    Text is kept exactly: it is not normalised, and no space is added or dropped. A character outside the vocabulary
    falls back to its UTF-8 bytes. Newlines are always separate tokens; in a sentencepiece model, tabs and carriage
    returns are too. A special token spelled in a text is encoded as text. The same inputs give the same file, byte
    for byte.

    Args:
        inputs: files and folders, as for `pretrain.data.documents.find_sources`, or a `pretrain.data.streams.Mixture`;
            all are read to the end.
        output: the model file, which is replaced if it exists. A name that ends in ``.json`` gives byte-level BPE of
            Hugging Face ``tokenizers``; any other name gives a sentencepiece model. Both have the same special tokens.
        vocab_size: number of tokens in the vocabulary, including 7 special ones, the sentinels, 256 bytes and, with
            sentencepiece, newline, tab and carriage return. None for `DEFAULT_VOCAB_SIZE` or, if ``model_type`` is
            "bytes", for the sum of these.
        model_type: "bpe", "unigram" or "bytes". "unigram" is only for sentencepiece, and 10 to 20 times slower to
            train. "bytes" has one token per byte; it needs an ``output`` that ends in ``.json``, but no text.
        max_bytes: upper bound on the UTF-8 bytes of the sample. From a larger corpus, the sample takes
            every 2nd, 4th, 8th, ... line.
        text_key: key or column with the text in JSON files and tables.
        sentinels: number of tokens ``<extra_id_N>`` for T5. None for `default_sentinels` or, if ``model_type`` is
            "bytes", for 0.
        character_coverage: share of the text's characters with a token of their own; the rarest are encoded in bytes.
            It has no effect on byte-level BPE.
        format: format of all files, one of `pretrain.data.sources.FORMATS`; "auto" chooses it by their suffixes.
        skip_errors: skip unreadable documents, with a warning.

    Raises:
        UserError: a value out of range, unreadable inputs, no text, too little text for the vocabulary, or a vocabulary
            too small for the text's characters.
    """
    inputs = inputs if isinstance(inputs, Mixture) else list(inputs)
    is_json = output.suffix.lower() == ".json"
    if model_type not in MODEL_TYPES:
        raise UserError(f"model_type={model_type!r} must be one of {', '.join(MODEL_TYPES)}")
    if model_type == "bytes":
        return _bytes(output, vocab_size, 0 if sentinels is None else sentinels)
    vocab_size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    sentinels = default_sentinels(vocab_size) if sentinels is None else sentinels
    if not inputs:
        raise UserError(f"model_type={model_type!r} needs text to train on: pass at least one file, folder or dataset")
    if is_json and model_type != "bpe":
        raise UserError(
            f"model_type={model_type!r} is not supported for {output.name}: use model_type='bpe' or another suffix"
        )
    for name, value, least in (("max_bytes", max_bytes, 1), ("sentinels", sentinels, 0)):
        if value < least:
            raise UserError(f"{name}={value} must be at least {least}")
    alone = 0 if is_json else len(ALWAYS_ALONE)
    least = 7 + sentinels + 256 + alone
    if vocab_size < least:
        raise UserError(
            f"vocab_size={vocab_size} must be at least {least}: 7 special pieces, sentinels={sentinels}, 256 bytes and "
            f"{alone} line characters"
        )
    if not 0.5 <= character_coverage <= 1:
        raise UserError(f"character_coverage={character_coverage} must be between 0.5 and 1")
    if format == "bytes":
        raise UserError("format='bytes' is not text to train on: use model_type='bytes', which needs no input")
    sources = open_sources(inputs, text_key, format=format)
    refuse_inputs([output], [file for source in sources for file in source.files()])
    skips = Skips()
    on_error = skips if skip_errors else stop
    pieces = (piece for source in sources for piece in read_source(source, text_key, on_error))
    sentences = sample_lines(pieces, max_bytes)
    if skips.count:
        logger.warning("%d unreadable documents are skipped, the first: %s", skips.count, skips.first[0])
    if not sentences:
        raise UserError(f"no text to train a tokenizer on in {', '.join(source.shown for source in sources)}")
    special = _special(sentinels)
    if is_json:
        return train_bytes(sentences, output, vocab_size, special)
    return train_model(sentences, output, vocab_size, special, model_type, character_coverage)


def _special(sentinels: int) -> list[str]:
    return [PAD, UNKNOWN, BEGIN, END_OF_DOCUMENT, CLS, SEP, MASK, *map(sentinel, range(sentinels))]


def _bytes(output: Path, vocab_size: int | None, sentinels: int) -> Tokenizer:
    """Write a tokenizer with one token per byte."""
    if sentinels < 0:
        raise UserError(f"sentinels={sentinels} must be at least 0")
    if output.suffix.lower() != ".json":
        raise UserError(f"model_type='bytes' needs an output that ends in .json, not {output.name}")
    size = 7 + sentinels + 256
    if vocab_size not in (None, size):
        raise UserError(
            f"vocab_size={vocab_size} must be {size}: model_type='bytes' has 7 special pieces, sentinels={sentinels} "
            "and 256 bytes"
        )
    return train_bytes([], output, size, _special(sentinels))


def sample_lines(pieces: Iterable[Piece], max_bytes: int) -> list[str]:
    """Return every s-th line of the text, with s the smallest power of two whose sample is within ``max_bytes``.

    Lines have no newline at their end. Empty lines are skipped, and lines above `LONGEST_LINE` characters are split.
    The pieces are read once, in bounded memory.
    """
    lines: list[str] = []
    seen = 0
    stride = 1
    size = 0
    for piece in pieces:
        assert isinstance(piece.text, str)
        for line in _sentences(piece.text):
            if seen % stride == 0:
                lines.append(line)
                size += len(line.encode())
            seen += 1
            while size > max_bytes and len(lines) > 1:
                lines = lines[::2]
                stride = stride * 2
                size = sum(len(kept.encode()) for kept in lines)
    return lines


def _sentences(text: str) -> Iterable[str]:
    for line in text.split("\n"):
        cuts = [*range(0, len(line), LONGEST_LINE), len(line)]
        yield from (line[start:stop] for start, stop in pairwise(cuts))
