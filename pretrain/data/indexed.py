"""Megatron's indexed corpus: ``PREFIX.bin`` holds the tokens, ``PREFIX.idx`` the starts of sequences and documents.

The index, little endian: 9 bytes of magic, uint64 version, uint8 code of the token type, uint64 number S of sequences,
uint64 number D + 1 of document boundaries, int32 lengths [S] in tokens, int64 pointers [S] in bytes, int64 boundaries
[D + 1] counted in sequences. A document is a range of sequences: fmoe writes one sequence, or several for a document of
more than 2^31 - 1 tokens. The sequences of a conversation are in turn context and answer (`pretrain.data.chat`).

``PREFIX.json``, which Megatron does not read, has the origin of the tokens, SHA-256 sums, and the count of each token
id, so that a run opens a corpus without reading its tokens.
"""

import hashlib
import json
import os
import struct
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from fmoe.errors import UserError
from fmoe.files import sha256
from pretrain.data.corpus import example_command
from pretrain.data.counts import TokenCounter, TokenCounts, keep, kept
from pretrain.files import replacing, with_ending

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_LONGEST_SEQUENCE = np.iinfo(np.int32).max
# Megatron's codes for token types. It writes no tokens as int8, int16 or floats (2, 3, 6, 7); without these, each item
# size has one type, so a damaged code contradicts the pointers.
_DTYPES: dict[int, np.dtype] = {1: np.dtype("u1"), 4: np.dtype("<i4"), 5: np.dtype("<i8"), 8: np.dtype("<u2")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_CHUNK = 1 << 20  # entries checked or written at a time, to bound memory


def dtype_for_vocabulary(vocab_size: int) -> np.dtype:
    """Return the dtype for token ids below ``vocab_size``: uint16 up to 65,536, else int32."""
    return np.dtype(np.uint16) if vocab_size <= 1 << 16 else np.dtype(np.int32)


def corpus_paths(prefix: str | Path) -> tuple[Path, Path, Path]:
    """Return ``PREFIX.bin``, ``PREFIX.json``, ``PREFIX.idx``, in the order in which `IndexedWriter` replaces them."""
    prefix = Path(prefix)
    return with_ending(prefix, ".bin"), with_ending(prefix, ".json"), with_ending(prefix, ".idx")


class IndexedWriter:
    """Incremental writer of a corpus. It holds 12 bytes per document and the token counts in memory.

    As a context manager, it puts the files of `corpus_paths` in place together at the end, or keeps the old ones after
    an error.

        with IndexedWriter(prefix, dtype_for_vocabulary(vocab_size)) as writer:
            for tokens in documents:
                writer.append(tokens)  # any number of times per document
                writer.end_document()

    Attributes:
        num_documents: documents ended so far.
        num_tokens: tokens appended so far.

    Raises:
        ValueError: ``dtype`` is not a token type of the format, or the last document was not ended.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _CODES:
            raise ValueError(f"dtype {self.dtype} must be one of {', '.join(map(str, _CODES))}")
        self.num_documents = 0
        self.num_tokens = 0
        self._paths = corpus_paths(prefix)
        self._stack = ExitStack()
        self._lengths = array("i")  # of sequences
        self._boundaries = array("q", [0])
        self._open_length = 0  # tokens of the current sequence
        self._description: dict[str, Any] = {}
        self._sum = hashlib.sha256()
        self._counter = TokenCounter()

    def __enter__(self) -> "IndexedWriter":
        self._bin, self._json, self._idx = self._stack.enter_context(replacing(*self._paths))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)  # `replacing` discards the files
            return
        with self._stack:
            self._finish()

    def append(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Add tokens to the current document.

        Raises:
            ValueError: a token does not fit the dtype.
        """
        values = np.asarray(tokens)
        if values.size == 0:
            return
        if values.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            if values.dtype.kind not in "iu" or values.min() < limits.min or values.max() > limits.max:
                raise ValueError(f"tokens of {values.dtype}, {values.min()} to {values.max()}, do not fit {self.dtype}")
            values = values.astype(self.dtype)
        data = values.tobytes()
        self._sum.update(data)
        self._bin.write(data)
        self._counter.add(np.frombuffer(data, dtype=self.dtype))
        self._open_length += values.size
        self.num_tokens += values.size

    def end_sequence(self) -> None:
        """End the current sequence of the current document; both may be empty."""
        while self._open_length > _LONGEST_SEQUENCE:
            self._lengths.append(_LONGEST_SEQUENCE)
            self._open_length -= _LONGEST_SEQUENCE
        self._lengths.append(self._open_length)
        self._open_length = 0

    def end_document(self) -> None:
        """End the current document, which may be empty."""
        self.end_sequence()
        self._boundaries.append(len(self._lengths))
        self.num_documents += 1

    def describe(self, **description: Any) -> None:
        """Set the JSON values to add to ``PREFIX.json``, e.g. the tokenizer's fingerprint."""
        self._description = description

    def _finish(self) -> None:
        if self._open_length:
            raise ValueError(f"the last {self._open_length} tokens were appended without end_document()")
        self._bin.flush()  # before the description, because counts older than their tokens are not trusted
        os.fsync(self._bin.fileno())
        index_sum = self._write_index(self._idx)
        description = {
            **self._description,
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "dtype": self.dtype.name,
            "sha256": {"bin": self._sum.hexdigest(), "idx": index_sum},
        }
        text = json.dumps(description, indent=2, ensure_ascii=False).removesuffix("\n}")
        counts = json.dumps(self._counter.finish().as_json())  # on one line
        self._json.write(f'{text},\n  "counts": {counts}\n}}\n'.encode())

    def _write_index(self, file: BinaryIO) -> str:
        """Write the index and return its SHA-256."""
        digest = hashlib.sha256()

        def write(data: bytes) -> None:
            digest.update(data)
            file.write(data)

        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        boundaries = np.frombuffer(self._boundaries, dtype=np.int64)
        write(_HEADER.pack(_MAGIC, _VERSION, _CODES[self.dtype], len(lengths), len(boundaries)))
        write(lengths.astype("<i4").tobytes())
        offset = 0
        for start in range(0, len(lengths), _CHUNK):
            ends = offset + np.cumsum(lengths[start : start + _CHUNK], dtype=np.int64)
            write(((ends - lengths[start : start + _CHUNK]) * self.dtype.itemsize).astype("<i8").tobytes())
            offset = int(ends[-1])
        write(boundaries.astype("<i8").tobytes())
        return digest.hexdigest()


class IndexedCorpus:
    """Memory-mapped corpus, written by fmoe or by Megatron.

    The constructor checks that the index is consistent and fits the size of the ``.bin`` file. If ``PREFIX.json``
    exists, it also compares the index with the checksum stored there.

    Attributes:
        prefix: path without ``.bin`` and ``.idx``.
        dtype: dtype of the tokens.
        num_documents: documents, including empty ones.
        num_tokens: tokens of all documents.
        flat: all tokens, document after document, [num_tokens].
        sequence_lengths: tokens of each sequence, int32 [num_sequences].
        document_boundaries: int64 [num_documents + 1]; document i has the sequences boundaries[i] to
            boundaries[i + 1] - 1.
        description: the content of ``PREFIX.json`` without the counts; {} if the file is missing.
        counts: stored token counts; None if there are none, or if they are older than the tokens. Callers may set it.
        tokenizer_fingerprint: SHA-256 of the tokenizer's file, as stored in ``PREFIX.json``; None if it is not stored.

    Raises:
        UserError: a file is missing, unreadable or inconsistent.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        bin_path, json_path, idx_path = corpus_paths(self.prefix)
        for path in (idx_path, bin_path):
            if not path.is_file():
                hint = f"; {_remedy(self.prefix)}" if path == idx_path else ""
                raise UserError(f"no corpus at {self.prefix}: {path} does not exist{hint}")
        try:
            self._read_index(idx_path, bin_path)
            self.flat = _map(bin_path, self.dtype, self.num_tokens)
            self.description = _read_description(json_path, idx_path)
            self.counts = self._read_counts(bin_path, json_path)
            self._has_kept_counts = self.counts is not None
            self.tokenizer_fingerprint: str | None = self.description.get("tokenizer", {}).get("sha256")
        except OSError as error:
            raise UserError(f"cannot read the corpus {self.prefix}: {error.strerror}") from error

    def __reduce__(self) -> tuple:
        """Pickle the path alone, and counts that are stored nowhere: who unpickles opens the files again."""
        return type(self), (self.prefix,), {} if self._has_kept_counts else {"counts": self.counts}

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, int64 [num_documents]."""
        return np.diff(self._starts(self.document_boundaries))

    def document(self, i: int) -> np.ndarray:
        """Return all tokens of document ``i``, a read-only view [length].

        Raises:
            IndexError: not ``0 <= i < num_documents``.
        """
        start, stop = self._span(i)
        return self.flat[start:stop]

    def tokens(self, i: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens ``start`` to ``stop - 1`` of document ``i``, a read-only view [stop - start].

        Raises:
            IndexError: not ``0 <= i < num_documents`` or not ``0 <= start <= stop <= length``.
        """
        first, last = self._span(i)
        if not 0 <= start <= stop <= last - first:
            raise IndexError(f"tokens[{start}:{stop}] of document {i} are out of range: it has {last - first} tokens")
        return self.flat[first + start : first + stop]

    def verify(self) -> None:
        """Read all tokens and compare them with the checksum of ``PREFIX.json``.

        Raises:
            UserError: they differ, or there is no checksum.
        """
        bin_path, json_path, _ = corpus_paths(self.prefix)
        expected = self.description.get("sha256", {}).get("bin")
        if expected is None:
            raise UserError(f"{json_path} is missing or has no checksum of {bin_path}: prepare the corpus again")
        if sha256(bin_path) != expected:
            raise UserError(
                f"{bin_path} differs from its SHA-256 in {json_path}: it is damaged or of another corpus: copy or "
                "prepare the corpus again"
            )

    def _read_counts(self, bin_path: Path, json_path: Path) -> TokenCounts | None:
        values = self.description.pop("counts", None)
        # As with make: tokens newer than their description may differ from it.
        if values is not None and bin_path.stat().st_mtime_ns <= json_path.stat().st_mtime_ns:
            try:
                if (counts := TokenCounts.from_json(values, self.num_tokens)) is not None:
                    return counts
            except ValueError as error:
                raise UserError(f"{json_path} is damaged, or not the description of a corpus: {error}") from error
        return kept(self.prefix, bin_path, self.num_tokens)

    def keep_counts(self) -> str | None:
        """Write `counts` next to the corpus, unless they are stored already. Return the reason if writing fails, else
        None."""
        if self._has_kept_counts or self.counts is None:
            return None
        reason = keep(self.prefix, corpus_paths(self.prefix)[0], self.counts)
        self._has_kept_counts = reason is None
        return reason

    def _span(self, i: int) -> tuple[int, int]:
        if not 0 <= i < self.num_documents:
            raise IndexError(f"document {i} is out of range: {self.prefix} has {self.num_documents} documents")
        start, stop = self._starts(self.document_boundaries[i : i + 2])
        return int(start), int(stop)

    def _starts(self, sequences: np.ndarray) -> np.ndarray:
        """Return where in `flat` each of ``sequences`` begins. The number after the last gives `num_tokens`."""
        starts = np.full(len(sequences), self.num_tokens, dtype=np.int64)
        inside = sequences < len(self._pointers)
        starts[inside] = self._pointers[sequences[inside]] // self.dtype.itemsize
        return starts

    def _read_index(self, path: Path, bin_path: Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise UserError(f"{path} is damaged: it has {size} bytes, less than the header's {_HEADER.size}")
        magic, version, code, num_sequences, num_boundaries = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise UserError(f"{path} is not an index: it begins with {magic!r}, not {_MAGIC!r}")
        if version != _VERSION:
            raise UserError(f"{path} has version {version}; only {_VERSION} is supported")
        if code not in _DTYPES:
            valid = ", ".join(f"{valid} ({dtype.name})" for valid, dtype in _DTYPES.items())
            raise UserError(f"{path} has the type code {code}, which is not one of {valid}")
        self.dtype = _DTYPES[code]
        expected = _HEADER.size + 12 * num_sequences + 8 * num_boundaries  # may be huge: nothing is allocated yet
        if size == expected + num_sequences and num_sequences:
            raise UserError(f"{path} is a multimodal index, with a mode per sequence: not a text corpus")
        if size != expected:
            raise UserError(
                f"{path} is damaged: it has {size} bytes, but its header's {num_sequences} sequences and "
                f"{num_boundaries} document boundaries take {expected}: copy or prepare the corpus again"
            )
        data = _map(path, np.dtype(np.uint8), size)
        cuts = _HEADER.size + np.cumsum([0, 4 * num_sequences, 8 * num_sequences, 8 * num_boundaries])
        self.sequence_lengths = data[cuts[0] : cuts[1]].view("<i4")
        self._pointers = data[cuts[1] : cuts[2]].view("<i8")
        self.document_boundaries = data[cuts[2] : cuts[3]].view("<i8")
        self.num_documents = num_boundaries - 1
        self.num_tokens = self._check_sequences(path)
        self._check_boundaries(path)
        expected = self.num_tokens * self.dtype.itemsize
        size = bin_path.stat().st_size
        if size != expected:
            raise UserError(
                f"{bin_path} has {size} bytes, but its index {path.name} describes {expected}: copy or prepare the "
                "corpus again"
            )

    def _check_sequences(self, path: Path) -> int:
        """Check that each sequence begins where the one before ends; return the number of tokens."""
        end = 0
        for start in range(0, len(self.sequence_lengths), _CHUNK):
            lengths = self.sequence_lengths[start : start + _CHUNK].astype(np.int64)
            if lengths.min() < 0:
                number = start + int(lengths.argmin())
                raise UserError(
                    f"{path} is damaged: sequence {number} has the length {lengths.min()}: copy or prepare the corpus "
                    "again"
                )
            ends = end + np.cumsum(lengths)
            wrong = self._pointers[start : start + _CHUNK] != (ends - lengths) * self.dtype.itemsize
            if wrong.any():
                first = start + int(wrong.argmax())
                raise UserError(
                    f"{path} is damaged: sequence {first} does not begin where the one before ends: copy or prepare "
                    "the corpus again"
                )
            end = int(ends[-1])
        return end

    def _check_boundaries(self, path: Path) -> None:
        boundaries = self.document_boundaries
        num_sequences = len(self.sequence_lengths)
        if not len(boundaries) or boundaries[0] != 0 or boundaries[-1] != num_sequences:
            raise UserError(f"{path} is damaged: the document boundaries do not go from 0 to {num_sequences}")
        for start in range(0, len(boundaries), _CHUNK):
            part = boundaries[start : start + _CHUNK + 1]
            if (part[1:] < part[:-1]).any():  # a difference of damaged values may overflow
                raise UserError(f"{path} is damaged: the document boundaries are not ascending")


def _remedy(prefix: Path) -> str:
    """Return what to do about a missing corpus."""
    if prefix.suffix in (".bin", ".idx"):
        return "pass the prefix, without .bin or .idx"
    command = example_command(prefix)
    if command is not None:
        return f"make it with {command}"
    if prefix.exists():
        return f"make one of this text with fmoe data prepare {prefix} --tokenizer FILE --out PREFIX, and pass PREFIX"
    return f"make it with fmoe data prepare TEXT --tokenizer FILE --out {prefix}"


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Map a file as a read-only array [count]; return an empty array if ``count`` is 0."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,))) if count else np.empty(0, dtype)


def _read_description(json_path: Path, idx_path: Path) -> dict[str, Any]:
    if not json_path.exists():
        return {}
    try:
        description = json.loads(json_path.read_bytes())
        expected = description["sha256"]["idx"]
        description.get("tokenizer", {}).get("sha256")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{json_path} is damaged, or not the description of a corpus: move it away or prepare the corpus again"
        ) from error
    if sha256(idx_path) != expected:
        raise UserError(
            f"{idx_path} differs from its SHA-256 in {json_path}: it is damaged or of another "
            "corpus: copy or prepare the corpus again"
        )
    return description
