"""Documents from text, JSON lines, Parquet and Hugging Face datasets, in pieces that fit in memory.

A document is one or more pieces, so a text file of any size is read in bounded memory. A piece says whether it is the
document's last.

Pieces of text end at line ends, except inside a line that is longer than a piece. Tokenizers trained by this package
keep newlines as separate tokens, so cutting at line ends does not change the tokens of a document.

With ``text_key=None``, documents are conversations: a piece is a whole row, as the JSON of `conversation_text`.
"""

import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fmoe.errors import UserError, printable
from pretrain.data import sources
from pretrain.data.sources import (
    CONVERSATION_KEYS,
    FORMATS,
    Format,
    OnError,
    Source,
    conversation_text,
    decode,
    json_rows,
    read_blocks,
    shorten,
    stop,
)
from pretrain.data.streams import Mixture, Stream, open_mixture

_COMPRESSED = (".gz", ".zst")
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_FORMAT_OF = {
    ".txt": Format.TEXT,
    ".text": Format.TEXT,
    ".jsonl": Format.JSONL,
    ".jsonlines": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".json": Format.JSON,
    ".parquet": Format.PARQUET,
}
# For files that the user names: a .md file found in a folder is more likely a note about the data.
_FORMAT_WHERE_NAMED = {".md": Format.TEXT}

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Part of a document: its text or undecoded bytes, its size in (UTF-8) bytes, and whether it is the last part.

    A conversation also has its location, such as ``a.jsonl, line 3``.
    """

    text: str | bytes
    num_bytes: int
    ends_document: bool
    place: str = ""


def open_sources(
    inputs: Iterable[str | Path] | Mixture, text_key: str | None = "text", *, format: str = "auto"
) -> Sequence[Source | Stream]:
    """Open ``inputs``: files and folders with `find_sources`, a `Mixture` with `open_mixture`."""
    if isinstance(inputs, Mixture):
        return [open_mixture(inputs, conversations=text_key is None)]
    return find_sources(inputs, text_key, format=format)


def find_sources(paths: Iterable[str | Path], text_key: str | None = "text", *, format: str = "auto") -> list[Source]:
    """Find the files behind ``paths``, in the given order. The files of a folder are sorted by their path in it.

    In a folder, hidden files and folders, links to folders, and files of other formats are skipped with a warning.

    Args:
        paths: files and folders.
        text_key: key or column with the text; None for conversations.
        format: format of all files, one of `FORMATS`. "auto" chooses it by the suffix, ignoring case. It then skips a
            ``.json`` file of a folder if the first row does not have ``text_key``.

    Raises:
        UserError: for each of

            * an unknown ``format``,
            * no path,
            * a path that is missing, unreadable, or neither a file nor a folder,
            * a file with an unknown suffix,
            * a compressed Parquet file,
            * a folder without documents,
            * conversations in a text file,
            * a folder written by ``DatasetDict.save_to_disk``.
    """
    if format not in FORMATS:
        raise UserError(f"format={format!r} must be one of {', '.join(FORMATS)}")
    sources: list[Source] = []
    for path in map(Path, paths):
        shown = printable(str(path))
        try:
            status = path.stat()
            if not stat.S_ISDIR(status.st_mode):
                if not stat.S_ISREG(status.st_mode):
                    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "special")
                    raise UserError(f"{shown} is {kind}, not a file or a folder: write its text to a file")
                sources.append(Source(path, printable(path.name), _format_of(path, format), status.st_size))
            elif (path / "dataset_dict.json").is_file():
                splits = sorted(folder.name for folder in path.iterdir() if (folder / "state.json").is_file())
                raise UserError(
                    f"{shown} holds a dataset with splits; pass one of {', '.join(splits)}, as {shown}/SPLIT"
                )
            elif (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
                size = sum(file.stat().st_size for file in path.glob("*.arrow"))
                sources.append(Source(path, printable(path.resolve().name), Format.SAVED, size))
            else:
                sources += _sources_in_folder(path, text_key, format)
        except FileNotFoundError as error:
            raise UserError(f"{printable(str(error.filename or path))} does not exist") from error
        except OSError as error:
            raise UserError(f"cannot read {printable(str(error.filename or path))}: {error.strerror}") from error
    if not sources:
        raise UserError("no input: pass at least one file or folder")
    for source in sources:
        if text_key is None and source.format in (Format.TEXT, Format.BYTES):
            raise UserError(f"{source.shown} is text, but conversations are rows: use JSON, Parquet or a dataset")
    return sources


def iter_documents(
    paths: Iterable[str | Path], text_key: str = "text", *, format: str = "auto", on_error: OnError = stop
) -> Iterator[Piece]:
    """Yield all pieces of all documents of ``paths``, in order. See `find_sources` and `read_source`."""
    for source in find_sources(paths, text_key, format=format):
        yield from read_source(source, text_key, on_error)


def read_source(source: Source | Stream, text_key: str | None = "text", on_error: OnError = stop) -> Iterator[Piece]:
    """Yield the pieces of one source. A text or bytes file is one document; otherwise each line, item or row is one.

    A UTF-8 byte order mark at the beginning of a file is skipped, except in bytes.

    Args:
        source: the file, folder or stream.
        text_key: key or column with the text, None for conversations; not used for text, bytes and streams of text.
        on_error: function that is called with the error of an unreadable document. If it returns, the document is
            skipped; so is the rest of a file that is damaged from there on. Errors of a whole table or stream, such as
            a missing column, are always raised.

    Raises:
        UserError: the content does not fit the format, or the source is unreadable or changed while it was read.
    """
    if isinstance(source, Stream):
        yield from _read_stream(source, text_key, on_error)
        return
    try:
        before = _state(source.path)
        if source.format is Format.PARQUET or source.format is Format.SAVED:
            yield from _read_table(source, text_key, on_error)
        elif source.format is Format.JSONL or source.format is Format.JSON:
            yield from _read_rows(source, text_key, on_error)
        else:
            read = _read_bytes if source.format is Format.BYTES else _read_text
            if on_error is stop or _is_readable(source, read, on_error):
                yield from read(source)
        if _state(source.path) != before:
            raise UserError(f"{source.shown} changed while it was read: start again once its writers have finished")
    except OSError as error:
        raise UserError(f"cannot read {source.shown}: {error.strerror}") from error


def _read_stream(stream: Stream, text_key: str | None, on_error: OnError) -> Iterator[Piece]:
    for place, text, error in stream.documents():
        if text is None:
            on_error(UserError(f"{place}: {error}"))
        elif text_key is None:
            yield Piece(text, len(text.encode()), True, place)
        else:
            yield from _pieces_of_value(text, "text", place, on_error)


def _state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read_table(source: Source, text_key: str | None, on_error: OnError) -> Iterator[Piece]:
    from pretrain.data.tables import read_parquet, read_saved  # imports pyarrow and datasets

    rows = read_parquet if source.format is Format.PARQUET else read_saved
    values = rows(source.path, text_key)
    number = 0
    while True:
        number += 1
        try:
            value = next(values, values)
        except UserError as error:
            on_error(error)
            return
        if value is values:
            return
        place = f"{source.shown}, row {number}"
        if text_key is None:
            yield from _conversation(value, place, on_error)
        else:
            yield from _pieces_of_value(value, text_key, place, on_error)


def _is_readable(source: Source, read: Callable[[Source], Iterator[Piece]], on_error: OnError) -> bool:
    """Return whether ``source`` can be read to its end. If not, pass the error to ``on_error``."""
    try:
        for _ in read(source):
            pass
    except UserError as error:
        on_error(error)
        return False
    return True


def _format_of(path: Path, format: str) -> Format:
    suffix = path.suffix.lower()
    kind = Format(format) if format != "auto" else _known_format(path) or _FORMAT_WHERE_NAMED.get(suffix)
    if kind is None:
        raise UserError(
            f"{printable(str(path))} has the suffix {printable(path.suffix)!r}, not one of {', '.join(_FORMAT_OF)} "
            f"(optionally followed by {' or '.join(_COMPRESSED)}): --format {'|'.join(FORMATS[1:])} sets its format"
        )
    if kind is Format.PARQUET and suffix in _COMPRESSED:
        raise UserError(
            f"{printable(str(path))} is a Parquet file in a compressed archive, which is not supported: unpack it"
        )
    return kind


def _known_format(path: Path) -> Format | None:
    stem, suffix = os.path.splitext(path.name.lower())
    return _FORMAT_OF.get(os.path.splitext(stem)[1] if suffix in _COMPRESSED else suffix)


def _sources_in_folder(folder: Path, text_key: str | None, format: str) -> list[Source]:
    sources: list[tuple[str, Source]] = []
    top = printable(folder.resolve().name)
    hidden = others = 0
    suffixes: set[str] = set()
    not_documents: list[str] = []
    for parent, folders, files in os.walk(folder, onerror=stop):
        hidden += sum(name.startswith(".") for name in folders + files)
        others += sum(not name.startswith(".") and os.path.islink(os.path.join(parent, name)) for name in folders)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in files if not name.startswith(".")):
            if not path.is_file():  # a broken link, a FIFO, a device
                others += 1
                continue
            kind = _known_format(path) if format == "auto" else Format(format)
            if kind is None:
                suffixes.add(path.suffix or "none")
                others += 1
                continue
            name = path.relative_to(folder).as_posix()
            _format_of(path, format)
            source = Source(path, f"{top}/{printable(name)}", kind, path.stat().st_size)
            if format == "auto" and kind is Format.JSON and not _holds_documents(source, text_key):
                not_documents.append(source.name)
                continue
            sources.append((name, source))
    left_out = [f"{hidden} hidden files or folders"] if hidden else []
    if others:
        of = f" (suffixes {', '.join(map(printable, sorted(suffixes)[:10]))})" if suffixes else ""
        left_out.append(f"{others} other files or links{of}")
    if not_documents:
        key = "conversations" if text_key is None else repr(text_key)
        left_out.append(f"{len(not_documents)} .json files without {key}: {shorten(sorted(not_documents))}")
    shown = printable(str(folder))
    if not sources:
        wanted = ", ".join("*" + suffix for suffix in _FORMAT_OF) if format == "auto" else "files"
        without = f"; skipped: {'; '.join(left_out)}" if left_out else ""
        raise UserError(f"no {wanted} in the folder {shown}{without}")
    if left_out:
        logger.warning("%s: skipped %s", shown, "; ".join(left_out))
    return [source for _, source in sorted(sources, key=lambda pair: pair[0])]


def _holds_documents(source: Source, text_key: str | None) -> bool:
    """Return whether the first row of a JSON file is an object with the key ``text_key``, or of a conversation."""
    # Settings and vocabularies are .json files too.
    try:
        _, row = next(json_rows(source, stop), ("", None))
    except UserError:
        return False
    keys = CONVERSATION_KEYS if text_key is None else (text_key,)
    return isinstance(row, dict) and any(key in row for key in keys)


def _read_text(source: Source) -> Iterator[Piece]:
    held = b""  # at most two pieces
    offset = 0  # of what is held
    for block, begin in read_blocks(source, lambda file: file.read(sources.PIECE_SIZE)):
        if not held:
            offset = begin
        if len(held) >= sources.PIECE_SIZE:
            cut = held.rfind(b"\n") + 1 or _last_character_start(held)
            yield Piece(decode(held[:cut], source, offset), cut, False)
            held = held[cut:]
            offset += cut
        held += block
    yield Piece(decode(held, source, offset), len(held), True)


def _read_bytes(source: Source) -> Iterator[Piece]:
    for block, _ in read_blocks(source, lambda file: file.read(sources.PIECE_SIZE)):
        yield Piece(block, len(block), False)
    yield Piece(b"", 0, True)


def _last_character_start(data: bytes) -> int:
    """Return the index at which the last UTF-8 character of ``data`` begins, even if it is incomplete."""
    start = len(data) - 1
    while start > len(data) - 4 and data[start] & 0b1100_0000 == 0b1000_0000:  # a continuation byte
        start -= 1
    return start


def _read_rows(source: Source, text_key: str | None, on_error: OnError) -> Iterator[Piece]:
    for place, row in json_rows(source, on_error):
        if text_key is None:
            yield from _conversation(row, place, on_error)
            continue
        try:
            value = _text_of_row(row, text_key, place)
        except UserError as error:
            on_error(error)
            continue
        yield from _pieces_of_value(value, text_key, place, on_error)


def _conversation(row: object, place: str, on_error: OnError) -> Iterator[Piece]:
    try:
        text = conversation_text(row)
        yield Piece(text, _num_bytes(text, "the row"), True, place)
    except UserError as error:
        on_error(UserError(f"{place}: {error}"))


def _text_of_row(row: object, text_key: str, place: str) -> object:
    if not isinstance(row, dict):
        raise UserError(f"{place} is a JSON {type(row).__name__}, not an object with the key {text_key!r}")
    if text_key not in row:
        raise UserError(f"{place} has no key {text_key!r}; its keys are {shorten(row)}")
    return row[text_key]


def _pieces_of_value(value: object, text_key: str, place: str, on_error: OnError) -> Iterator[Piece]:
    """Yield ``value`` in pieces. If it is not a string or not valid UTF-8, pass an error to ``on_error``."""
    if not isinstance(value, str):
        on_error(UserError(f"{place}: the value of {text_key!r} is a {type(value).__name__}, not a string"))
        return
    try:
        num_bytes = _num_bytes(value, repr(text_key))
    except UserError as error:
        on_error(UserError(f"{place}: {error}"))
        return
    start = 0
    while len(value) - start > sources.PIECE_SIZE:
        cut = value.rfind("\n", start, start + sources.PIECE_SIZE) + 1 or start + sources.PIECE_SIZE
        text = value[start:cut]
        size = len(text.encode())
        yield Piece(text, size, False)
        start = cut
        num_bytes -= size
    yield Piece(value[start:], num_bytes, True)


def _num_bytes(text: str, name: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        code = ord(text[error.start])
        raise UserError(f"{name} has the lone surrogate U+{code:04X}, which is not valid in UTF-8") from error
