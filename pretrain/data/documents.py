"""Documents out of text, JSON lines, Parquet and Hugging Face folders, in pieces that fit in memory.

A document comes as one or more pieces, and its last piece says so: a text file of any size is read in bounded memory.
Pieces are cut at line ends. The tokenizers of this package keep a newline as a token of its own, so the tokens of the
pieces are exactly the tokens of the document; only a line longer than a piece is cut inside.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fmoe.errors import UserError

PIECE_SIZE = 1 << 20  # characters, or bytes where the file is read as it is
MAX_LINE = 1 << 28  # bytes; a JSON line is parsed as a whole, so an endless one must not fill the memory
_COMPRESSED = ("", ".gz", ".zst")
_JSONL = tuple(".jsonl" + suffix for suffix in _COMPRESSED)
_SUFFIXES_IN_FOLDERS = (*(".txt" + suffix for suffix in _COMPRESSED), *_JSONL, ".parquet")


class Piece(NamedTuple):
    """A stretch of a document: its text, the UTF-8 bytes of it, and whether the document ends here."""

    text: str
    num_bytes: int
    ends_document: bool


class Format(Enum):
    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"
    SAVED = "datasets.save_to_disk"


@dataclass(frozen=True)
class Source:
    """A file (or a folder of ``save_to_disk``) to read.

    Attributes:
        path: where it is.
        name: how a record calls it: the path below what the user named, never this machine's full path.
        format: how it is read.
        num_bytes: its size on disk.
    """

    path: Path
    name: str
    format: Format
    num_bytes: int


def find_sources(paths: Iterable[str | Path]) -> list[Source]:
    """The files behind ``paths``, in the order given; those of a folder sorted by their path in it.

    Raises:
        UserError: no path, a missing one, or a folder with nothing to read.
    """
    sources: list[Source] = []
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path} does not exist")
        if not path.is_dir():
            sources.append(Source(path, path.name, _format_of(path), path.stat().st_size))
        elif (path / "dataset_dict.json").is_file():
            splits = sorted(folder.name for folder in path.iterdir() if (folder / "state.json").is_file())
            raise UserError(f"{path} holds a dataset with splits; name one of {', '.join(splits)}, as {path}/SPLIT")
        elif (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            size = sum(file.stat().st_size for file in path.glob("*.arrow"))
            sources.append(Source(path, path.resolve().name, Format.SAVED, size))
        else:
            sources.extend(_sources_in_folder(path))
    if not sources:
        raise UserError("no input to read documents from")
    return sources


def iter_documents(paths: Iterable[str | Path], text_key: str = "text") -> Iterator[Piece]:
    """All pieces of all documents of ``paths``, in order (see `find_sources` and `read_source`)."""
    for source in find_sources(paths):
        yield from read_source(source, text_key)


def read_source(source: Source, text_key: str = "text") -> Iterator[Piece]:
    """The pieces of one source: a text file is one document, a line or a row of the others is one.

    Args:
        source: what to read.
        text_key: the key or the column that holds the text; a text file has none.

    Raises:
        UserError: the content is not what the format says; the message names file, place and key.
    """
    if source.format is Format.PARQUET or source.format is Format.SAVED:
        from pretrain.data.tables import read_parquet, read_saved  # pyarrow and datasets, only where they are needed

        rows = read_parquet if source.format is Format.PARQUET else read_saved
        for number, value in enumerate(rows(source.path, text_key), start=1):
            yield from _pieces_of_value(value, text_key, f"{source.path}, row {number}")
        return
    try:
        with _open(source.path) as file:
            if source.format is Format.JSONL:
                yield from _read_jsonl(file, source.path, text_key)
            else:
                yield from _read_text(file, source.path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{source.path} is not a whole gzip file: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {source.path}: {error.strerror}") from error


def _open(path: Path) -> BinaryIO:
    """The content of a file, decompressed if its name says that it is compressed."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        from pretrain.data.zstd import open_zstd  # pyarrow, only where it is needed

        return open_zstd(path)
    return path.open("rb")


def _format_of(path: Path) -> Format:
    if path.name.endswith(_JSONL):
        return Format.JSONL
    return Format.PARQUET if path.suffix == ".parquet" else Format.TEXT


def _sources_in_folder(folder: Path) -> list[Source]:
    found = sorted(
        (path.relative_to(folder).as_posix(), path)
        for path in folder.rglob("*")
        if path.name.endswith(_SUFFIXES_IN_FOLDERS) and path.is_file()
    )
    if not found:
        raise UserError(f"no {', '.join('*' + suffix for suffix in _SUFFIXES_IN_FOLDERS)} in the folder {folder}")
    top = folder.resolve().name
    return [Source(path, f"{top}/{name}", _format_of(path), path.stat().st_size) for name, path in found]


def _read_text(file: BinaryIO, path: Path) -> Iterator[Piece]:
    """A file as one document. At most two pieces of it are in memory."""
    held, offset = b"", 0
    while block := file.read(PIECE_SIZE):
        if len(held) >= PIECE_SIZE:
            cut = held.rfind(b"\n") + 1 or _last_character_start(held)
            yield Piece(_decode(held[:cut], path, offset), cut, False)
            held, offset = held[cut:], offset + cut
        held += block
    yield Piece(_decode(held, path, offset), len(held), True)


def _last_character_start(data: bytes) -> int:
    """Where the last UTF-8 character of ``data``, maybe an incomplete one, begins."""
    start = len(data) - 1
    while start > len(data) - 4 and data[start] & 0b1100_0000 == 0b1000_0000:  # a continuation byte
        start -= 1
    return start


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {offset + error.start}: {error.reason}") from error


def _read_jsonl(file: BinaryIO, path: Path, text_key: str) -> Iterator[Piece]:
    offset, number = 0, 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        place = f"{path}, line {number}"
        if len(line) > MAX_LINE:
            raise UserError(f"{place} is longer than {MAX_LINE} bytes")
        text = _decode(line, path, offset)
        if number == 1:
            text = text.removeprefix("\ufeff")  # the byte order mark that some editors write
        if text.strip():  # a blank line separates, it is not a document
            yield from _pieces_of_value(_text_of_json(text, text_key, place), text_key, place)
        offset += len(line)


def _text_of_json(line: str, text_key: str, place: str) -> object:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        raise UserError(f"{place} is not JSON that can be read: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place} is a JSON {type(row).__name__}, not an object with the key {text_key!r}")
    if text_key not in row:
        raise UserError(f"{place} has no key {text_key!r}; its keys are {shorten(row)}")
    return row[text_key]


def shorten(names: Iterable[str], limit: int = 10) -> str:
    """The first names of a list, quoted, for an error message."""
    names = list(names)
    quoted = ", ".join(repr(name[:40]) for name in names[:limit]) or "none"
    return f"{quoted} and {len(names) - limit} more" if len(names) > limit else quoted


def _pieces_of_value(value: object, text_key: str, place: str) -> Iterator[Piece]:
    """A row's document in pieces.

    Raises:
        UserError: the value is not a string, or not one that UTF-8 can hold (JSON can spell half a surrogate pair).
    """
    if not isinstance(value, str):
        raise UserError(f"{place}: the value of {text_key!r} is a {type(value).__name__}, not a string")
    start = 0
    while True:
        cut = len(value)
        if cut - start > PIECE_SIZE:
            cut = value.rfind("\n", start, start + PIECE_SIZE) + 1 or start + PIECE_SIZE
        text = value[start:cut]
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise UserError(f"{place}: {text_key!r} has the lone surrogate U+{code:04X}, not UTF-8") from error
        yield Piece(text, num_bytes, cut == len(value))
        if cut == len(value):
            return
        start = cut
