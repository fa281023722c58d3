"""Conversion of text or conversations to an indexed corpus, in their order, with tokenization in worker processes."""

import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np

from fmoe import __version__
from fmoe.errors import UserError
from pretrain.data.chat import ChatEncoder, kind_of
from pretrain.data.documents import Piece, open_sources, read_source
from pretrain.data.indexed import IndexedWriter, corpus_paths, dtype_for_vocabulary
from pretrain.data.progress import show_progress
from pretrain.data.sources import OnError, Skips, Source, shorten, stop
from pretrain.data.streams import Mixture, Stream
from pretrain.data.tokenizers import Tokenizer, load_tokenizer
from pretrain.files import refuse_inputs

_BATCH_BYTES = 1 << 19  # of text sent to a worker at a time
_BATCH_PIECES = 4096
_BATCHES_A_WORKER = 3  # in flight: bounds memory when reading outpaces tokenizing
_BYTES_A_WORKER = 8 << 20  # below this much text, starting a process costs more time than it saves


@dataclass(frozen=True)
class Prepared:
    """Result of `prepare`.

    Attributes:
        paths: the files of the corpus.
        documents: documents in the corpus.
        tokens: tokens in the corpus, including the end of each document.
        text_bytes: UTF-8 bytes of the documents' text; of conversations, of their JSON.
        empty_documents: number of documents skipped because they have no tokens.
        skipped: number of unreadable documents skipped.
        first_skipped: error messages of the first unreadable documents.
        answer_tokens: tokens of the answers of conversations; None for text.
    """

    paths: tuple[Path, ...]
    documents: int
    tokens: int
    text_bytes: int
    empty_documents: int
    skipped: int = 0
    first_skipped: tuple[str, ...] = ()
    answer_tokens: int | None = None


@dataclass(frozen=True)
class _Batch:
    source: int  # index of the source of all pieces
    pieces: list[Piece]
    errors: list[UserError]  # of documents skipped between them

    @property
    def texts(self) -> list[str | bytes]:
        return [piece.text for piece in self.pieces]


@dataclass(frozen=True)
class _Encoded:
    tokens: np.ndarray  # of all texts, concatenated
    counts: list[list[int] | str]  # tokens of each part of each text, or the error of a conversation


_Encode = Callable[[list[str | bytes]], _Encoded]


@dataclass(frozen=True)
class _Chat:
    """Arguments of `ChatEncoder` beside the tokenizer."""

    bos: bool
    sequence_length: int | None


def prepare(
    inputs: Iterable[str | Path] | Mixture,
    tokenizer_path: str | Path,
    output_prefix: str | Path,
    *,
    text_key: str = "text",
    num_workers: int | None = None,
    progress: bool = False,
    format: str = "auto",
    skip_errors: bool = False,
    bos: bool = False,
    chat: bool = False,
    sequence_length: int | None = None,
) -> Prepared:
    """Write ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.json`` (counts, tokenizer, provenance).

    Each document's tokens end with the end-of-document token. If the documents are conversations, their sequences are
    in turn context and answer, and their tokens end as the chat template does. The files are the same for any
    ``num_workers``. Existing files are replaced once the new ones are complete. Memory grows only by 12 bytes per
    document, or by 8 bytes per conversation and 4 per sequence.

    Args:
        inputs: files and folders, as for `pretrain.data.documents.find_sources`, or a `pretrain.data.streams.Mixture`.
        tokenizer_path: a sentencepiece model or tokenizer.json.
        output_prefix: path of the files without their suffixes.
        text_key: key or column with the text in JSON files and tables.
        num_workers: number of processes that tokenize; None uses one per available processor, fewer for little text.
            With 1, this process tokenizes. More processes are started with "spawn", so a script needs
            ``if __name__ == "__main__"``.
        progress: show progress on stderr.
        format: format of all files, one of `pretrain.data.sources.FORMATS`; "auto" chooses it by their suffixes.
        skip_errors: skip and count unreadable documents.
        bos: begin each document with the tokenizer's BOS token, as a recipe with ``data.bos=true`` needs.
        chat: documents are conversations (`pretrain.data.chat`), as a recipe with ``data.chat=true`` needs. Then
            ``text_key`` has no effect.
        sequence_length: refuse a conversation whose first answer begins after this many tokens; None for no limit.

    Raises:
        UserError: the inputs or the tokenizer are unreadable (see `pretrain.data.documents.find_sources` and
            `pretrain.data.streams.open_mixture`); ``format`` is "bytes" and the tokenizer does not have one token per
            byte; the tokenizer has no BOS token; a conversation is invalid, or of another kind than the first one; an
            output is an input or not writable; no document has text; ``num_workers`` or ``sequence_length`` is less
            than 1; or a worker process died.
    """
    if sequence_length is not None and sequence_length < 1:
        raise UserError(f"sequence_length={sequence_length} must be at least 1")
    if num_workers is not None and num_workers < 1:
        raise UserError(f"num_workers={num_workers} must be at least 1")
    tokenizer = load_tokenizer(tokenizer_path)
    bos_ids = [tokenizer.role("bos")] if bos else []
    begin, end = ([], []) if chat else (bos_ids, [tokenizer.end_of_document])
    if format == "bytes":
        _ = tokenizer.byte_ids  # raises unless the tokenizer has one token per byte
    key = None if chat else text_key
    sources = open_sources(inputs, key, format=format)
    refuse_inputs(corpus_paths(output_prefix), [tokenizer.path, *(file for each in sources for file in each.files())])
    skips = Skips()
    sizes = [source.num_bytes for source in sources]
    total_bytes = None if None in sizes else sum(filter(None, sizes))
    if num_workers is None:
        enough = 1 + total_bytes // _BYTES_A_WORKER if total_bytes is not None else _available_processors()
        num_workers = min(_available_processors(), enough)
    dtype = dtype_for_vocabulary(tokenizer.vocab_size)
    counts = _Counts(sizes)
    streams = [source for source in sources if isinstance(source, Stream)]
    with (
        IndexedWriter(output_prefix, dtype) as writer,
        _encoder(tokenizer, dtype, num_workers, _Chat(bos, sequence_length) if chat else None) as encode_all,
        show_progress("tokenizing", total_bytes, progress) as report,
    ):
        length = 0  # tokens of the current document
        answer_tokens = 0
        for batch, encoded in encode_all(_batches(sources, key, skip_errors)):
            on_error = _naming(sources[batch.source], skips) if skip_errors else stop
            for error in batch.errors:
                on_error(error)
            start = 0
            for piece, parts in zip(batch.pieces, encoded.counts, strict=True):
                if isinstance(parts, str):
                    on_error(UserError(f"{piece.place}: {parts}"))
                    continue
                if any(parts) and not length:
                    writer.append(begin)
                for number, count in enumerate(parts):
                    if number:
                        writer.end_sequence()
                    writer.append(encoded.tokens[start : start + count])
                    start += count
                    length += count
                answer_tokens += sum(parts[1::2])
                if not piece.ends_document:
                    continue
                if length:
                    writer.append(end)
                    writer.end_document()
                else:
                    counts.empty_documents += 1
                length = 0
            counts.add(batch)
            report(counts.bytes_done, writer.num_documents, writer.num_tokens)
        if not writer.num_documents:
            names = shorten(source.name for source in sources)
            skipped = f"; {skips.count} unreadable documents, the first: {skips.first[0]}" if skips.count else ""
            raise UserError(f"no document with text in {names} ({counts.empty_documents} empty documents){skipped}")
        writer.describe(
            fmoe=__version__,
            tokenizer={
                "name": tokenizer.path.name,
                "sha256": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "end_of_document": tokenizer.end_of_document,
                **({"bos": bos_ids[0]} if bos_ids else {}),
            },
            sources=[source.name for source in sources],
            **({"mixture": streams[0].provenance} if streams else {}),
            **({"chat": {"answer_tokens": answer_tokens}} if chat else {}),
            text_bytes=counts.text_bytes,
            empty_documents=counts.empty_documents,
            skipped_documents=skips.count,
            first_skipped=skips.first,
        )
    return Prepared(
        paths=corpus_paths(output_prefix),
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        text_bytes=counts.text_bytes,
        empty_documents=counts.empty_documents,
        skipped=skips.count,
        first_skipped=tuple(skips.first),
        answer_tokens=answer_tokens if chat else None,
    )


class _Counts:
    def __init__(self, sizes: Sequence[int | None]) -> None:
        self.text_bytes = 0
        self.empty_documents = 0
        self._sizes = sizes
        self._source = 0
        self._bytes_before = 0  # of finished sources
        self._bytes_inside = 0

    def add(self, batch: _Batch) -> None:
        while self._source < batch.source:
            self._bytes_before += self._sizes[self._source] or 0
            self._source += 1
            self._bytes_inside = 0
        num_bytes = sum(piece.num_bytes for piece in batch.pieces)
        self.text_bytes += num_bytes
        self._bytes_inside += num_bytes

    @property
    def bytes_done(self) -> int:
        # Bytes on disk; bytes of text for a source of unknown size.
        # The text is larger than a compressed file, or smaller than JSON: do not count beyond the current source.
        size = self._sizes[self._source]
        return self._bytes_before + (self._bytes_inside if size is None else min(self._bytes_inside, size))


def _batches(sources: Sequence[Source | Stream], text_key: str | None, skip_errors: bool) -> Iterator[_Batch]:
    first: tuple[str, str] | None = None  # kind and location of the first conversation
    for number, source in enumerate(sources):
        pieces: list[Piece] = []
        errors: list[UserError] = []
        num_bytes = 0
        on_error = errors.append if skip_errors else stop
        for piece in read_source(source, text_key, on_error):
            if text_key is None:
                try:
                    kind = kind_of(json.loads(piece.text))
                    first = first or (kind, piece.place)
                    if kind != first[0]:
                        raise UserError(f"the row has {kind}, but {first[1]} has {first[0]}: prepare each kind alone")
                except UserError as error:
                    on_error(UserError(f"{piece.place}: {error}"))
                    continue
            pieces.append(piece)
            num_bytes += piece.num_bytes
            if num_bytes >= _BATCH_BYTES or len(pieces) >= _BATCH_PIECES:
                yield _Batch(number, pieces, list(errors))
                pieces = []
                errors.clear()
                num_bytes = 0
        if pieces or errors:
            yield _Batch(number, pieces, errors)


def _naming(source: Source | Stream, on_error: OnError) -> OnError:
    """Wrap ``on_error`` to replace the source's path by its name in each error."""
    # Errors are recorded, and must not contain local paths.
    return lambda error: on_error(UserError(str(error).replace(source.shown, source.name, 1)))


def _encode_with(tokenizer: Tokenizer, dtype: np.dtype, chat: _Chat | None) -> _Encode:
    """Return a function that encodes texts, or conversations with the arguments ``chat``."""
    if chat is None:
        return partial(_encode, lambda text: [tokenizer.encode_piece(text)], dtype)
    encoder = ChatEncoder(tokenizer, chat.bos, chat.sequence_length)

    def encode(text: str) -> list[np.ndarray] | str:
        try:
            return encoder.encode(json.loads(text))
        except UserError as error:
            return str(error)

    return partial(_encode, encode, dtype)


def _encode(encode: Callable[[Any], Sequence[Any] | str], dtype: np.dtype, texts: list[str | bytes]) -> _Encoded:
    tokens = [np.empty(0, dtype)]
    counts: list[list[int] | str] = []
    for text in texts:
        parts = encode(text)
        if isinstance(parts, str):
            counts.append(parts)
            continue
        tokens += [np.array(part, dtype=dtype) for part in parts]
        counts.append([len(part) for part in parts])
    return _Encoded(np.concatenate(tokens), counts)


@contextmanager
def _encoder(
    tokenizer: Tokenizer, dtype: np.dtype, num_workers: int, chat: _Chat | None
) -> Iterator[Callable[[Iterable[_Batch]], Iterator[tuple[_Batch, _Encoded]]]]:
    """Yield a function that encodes batches in order. With ``num_workers`` above 1, it uses as many processes."""
    if num_workers == 1:
        encode = _encode_with(tokenizer, dtype, chat)
        yield lambda batches: ((batch, encode(batch.texts)) for batch in batches)
        return
    executor = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),  # fork is unsafe with the threads of torch or a caller
        initializer=_start_worker,
        initargs=(str(tokenizer.path), dtype.name, chat),
    )
    try:
        # Only this process handles interrupts: children inherit the mask. The resource tracker is started before,
        # because its start lifts the mask. One call per worker starts all workers, because a call starts one if
        # none is idle.
        resource_tracker.ensure_running()
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for _ in range(num_workers):
                executor.submit(int)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        yield partial(_map_in_order, executor, num_workers * _BATCHES_A_WORKER)
    except BrokenProcessPool as error:
        raise UserError(
            f"one of num_workers={num_workers} tokenizing processes died: if memory was full, use fewer (--workers); "
            "a script that calls prepare needs if __name__ == '__main__'"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _map_in_order(
    executor: ProcessPoolExecutor, limit: int, batches: Iterable[_Batch]
) -> Iterator[tuple[_Batch, _Encoded]]:
    pending: deque[tuple[_Batch, Future[_Encoded]]] = deque()
    for batch in batches:
        pending.append((batch, executor.submit(_encode_in_worker, batch.texts)))
        if len(pending) >= limit:
            first, future = pending.popleft()
            yield first, future.result()
    for batch, future in pending:
        yield batch, future.result()


_worker_encode: _Encode | None = None  # set once per worker process


def _start_worker(tokenizer_path: str, dtype: str, chat: _Chat | None) -> None:
    global _worker_encode
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_encode = _encode_with(load_tokenizer(tokenizer_path), np.dtype(dtype), chat)


def _end_with_parent() -> None:
    """End this process when its parent ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # a worker whose parent was killed would wait for work forever
    os._exit(1)


def _encode_in_worker(texts: list[str | bytes]) -> _Encoded:
    assert _worker_encode is not None
    return _worker_encode(texts)


def _available_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
