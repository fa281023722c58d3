"""manifest.json: every file of a checkpoint with its size and digest, and the location of each piece of each tensor.

The manifest includes the SHA-256 of its other content. Without it, a flipped bit in an offset would silently load wrong
numbers.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from fmoe.errors import UserError
from pretrain.checkpoint.files import FileRecord
from pretrain.checkpoint.folders import MANIFEST
from pretrain.checkpoint.geometry import Region, Shape, first_overlap, merged
from pretrain.checkpoint.shard import dtype_named, name_of

FORMAT = 1
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class StoredPiece:
    """A region of a tensor, stored under ``key`` in ``file``.

    A whole block is stored in its shape, a flat range of a block as 1-D.
    """

    file: str
    key: str
    region: Region


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor and its pieces in the shards."""

    dtype: torch.dtype
    shape: Shape
    pieces: list[StoredPiece]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """The parsed manifest. ``num_ranks`` is the number of ranks whose states the checkpoint has."""

    step: int
    num_ranks: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, StoredTensor]


def check_coverage(name: str, tensor: StoredTensor) -> None:
    """Check that the pieces of a tensor hold each of its elements exactly once.

    Raises:
        UserError: pieces overlap (the message names two files and the offset), or elements are missing (the message has
            their number).
    """
    size = prod(tensor.shape)
    boxes = [("", box) for region in merged(piece.region for piece in tensor.pieces) for box in region.boxes]
    missing = size - sum(box.size for _, box in boxes)
    if missing == 0 and first_overlap(boxes) is None:
        return
    # Slower, but names the holders.
    overlap = first_overlap((piece.file, box) for piece in tensor.pieces for box in piece.region.boxes)
    if overlap is not None:
        first, second, offset = overlap
        raise UserError(f"tensor {name}: {first} and {second} both hold the element at {offset}")
    raise UserError(f"tensor {name}: {missing} of its {size} elements are missing")


def tensors_to_json(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return tensors as the JSON value of the manifest's key ``tensors``."""
    entries = {}
    for name, tensor in tensors.items():
        pieces: list[dict[str, Any]] = []
        for piece in tensor.pieces:
            region = piece.region
            pieces.append({"file": piece.file, "key": piece.key, "offset": region.offset, "shape": region.block})
            if not region.is_whole:
                pieces[-1] |= {"start": region.start, "stop": region.stop}
        entries[name] = {"dtype": name_of(tensor.dtype), "shape": tensor.shape, "pieces": pieces}
    return entries


def tensors_from_json(entries: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Parse the output of `tensors_to_json`; raise KeyError, TypeError or ValueError if it is malformed."""
    tensors = {}
    for name, entry in entries.items():
        tensor = StoredTensor(dtype_named(entry["dtype"]), _counts(entry["shape"]), [])
        for piece in entry["pieces"]:
            flat = _counts((piece["start"], piece["stop"])) if "start" in piece else ()
            region = Region.of(_counts(piece["offset"]), _counts(piece["shape"]), *flat)
            if (misfit := region.misfit(tensor.shape)) is not None:
                raise ValueError(f"tensor {name}: {misfit}")
            tensor.pieces.append(StoredPiece(str(piece["file"]), str(piece["key"]), region))
        tensors[name] = tensor
    return tensors


def files_to_json(files: Mapping[str, FileRecord]) -> dict[str, Any]:
    """Return the files' sizes in bytes and SHA-256 as the JSON value of the manifest's key ``files``."""
    return {name: asdict(record) for name, record in files.items()}


def files_from_json(fields: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Parse the output of `files_to_json`; raise ValueError, KeyError or TypeError if it is malformed."""
    return {name: FileRecord(_counts([entry["size"]])[0], str(entry["sha256"])) for name, entry in fields.items()}


def _counts(values: Any) -> Shape:
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values} must be non-negative integers")
    return tuple(values)


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """Return the content of manifest.json as a JSON value, without its digest."""
    return {
        "format": FORMAT,
        "step": manifest.step,
        "num_ranks": manifest.num_ranks,
        "files": files_to_json(manifest.files),
        "tensors": tensors_to_json(manifest.tensors),
    }


def seal(document: Mapping[str, Any]) -> bytes:
    """Serialize a document as canonical JSON with its digest: the content of manifest.json."""
    return _canonical({**document, "sha256": hashlib.sha256(_canonical(document)).hexdigest()})


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and check manifest.json of a step folder. No other file is read.

    Raises:
        UserError: the manifest is unreadable, not JSON, of another format version, damaged or malformed, or names files
            outside the folder.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(document, dict) or "format" not in document:
        raise UserError(f"{path} is not the manifest of a checkpoint: it has no format version")
    if document["format"] != FORMAT:
        raise UserError(
            f"{path} has format version {document['format']!r}; this version of fmoe reads version {FORMAT}"
        )
    digest = document.pop("sha256", None)
    if digest != hashlib.sha256(_canonical(document)).hexdigest():
        raise UserError(f"{path} is damaged: its content does not match its SHA-256")
    try:
        return _manifest_from_json(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is malformed ({type(error).__name__}: {error}): use another checkpoint") from error


def _manifest_from_json(document: Mapping[str, Any]) -> Manifest:
    step, num_ranks = _counts([document["step"], document["num_ranks"]])
    files = files_from_json(document["files"])
    tensors = tensors_from_json(document["tensors"])
    for name in files:
        if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(
                f"file {name!r} is invalid: a name has only letters, digits, '.', '_' and '-', begins with a letter or "
                "digit, and is not manifest.json"
            )
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            if piece.file not in files:
                raise ValueError(f"tensor {name} is in {piece.file!r}, which the manifest does not list as a file")
    return Manifest(step, num_ranks, files, tensors)
