"""Source files of documents: formats, decompressed content, and rows of JSON."""

import codecs
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from fmoe.errors import UserError, one_line, printable

PIECE_SIZE = 1 << 20  # characters, or bytes of undecoded content
MAX_LINE = 1 << 28  # bytes; a JSON line is parsed as a whole and must fit in memory
_SHOWN_SKIPS = 5
CONVERSATION_KEYS = ("messages", "prompt", "completion", "answer")
# Longest first: UTF-32's mark begins with UTF-16's.
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_SPACES = re.compile(r"[ \t\r\n]*")


class Format(Enum):
    """Format of a source. JSON is lines of objects like JSONL, or one array; BYTES are not decoded."""

    TEXT = "text"
    JSONL = "jsonl"
    JSON = "json"
    PARQUET = "parquet"
    BYTES = "bytes"
    SAVED = "datasets.save_to_disk"


FORMATS = ("auto", *(each.value for each in Format if each is not Format.SAVED))


@dataclass(frozen=True)
class Source:
    """A file to read, or a folder written by ``save_to_disk`` of Hugging Face datasets.

    Attributes:
        path: location on this machine.
        name: name in ``PREFIX.json`` and in messages. It begins with the file or folder that the user gave, without the
            folders above it.
        format: format of the content.
        num_bytes: size on disk.
    """

    path: Path
    name: str
    format: Format
    num_bytes: int

    @property
    def shown(self) -> str:
        """The path in printable form."""
        return printable(str(self.path))

    def files(self) -> list[Path]:
        """All files of the source."""
        return [file for file in self.path.iterdir() if file.is_file()] if self.path.is_dir() else [self.path]


# Called with the error of a document, which is skipped if the call returns.
OnError = Callable[[UserError], None]


def stop(error: Exception) -> None:
    """Raise the error. This is the `OnError` that skips nothing."""
    raise error


@dataclass
class Skips:
    """The `OnError` that skips and counts unreadable documents.

    Attributes:
        count: skipped documents; the rest of a damaged file counts as one.
        first: error messages of the first skipped documents.
    """

    count: int = 0
    first: list[str] = field(default_factory=list)

    def __call__(self, error: UserError) -> None:
        self.count += 1
        if len(self.first) < _SHOWN_SKIPS:
            self.first.append(str(error))


def shorten(names: Iterable[str], limit: int = 10) -> str:
    """Quote the first ``limit`` names, each cut to 40 characters, for an error message."""
    names = list(names)
    quoted = ", ".join(repr(printable(name[:40])) for name in names[:limit]) or "none"
    return f"{quoted} and {len(names) - limit} more" if len(names) > limit else quoted


def conversation_text(row: object) -> str:
    """Return the values of `CONVERSATION_KEYS` that a row has, as a JSON object; other keys are left out.

    Raises:
        UserError: the row is not an object, has none of the keys, or has a value that JSON does not have.
    """
    if not isinstance(row, dict):
        raise UserError(f"the row is a JSON {type(row).__name__}, not an object")
    values = {key: row[key] for key in CONVERSATION_KEYS if row.get(key) is not None}
    if not values:
        raise UserError(f"the row has neither 'messages' nor 'prompt'; its keys are {shorten(row)}")
    try:
        return json.dumps(values, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"the row is not a conversation: {one_line(error, 200)}") from error


def refuse_other_encoding(head: bytes, name: str) -> None:
    """Raise a `UserError` for text whose first bytes are the byte order mark of an encoding other than UTF-8."""
    for mark, encoding in _OTHER_MARKS.items():
        if head.startswith(mark):
            raise UserError(f"{name} is {encoding}, by its first bytes: convert it with iconv -f {encoding} -t UTF-8")


def read_blocks(source: Source, read: Callable[[BinaryIO], bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield (block, offset) for each block that ``read`` takes from a file, until the file ends.

    Raises:
        UserError: the file is damaged, or begins with the byte order mark of UTF-16 or UTF-32.
    """
    try:
        file, offset = _open(source)
        with file:
            while block := read(file):
                yield block, offset
                offset += len(block)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{source.shown} is truncated, damaged or not a gzip file: {error}") from error


def _open(source: Source) -> tuple[BinaryIO, int]:
    """Open a file, decompress it by its suffix, and skip its byte order mark. Return the file and the mark's length."""
    suffix = source.path.suffix.lower()
    file: Any
    if suffix == ".gz":
        file = gzip.open(source.path)  # noqa: SIM115 - the caller closes it
    elif suffix == ".zst":
        from pretrain.data.zstd import open_zstd  # imports pyarrow

        file = open_zstd(source.path)
    else:
        file = source.path.open("rb")
    if source.format is Format.BYTES:
        return file, 0
    try:
        head = file.peek(4)[:4]
        refuse_other_encoding(head, source.shown)
        mark = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
        file.read(mark)
    except BaseException:
        file.close()
        raise
    return file, mark


def decode(data: bytes, source: Source, offset: int) -> str:
    """Decode ``data`` as UTF-8; it begins at byte ``offset`` of the source.

    Raises:
        UserError: a byte is invalid; the message names its position in the source.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{source.shown} is not UTF-8 at byte {offset + error.start}: {error.reason}") from error


def json_rows(source: Source, on_error: OnError) -> Iterator[tuple[str, object]]:
    """Yield (location, row) for each row of a JSON file: the items if a `Format.JSON` file is an array, else the lines.

    The error of an unreadable row is passed to ``on_error``. If it returns, the row is skipped.
    In an array or a damaged file, the rest is skipped too.
    """
    try:
        is_array = source.format is Format.JSON and _begins_with_bracket(source)
        yield from _items(source) if is_array else _lines(source, on_error)
    except UserError as error:  # the rest is unreadable
        on_error(error)


def _begins_with_bracket(source: Source) -> bool:
    for block, _ in read_blocks(source, lambda file: file.read(1 << 12)):
        text = block.lstrip()
        if text:
            return text.startswith(b"[")
    return False


def _lines(source: Source, on_error: OnError) -> Iterator[tuple[str, object]]:
    number = 0
    is_inside = False  # a line that is too long
    for line, offset in read_blocks(source, lambda file: file.readline(MAX_LINE + 1)):
        number += not is_inside
        place = f"{source.shown}, line {number}"
        is_cut = len(line) > MAX_LINE and not line.endswith(b"\n")
        try:
            if is_inside:
                continue
            if len(line) > MAX_LINE:
                raise UserError(f"{place} is longer than {MAX_LINE} bytes: split the document")
            text = decode(line, source, offset)
            if not text.strip():  # a blank line is a separator
                continue
            row = _parse(text, place, source.format)
        except UserError as error:
            on_error(error)
            continue
        finally:
            is_inside = is_cut
        yield place, row


def _parse(line: str, place: str, format: Format) -> object:
    try:
        return json.loads(line, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        hint = "; a .json file must hold one JSON object per line, or one array of objects" * (format is Format.JSON)
        raise UserError(f"{place} is not JSON: {error.msg} at column {error.colno}{hint}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        raise UserError(f"{place} is not readable JSON: {error}") from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; raise ValueError if it has a key twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {printable(repeated)!r} twice")
    return values


def _items(source: Source) -> Iterator[tuple[str, object]]:
    """Yield the (location, value) of each item of a JSON array."""
    # Only one item and a piece of the file are in memory.
    decode_part = codecs.getincrementaldecoder("utf-8")().decode
    blocks = read_blocks(source, lambda file: file.read(PIECE_SIZE))
    scan = json.JSONDecoder(object_pairs_hook=_object).raw_decode
    text = ""
    at = 0
    number = 0
    is_over = False

    def read_on() -> None:
        # Doubles the buffer, so that an item of any length is scanned only a few times.
        nonlocal text, at, is_over
        parts = [text[at:]]
        size = max(len(parts[0]), 1)
        while size > 0 and not is_over:
            block, offset = next(blocks, (b"", 0))
            is_over = not block
            try:
                parts.append(decode_part(block, final=is_over))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{source.shown} is not UTF-8 near byte {offset + error.start}: {error.reason}"
                ) from error
            size -= len(block)
        text = "".join(parts)
        at = 0

    def next_character() -> str:
        nonlocal at
        while True:
            spaces = _SPACES.match(text, at)
            assert spaces is not None
            at = spaces.end()
            if at < len(text) or is_over:
                return text[at : at + 1]
            read_on()

    next_character()
    at += 1  # the bracket
    while (character := next_character()) != "]":
        if number:
            if character != ",":
                break
            at += 1
            next_character()
        number += 1
        place = f"{source.shown}, item {number}"
        while True:
            try:
                value, end = scan(text, at)
                if end < len(text) or is_over:  # else a number may continue
                    break
            except json.JSONDecodeError as error:
                if is_over or len(text) - at > MAX_LINE:
                    long = "" if is_over else f", or is longer than {MAX_LINE} characters"
                    raise UserError(f"{place} is not JSON{long}: {error.msg}") from error
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place} is not readable JSON: {error}") from error
            read_on()
        at = end
        yield place, value
    at += 1
    if character != "]" or next_character():
        raise UserError(
            f"{source.shown} is not one JSON array: item {number} must be followed by a comma, or by the bracket "
            "that ends the file"
        )
