"""The default corpus, without a download: the sources of the running Python's standard library."""

import hashlib
import json
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

from fmoe.errors import UserError
from pretrain.data.files import replacing

SPLITS = ("train", "validation", "test")
_PERCENT_TRAIN, _PERCENT_VALIDATION = 90, 5  # of the files; the rest is the test split
_NOT_THE_LIBRARY = frozenset(["site-packages", "dist-packages", "__pycache__"])


@dataclass(frozen=True)
class CorpusSplit:
    """One split on disk.

    Attributes:
        path: the JSON-lines file.
        documents: number of lines, one per source file.
        text_bytes: UTF-8 bytes of text.
        skipped: source files of this split that are not UTF-8.
    """

    path: Path
    documents: int = 0
    text_bytes: int = 0
    skipped: int = 0


def split_paths(out: Path) -> dict[str, Path]:
    """Return the file of each split of `write_python_library`."""
    return {name: out / f"{name}.jsonl" for name in SPLITS}


def write_python_library(out: Path, library: Path | None = None) -> dict[str, CorpusSplit]:
    """Write ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl``: one line per source file, ``{"text", "path"}``.

    A file's split depends only on a hash of its path below ``library`` (90 / 5 / 5 percent of the files). Existing
    files are replaced once all three are complete.

    Args:
        out: folder for the three files; created if missing.
        library: folder whose ``*.py`` are used, by default the standard library without installed packages.

    Raises:
        UserError: there is no source file, or ``out`` is not writable.
    """
    library = Path(sysconfig.get_path("stdlib")) if library is None else library
    sources = sorted(
        (path.relative_to(library).as_posix(), path)
        for path in library.rglob("*.py")
        if path.is_file() and not _NOT_THE_LIBRARY.intersection(path.relative_to(library).parts)
    )
    if not sources:
        raise UserError(f"no *.py below {library}: this Python has no sources of its standard library")
    splits = {name: CorpusSplit(path) for name, path in split_paths(out).items()}
    with replacing(*(split.path for split in splits.values())) as files:
        file_of = dict(zip(SPLITS, files, strict=True))
        for name, path in sources:
            split = _split_of(name)
            counted = splits[split]
            data = path.read_bytes()
            try:
                text = data.decode()
            except UnicodeDecodeError:
                splits[split] = replace(counted, skipped=counted.skipped + 1)
                continue
            file_of[split].write(json.dumps({"text": text, "path": name}, ensure_ascii=False).encode() + b"\n")
            splits[split] = replace(counted, documents=counted.documents + 1, text_bytes=counted.text_bytes + len(data))
    return splits


def _split_of(name: str) -> str:
    percent = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    if percent < _PERCENT_TRAIN:
        return "train"
    return "validation" if percent < _PERCENT_TRAIN + _PERCENT_VALIDATION else "test"
