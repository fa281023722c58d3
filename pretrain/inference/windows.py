"""Samples for an evaluation, from a whole text or corpus in order.

The stream is all documents in order, each followed by its end token. With ``data.bos``, each begins with BOS. Samples
have the form of training samples (`pretrain.models`). The last sample may be shorter, and is not padded. A GPT
predicts each token but BOS once; with ``data.document_mask``, it does not predict the first token of a document.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from fmoe.errors import UserError
from pretrain.config import Recipe
from pretrain.data.counts import outside_vocabulary
from pretrain.data.documents import find_sources, read_source
from pretrain.data.indexed import corpus_paths
from pretrain.data.inputs import VALIDATION_SEED
from pretrain.data.opening import naming, open_corpus
from pretrain.data.packing import mask_documents
from pretrain.data.tokenizers import Tokenizer
from pretrain.models import kind_of

_CHUNK = 1 << 20  # tokens read from a corpus at a time

Sample = dict[str, np.ndarray]


class Text:
    """Tokens of text files and corpora (.bin/.idx pairs of token ids), read as one stream.

    Args:
        paths: prefixes of corpora, or text files and folders, as for `pretrain.data.documents.find_sources`.
        text_key: key or column with the text in JSON files and tables.
        format: format of the text files, as for `find_sources`.
        bos: id that begins each document; None to begin with the text.

    Attributes:
        num_tokens: total number of tokens; None if ``paths`` include text, which is tokenized only while it is read.

    Raises:
        UserError: data are missing, or a corpus was prepared with another tokenizer. `tokens` raises it if text is
            unreadable, or a token id of a corpus is outside ``0 <= id < vocab_size``.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        tokenizer: Tokenizer,
        vocab_size: int,
        text_key: str = "text",
        format: str = "auto",
        bos: int | None = None,
    ):
        self.bos = bos
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._key = text_key
        self._format = format
        with naming("--data"):
            if format == "bytes":
                _ = tokenizer.byte_ids  # raises unless the tokenizer has one token per byte
            self._parts = [self._open(path) for path in paths]
        has_text = any(isinstance(part, list) for part in self._parts)
        self.num_tokens = None if has_text else sum(part.num_tokens for part in self._parts)

    def _open(self, path: Path):
        if path.name not in ("", "..") and all(file.is_file() for file in corpus_paths(path)[::2]):
            return open_corpus(path, self._tokenizer, self.bos)
        if not path.exists():
            raise UserError(f"{path} is neither a file or folder of text nor the prefix of a .bin/.idx pair")
        if path.suffix in (".bin", ".idx"):
            raise UserError(f"{path}: pass the prefix, without {path.suffix}")
        return find_sources([path], self._key, format=self._format)

    def tokens(self) -> Iterator[np.ndarray]:
        """Yield the stream in chunks of any length, int64 [n]."""
        for part in self._parts:
            yield from self._text(part) if isinstance(part, list) else self._corpus(part)

    def _corpus(self, corpus) -> Iterator[np.ndarray]:
        for start in range(0, corpus.num_tokens, _CHUNK):
            chunk = corpus.flat[start : start + _CHUNK].astype(np.int64)
            if chunk.min() < 0 or chunk.max() >= self._vocab_size:
                wrong = chunk.min() if chunk.min() < 0 else chunk.max()
                with naming("--data"):
                    raise outside_vocabulary(corpus.prefix, int(wrong), self._vocab_size)
            yield chunk

    def _text(self, sources) -> Iterator[np.ndarray]:
        length = 0  # of the document so far
        for source in sources:
            for piece in read_source(source, self._key):
                ids = list(self._tokenizer.encode_piece(piece.text)) if piece.text else []
                if ids and not length and self.bos is not None:
                    ids.insert(0, self.bos)
                length += len(ids)
                if piece.ends_document:
                    ids += [self._tokenizer.end_of_document] if length else []
                    length = 0
                yield np.array(ids, dtype=np.int64)


def samples_of(recipe: Recipe, tokenizer: Tokenizer, text: Text, stride: int | None = None) -> Iterator[Sample]:
    """Yield samples for the recipe's kind of model (GPT, T5 or BERT), made from ``text``.

    Args:
        stride: tokens from one window of a GPT to the next; None for the window's length.

    Raises:
        UserError: there are no tokens to predict.
    """
    make = _gpt_samples if recipe.model.objective == "gpt" else _corrupted_samples
    samples = make(recipe, tokenizer, text, stride)
    first = next(samples, None)
    if first is None:
        raise UserError("--data has no tokens to predict")
    yield first
    yield from samples


def _gpt_samples(recipe: Recipe, tokenizer: Tokenizer, text: Text, stride: int | None) -> Iterator[Sample]:
    length = recipe.model.sequence_length
    end = tokenizer.end_of_document
    before = end if text.bos is None else None  # BOS begins the stream
    for block, first in gpt_windows(text.tokens(), before, length, length if stride is None else stride):
        ones = np.ones(len(block) - 1, dtype=np.int64)
        sample = {"tokens": block[:-1], "labels": block[1:], "loss_mask": ones}
        if recipe.data.document_mask:
            sample = mask_documents(block, end)
        is_left_out = np.arange(len(ones)) < first
        if text.bos is not None:
            is_left_out |= (sample["labels"] == text.bos) & (sample["tokens"] == end)
        sample["loss_mask"] = np.where(is_left_out, 0, sample["loss_mask"])
        yield sample


def _corrupted_samples(recipe: Recipe, tokenizer: Tokenizer, text: Text, _: int | None) -> Iterator[Sample]:
    """Yield samples of a T5 (span corruption) or a BERT (masking)."""
    kind = kind_of(recipe)
    for number, block in enumerate(cut(text.tokens(), kind.block_length(recipe))):
        if len(block) == 1 and recipe.model.kind == "t5":  # span corruption needs at least two tokens
            return
        yield kind.samples(recipe, _One(block), tokenizer, VALIDATION_SEED, len(block))[number]


class _One:
    """`TokenBlocks` with a single block of tokens, which every index returns."""

    samples_per_epoch = 1

    def __init__(self, block: np.ndarray):
        self._block = block

    def __getitem__(self, n: int) -> np.ndarray:
        return self._block


def gpt_windows(
    parts: Iterable[np.ndarray], end: int | None, length: int, stride: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield windows of a stream of tokens, which overlap if ``stride`` is less than ``length``.

    An end-of-document token is put before the stream, so that the stream's first token is predicted like the first
    token of any other document.

    Args:
        parts: the stream's tokens in chunks of any length, int64 [n].
        end: id of the end-of-document token; None to put no token before the stream, whose first token is then not
            predicted.
        length: maximum number of predicted tokens of a window.
        stride: tokens from the start of one window to the next.

    Yields:
        A window, int64 [n + 1] with n at most ``length``, and the number of its n predicted tokens that earlier windows
            have predicted already. These tokens come first.
    """
    parts = iter(parts)
    tokens = np.array([] if end is None else [end], dtype=np.int64)  # from the window's start on
    begin = 0  # offset of the window in the stream
    done = 0  # offset of the last predicted token
    while True:
        chunks = [tokens]
        size = len(tokens)
        while size <= length and (part := next(parts, None)) is not None:
            chunks.append(part)
            size += len(part)
        tokens = np.concatenate(chunks)
        block = tokens[: length + 1]
        if len(block) < 2 or begin + len(block) - 1 <= done:
            return
        yield block, done - begin
        done = begin + len(block) - 1
        tokens = tokens[stride:]
        begin += stride


def cut(parts: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """Cut a stream into blocks of ``length`` tokens; the last block has the rest."""
    tokens = np.empty(0, dtype=np.int64)
    for part in parts:
        tokens = np.concatenate([tokens, part])
        whole = len(tokens) // length * length
        yield from tokens[:whole].reshape(-1, length)
        tokens = tokens[whole:]
    if len(tokens):
        yield tokens
