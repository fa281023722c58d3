"""Corpora without a download: sources of Python's standard library, and documentation on this machine."""

import ast
import gzip
import hashlib
import importlib
import json
import logging
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from fmoe.errors import UserError
from pretrain.files import replacing

SPLITS = ("train", "validation", "test")
_PERCENT_TRAIN = 90  # of the files
_PERCENT_VALIDATION = 5  # the rest is the test split
_NOT_THE_LIBRARY = frozenset(["site-packages", "dist-packages", "__pycache__"])
_SHORTEST = 200  # minimum bytes of a document of prose
_LETTERS = 0.7  # minimum share of letters and white space in prose: tables and lists of commits have less
_LARGEST = 1 << 20  # maximum bytes of a documentation file
_PROSE = ("README", "NEWS", "FAQ", "TODO", "HACKING", "CONTRIBUTING")  # prefixes of file names in /usr/share/doc
_PYTHON_LICENSE = "PSF-2.0"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CorpusSplit:
    """One split of a corpus on disk.

    Attributes:
        path: the JSON-lines file.
        documents: number of lines.
        text_bytes: UTF-8 bytes of text.
        skipped: documents of this split that are not UTF-8.
    """

    path: Path
    documents: int = 0
    text_bytes: int = 0
    skipped: int = 0


def split_paths(out: Path) -> dict[str, Path]:
    """Return the path of each split's file in ``out``, by the split's name."""
    return {name: out / f"{name}.jsonl" for name in SPLITS}


@dataclass(frozen=True)
class _Document:
    name: str  # decides the split
    data: bytes
    license: str | None = None


def write_python_library(out: Path, library: Path | None = None) -> dict[str, CorpusSplit]:
    """Write a library's Python sources as ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl``.

    Each source file in UTF-8 becomes one line with the keys ``text`` and ``path``. A file's split depends only on a
    hash of its path below ``library`` (90 / 5 / 5 percent). Existing outputs are replaced once all three are complete.
    The splits are returned by name.

    Args:
        out: folder for the three files; created if missing.
        library: folder whose ``*.py`` are used, except installed packages; by default, the standard library.

    Raises:
        UserError: there is no source file, or ``out`` is not writable.
    """
    library = Path(sysconfig.get_path("stdlib")) if library is None else library
    sources = _library_files(library)
    if not sources:
        raise UserError(f"no *.py below {library}, which must hold the sources of Python's standard library")
    return _write(out, (_Document(name, path.read_bytes()) for name, path in sources))


def write_documentation(
    out: Path, share: Path = Path("/usr/share"), library: Path | None = None
) -> dict[str, CorpusSplit]:
    """Write the English documentation on this machine as ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl``.

    A line has the keys ``text``, ``path`` and ``license``. As in `write_python_library`, a hash of ``path`` decides the
    split, and the splits are returned by name. The sources of documents are

    * the descriptions of installed Python packages,
    * the topics of Python's language reference,
    * the docstrings of each file of the standard library, without tests,
    * the texts in ``common-licenses`` below ``share``,
    * the texts in ``doc`` below ``share``.

    A source without documents is skipped with a warning. Left out are

    * files in ``doc`` above 1 MiB,
    * files that are not UTF-8,
    * duplicates,
    * documents below 200 bytes,
    * documents with less than 70% letters and white space.

    The only module imported is Python's own ``pydoc_data.topics``.

    Args:
        out: folder for the three files; created if missing.
        share: folder with ``common-licenses`` and ``doc``.
        library: folder of the standard library; by default, the running Python's.

    Raises:
        UserError: no source has documents, or ``out`` is not writable.
    """
    library = Path(sysconfig.get_path("stdlib")) if library is None else library
    sources = {
        "descriptions of installed packages": _descriptions(),
        "topics of Python's language reference": _topics(),
        f"docstrings below {library}": _docstrings(library),
        f"texts in {share}/common-licenses": _licenses(share / "common-licenses"),
        f"texts in {share}/doc": _package_texts(share / "doc"),
    }
    seen: set[bytes] = set()

    def documents() -> Iterator[_Document]:
        for source, of_source in sources.items():
            count = 0
            for document in of_source:
                digest = hashlib.sha256(document.data.strip()).digest()
                text = document.data.decode(errors="ignore")
                letters = sum(c.isalpha() or c.isspace() for c in text)
                is_prose = len(document.data) >= _SHORTEST and letters >= _LETTERS * len(text)
                if is_prose and digest not in seen:
                    seen.add(digest)
                    count += 1
                    yield document
            if not count:
                logger.warning("no usable %s on this machine: skipped", source)
        if not seen:
            raise UserError(f"this machine has no usable {', '.join(sources)}")

    return _write(out, documents())


CORPORA: dict[str, Callable[[Path], dict[str, CorpusSplit]]] = {
    "pylib": write_python_library,
    "docs": write_documentation,
}
"""Functions that write a corpus into a folder, by its name in ``fmoe data corpus`` and ``fmoe data example``."""


def example_folder(name: str) -> Path:
    """Return the folder into which ``fmoe data example NAME`` writes, relative to the working folder."""
    return Path("data", name, "out")


def example_command(path: Path) -> str | None:
    """Return the command that makes a tokenizer or a corpus (a prefix) of an example; None for any other path."""
    names = [name for name in CORPORA if path.parent == example_folder(name)]
    return f"fmoe data example {names[0]}" if names and path.name in ("tokenizer.model", *SPLITS) else None


def _library_files(library: Path) -> list[tuple[str, Path]]:
    return sorted(
        (path.relative_to(library).as_posix(), path)
        for path in library.rglob("*.py")
        if path.is_file() and not _NOT_THE_LIBRARY.intersection(path.relative_to(library).parts)
    )


def _descriptions() -> Iterator[_Document]:
    documents = {}
    for distribution in metadata.distributions():
        facts: Any = distribution.metadata  # an email.message.Message
        name = facts.get("Name")
        text = facts.get("Description") or facts.get_payload()
        if name and isinstance(text, str) and text.strip() != "UNKNOWN":
            license = facts.get("License-Expression") or facts.get("License") or "unknown"
            data = text.encode(errors="replace")
            documents[name] = _Document(f"packages/{name}", data, license.strip().split("\n")[0][:80])
    yield from (documents[name] for name in sorted(documents))


def _topics() -> Iterator[_Document]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):  # distributions may leave it out
        return
    for name, text in sorted(topics.items()):
        yield _Document(f"topics/{name}", text.encode(), _PYTHON_LICENSE)


def _docstrings(library: Path) -> Iterator[_Document]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for name, path in _library_files(library):
        if {"test", "tests"}.intersection(name.split("/")):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escape sequences
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError):  # not Python of this version
            continue
        texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        yield _Document(
            f"docstrings/{name}", "\n\n".join(filter(None, texts)).encode(errors="replace"), _PYTHON_LICENSE
        )


def _licenses(folder: Path) -> Iterator[_Document]:
    for path in sorted(folder.glob("*")):
        if path.is_file():
            yield _Document(f"common-licenses/{path.name}", path.read_bytes(), "verbatim copies")


def _package_texts(folder: Path) -> Iterator[_Document]:
    for path in sorted(folder.rglob("*")):
        stem = path.name.removesuffix(".gz")
        is_prose = stem.startswith(_PROSE) or stem.endswith((".txt", ".md", ".rst"))
        if not is_prose or path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST:
            continue
        try:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        except (OSError, EOFError, zlib.error):  # unreadable or damaged
            continue
        name = path.relative_to(folder)
        if len(data) <= _LARGEST:
            yield _Document(f"doc/{name.as_posix()}", data, f"see {name.parts[0]}/copyright")


def _write(out: Path, documents: Iterable[_Document]) -> dict[str, CorpusSplit]:
    splits = {name: CorpusSplit(path) for name, path in split_paths(out).items()}
    with replacing(*(split.path for split in splits.values())) as files:
        file_of = dict(zip(SPLITS, files, strict=True))
        for document in documents:
            split = _split_of(document.name)
            counted = splits[split]
            try:
                text = document.data.decode()
            except UnicodeDecodeError:
                splits[split] = replace(counted, skipped=counted.skipped + 1)
                continue
            row = {"text": text, "path": document.name}
            if document.license is not None:
                row["license"] = document.license
            file_of[split].write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            text_bytes = counted.text_bytes + len(document.data)
            splits[split] = replace(counted, documents=counted.documents + 1, text_bytes=text_bytes)
    return splits


def _split_of(name: str) -> str:
    percent = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    if percent < _PERCENT_TRAIN:
        return "train"
    return "validation" if percent < _PERCENT_TRAIN + _PERCENT_VALIDATION else "test"
