"""Folders of safetensors (one file, or several with an index), and model folders of Hugging Face.

Only safetensors and JSON are read; pickled weights are refused. Reading and writing hold one tensor in memory at a
time.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fmoe.errors import UserError
from fmoe.files import is_full, sync
from pretrain.checkpoint.files import free_bytes
from pretrain.checkpoint.shard import CODES, bytes_of, header_of
from pretrain.data.files import read_object

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_NUM_OPEN = 16
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor of a folder: its file, dtype and shape."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class SafetensorsFolder:
    """A folder of safetensors, read tensor by tensor: one file, or several with an index.

    Attributes:
        path: the folder.

    Raises:
        UserError: the folder is missing. `tensors` raises it if the weights are pickled, missing or damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise UserError(f"{path} is not a folder")
        self._open = lru_cache(_NUM_OPEN)(self._open_anew)

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in a file of the folder; None if the file is missing.

        Raises:
            UserError: the file is unreadable, or is not a JSON object.
        """
        return read_object(self.path / name)

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """All tensors by name, from the headers of the files."""
        found: dict[str, Stored] = {}
        for name in self._files():
            file = self._open(name)
            for key in file.keys():  # noqa: SIM118 - no mapping
                if key in found:
                    raise UserError(f"{self.path}: {found[key].file} and {name} both have the tensor {key}")
                part = file.get_slice(key)
                code = part.get_dtype()
                if code not in _DTYPES:
                    raise UserError(f"{self.path / name}: {key} has dtype {code}, which is not supported")
                found[key] = Stored(name, _DTYPES[code], tuple(part.get_shape()))
        return found

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a tensor by name, or only ``rows`` of its first axis."""
        stored = self.tensors[name]
        try:
            file = self._open(stored.file)
            return file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        except SafetensorError as error:
            raise UserError(f"{self.path / stored.file} cannot be read: {name}: {error}") from error

    def _files(self) -> list[str]:
        index = self.json(INDEX)
        if index is None:
            if (self.path / WEIGHTS).is_file():
                return [WEIGHTS]
            for name in _PICKLED:
                if (self.path / name).exists():
                    raise UserError(
                        f"{self.path} has pickled weights ({name}), which can run code and are not read: "
                        "convert them to safetensors"
                    )
            raise UserError(f"{self.path} has no weights: neither {WEIGHTS} nor {INDEX}")
        places = index.get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UserError(f"{self.path / INDEX} has no weight_map with entries")
        files = sorted(set(map(str, places.values())))
        for name in files:
            if not _PLAIN_NAME.fullmatch(name):
                raise UserError(
                    f"{self.path / INDEX} names {name!r}, which must be a file name of letters, digits, '_', '.' and "
                    "'-' that begins with a letter or digit and ends with .safetensors"
                )
            if not (self.path / name).is_file():
                raise UserError(f"{self.path / name} is missing; {INDEX} names it")
        return files

    def _open_anew(self, name: str) -> safe_open:
        path = self.path / name
        try:
            return safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error


class HuggingFaceFolder(SafetensorsFolder):
    """A model folder, written by transformers' ``save_pretrained`` or downloaded.

    Attributes:
        config: the parsed config.json.

    Raises:
        UserError: config.json is missing or damaged; otherwise, see `SafetensorsFolder`.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        config = self.json(CONFIG)
        if config is None:
            raise UserError(f"{path} is not a Hugging Face model: it has no {CONFIG}")
        self.config: dict[str, Any] = config


@dataclass(frozen=True)
class Planned:
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_weights(folder: Path, plan: Sequence[Planned], tensors: Iterable[Tensor], max_bytes: int) -> list[str]:
    """Write and sync safetensors: one file, or several with an index.

    Args:
        plan: the tensors in order.
        tensors: values of the planned tensors, on any device, read one by one. A tensor may come in slices along its
            first axis.
        max_bytes: maximum bytes of tensors in a file, unless a single tensor is larger.

    Returns:
        Names of the files with tensors.
    """
    shards: list[list[Planned]] = [[]]
    size = 0
    for planned in plan:
        if shards[-1] and size + planned.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(planned)
        size += planned.nbytes
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    source = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        with _created(folder / name) as file:
            _write_shard(file, shard, source)
    if len(names) > 1:
        write_json(
            folder / INDEX,
            {
                "metadata": {"total_size": sum(planned.nbytes for planned in plan)},
                "weight_map": {p.name: name for name, shard in zip(names, shards, strict=True) for p in shard},
            },
        )
    return names


def _write_shard(file: BinaryIO, shard: Sequence[Planned], tensors: Iterator[Tensor]) -> None:
    file.write(header_of(((p.name, p.dtype, p.shape) for p in shard), {"format": "pt"}))
    for planned in shard:
        left = planned.shape[0] if planned.shape else 1
        while True:
            tensor = next(tensors)
            assert (tensor.dtype, tuple(tensor.shape[1:])) == (planned.dtype, planned.shape[1:]), planned.name
            file.write(bytes_of(tensor.cpu().contiguous()))
            left -= tensor.shape[0] if planned.shape else 1
            if left <= 0:
                break
        assert left == 0, planned.name


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write and sync a JSON file."""
    with _created(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")


def write_bytes(path: Path, value: bytes) -> None:
    """Write and sync a file."""
    with _created(path) as file:
        file.write(value)


@contextlib.contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def refuse_output(out: Path) -> None:
    """Raise UserError unless ``out`` is missing or an empty folder. A symbolic link is refused too."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"{out} is a file or a symbolic link: pass another path")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: pass another folder")


@contextlib.contextmanager
def appearing(out: Path, needed: int) -> Iterator[Path]:
    """Yield a temporary folder next to ``out``. Rename it to ``out`` after the ``with`` block, or remove it after an
    error.

    Args:
        needed: estimate of the bytes to write.

    Raises:
        UserError: ``out`` is not empty, its parent folder is not writable, or the disk is full.
    """
    refuse_output(out)
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise UserError(f"cannot write in {out.parent}: {error.strerror}") from error
    try:
        if (free := free_bytes(temporary)) < needed:
            raise UserError(f"{out}: disk full: {needed} bytes are needed, {free} are free")
        yield temporary
        sync(temporary)
        os.rename(temporary, out)
        sync(out.parent)
    except OSError as error:
        if is_full(error):
            raise UserError(f"cannot write {out}: {error.strerror}") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
