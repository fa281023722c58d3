"""Conversion of text to an indexed corpus in the order of the text, with tokenization in worker processes."""

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

import numpy as np

from fmoe import __version__
from fmoe.errors import UserError
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
        text_bytes: UTF-8 bytes of the documents' text.
        empty_documents: number of documents skipped because they have no tokens.
        skipped: number of unreadable documents skipped.
        first_skipped: error messages of the first unreadable documents.
    """

    paths: tuple[Path, ...]
    documents: int
    tokens: int
    text_bytes: int
    empty_documents: int
    skipped: int = 0
    first_skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Batch:
    source: int  # index of the source of all pieces
    pieces: list[Piece]

    @property
    def texts(self) -> list[str | bytes]:
        return [piece.text for piece in self.pieces]


@dataclass(frozen=True)
class _Encoded:
    tokens: np.ndarray  # of all texts, concatenated
    counts: list[int]  # tokens of each text


_Encode = Callable[[list[str | bytes]], _Encoded]


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
) -> Prepared:
    """Write ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.json`` (counts, tokenizer, provenance).

    Each document's tokens end with the end-of-document token. The files are the same for any ``num_workers``. Existing
    files are replaced once the new ones are complete. Memory grows only by 12 bytes per document.

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

    Raises:
        UserError: the inputs or the tokenizer are unreadable (see `pretrain.data.documents.find_sources` and
            `pretrain.data.streams.open_mixture`); ``format`` is "bytes" and the tokenizer does not have one token per
            byte; the tokenizer has no BOS token; an output is an input or not writable; no document has text;
            ``num_workers`` is less than 1; or a worker process died.
    """
    if num_workers is not None and num_workers < 1:
        raise UserError(f"num_workers={num_workers} must be at least 1")
    tokenizer = load_tokenizer(tokenizer_path)
    begin = [tokenizer.role("bos")] if bos else []
    if format == "bytes":
        _ = tokenizer.byte_ids  # raises unless the tokenizer has one token per byte
    sources = open_sources(inputs, text_key, format=format)
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
        _encoder(tokenizer, dtype, num_workers) as encode_all,
        show_progress("tokenizing", total_bytes, progress) as report,
    ):
        length = 0  # tokens of the current document
        for batch, encoded in encode_all(_batches(sources, text_key, skips if skip_errors else stop)):
            start = 0
            for piece, count in zip(batch.pieces, encoded.counts, strict=True):
                if count and not length:
                    writer.append(begin)
                writer.append(encoded.tokens[start : start + count])
                start += count
                length += count
                if not piece.ends_document:
                    continue
                if length:
                    writer.append([tokenizer.end_of_document])
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
                **({"bos": begin[0]} if begin else {}),
            },
            sources=[source.name for source in sources],
            **({"mixture": streams[0].provenance} if streams else {}),
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


def _batches(sources: Sequence[Source | Stream], text_key: str, on_error: OnError) -> Iterator[_Batch]:
    for number, source in enumerate(sources):
        of_source = on_error if on_error is stop else _naming(source, on_error)
        pieces: list[Piece] = []
        num_bytes = 0
        for piece in read_source(source, text_key, of_source):
            pieces.append(piece)
            num_bytes += piece.num_bytes
            if num_bytes >= _BATCH_BYTES or len(pieces) >= _BATCH_PIECES:
                yield _Batch(number, pieces)
                pieces = []
                num_bytes = 0
        if pieces:
            yield _Batch(number, pieces)


def _naming(source: Source | Stream, on_error: OnError) -> OnError:
    """Wrap ``on_error`` to replace the source's path by its name in each error."""
    # Errors are recorded, and must not contain local paths.
    return lambda error: on_error(UserError(str(error).replace(source.shown, source.name, 1)))


def _encode(tokenizer: Tokenizer, dtype: np.dtype, texts: list[str | bytes]) -> _Encoded:
    ids = [tokenizer.encode_piece(text) for text in texts]
    parts = [np.array(part, dtype=dtype) for part in ids]
    return _Encoded(np.concatenate(parts), [len(part) for part in parts])


@contextmanager
def _encoder(
    tokenizer: Tokenizer, dtype: np.dtype, num_workers: int
) -> Iterator[Callable[[Iterable[_Batch]], Iterator[tuple[_Batch, _Encoded]]]]:
    """Yield a function that encodes batches in order. With ``num_workers`` above 1, it uses as many processes."""
    if num_workers == 1:
        encode = partial(_encode, tokenizer, dtype)
        yield lambda batches: ((batch, encode(batch.texts)) for batch in batches)
        return
    executor = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),  # fork is unsafe with the threads of torch or a caller
        initializer=_start_worker,
        initargs=(str(tokenizer.path), dtype.name),
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


def _start_worker(tokenizer_path: str, dtype: str) -> None:
    global _worker_encode
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_encode = partial(_encode, load_tokenizer(tokenizer_path), np.dtype(dtype))


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
