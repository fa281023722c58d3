"""The default corpus, which needs no download: the sources of the running Python's own standard library."""

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
        documents: lines in it, one a source file.
        text_bytes: UTF-8 bytes of text in it.
        skipped: source files of this split that are left out because they are not UTF-8.
    """

    path: Path
    documents: int = 0
    text_bytes: int = 0
    skipped: int = 0


def split_paths(out: Path) -> dict[str, Path]:
    """Where `write_python_library` puts each split."""
    return {name: out / f"{name}.jsonl" for name in SPLITS}


def write_python_library(out: Path, library: Path | None = None) -> dict[str, CorpusSplit]:
    """Writes ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl``: a line a source file, ``{"text", "path"}``.

    A file's split is a hash of its path below ``library`` (90 / 5 / 5 percent of the files), so it depends on nothing
    else. Existing files are replaced, once all three are complete.

    Args:
        out: folder of the three files; created where missing.
        library: folder whose ``*.py`` are taken, by default the standard library without installed packages.

    Raises:
        UserError: there is no source file, or ``out`` cannot be written.
    """
    library = Path(sysconfig.get_path("stdlib")) if library is None else library
    sources = sorted(
        (path.relative_to(library).as_posix(), path)
        for path in library.rglob("*.py")
        if path.is_file() and not _NOT_THE_LIBRARY.intersection(path.relative_to(library).parts)
    )
    if not sources:
        raise UserError(f"no *.py below {library}: this Python comes without the sources of its standard library")
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
