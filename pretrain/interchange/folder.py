"""Folders of safetensors (one file, or several with an index), and model folders of Hugging Face.

Only safetensors and JSON are read; pickled weights are refused. Reading and writing hold one tensor in memory at a
time.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fmoe.errors import UserError
from fmoe.files import is_full, sync
from pretrain.checkpoint.files import free_bytes
from pretrain.checkpoint.geometry import Shape
from pretrain.checkpoint.shard import CODES, bytes_of, header_of, open_shard
from pretrain.files import read_object

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_NUM_OPEN = 16
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor of a folder: its file, dtype and shape."""

    file: str
    dtype: torch.dtype
    shape: Shape


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
        self._open = lru_cache(_NUM_OPEN)(lambda name: open_shard(path / name))

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """All tensors by name, from the headers of the files."""
        tensors: dict[str, Stored] = {}
        for name in self._files():
            file = self._open(name)
            for key in file.keys():  # noqa: SIM118 - no mapping
                if key in tensors:
                    raise UserError(f"{self.path}: {tensors[key].file} and {name} both have the tensor {key}")
                header = file.get_slice(key)
                code = header.get_dtype()
                if code not in _DTYPES:
                    raise UserError(f"{self.path / name}: {key} has dtype {code}, which is not supported")
                tensors[key] = Stored(name, _DTYPES[code], tuple(header.get_shape()))
        return tensors

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a tensor by name, or only ``rows`` of its first axis."""
        stored = self.tensors[name]
        try:
            file = self._open(stored.file)
            return file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        except SafetensorError as error:
            raise UserError(f"{self.path / stored.file} cannot be read: {name}: {error}") from error

    def _files(self) -> list[str]:
        path = self.path
        index = read_object(path / INDEX)
        if index is None:
            if (path / WEIGHTS).is_file():
                return [WEIGHTS]
            for name in _PICKLED:
                if (path / name).exists():
                    raise UserError(
                        f"{path} has pickled weights ({name}), which can run code and are not read: "
                        "convert them to safetensors"
                    )
            raise UserError(f"{path} has no weights: neither {WEIGHTS} nor {INDEX}")
        file_of = index.get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise UserError(f"{path / INDEX} has no weight_map with entries")
        files = sorted(set(map(str, file_of.values())))
        for name in files:
            if not _PLAIN_NAME.fullmatch(name):
                raise UserError(
                    f"{path / INDEX} names {name!r}, which must be a file name of letters, digits, '_', '.' and "
                    "'-' that begins with a letter or digit and ends with .safetensors"
                )
            if not (path / name).is_file():
                raise UserError(f"{path / name} is missing; {INDEX} names it")
        return files


class HuggingFaceFolder(SafetensorsFolder):
    """A model folder, written by transformers' ``save_pretrained`` or downloaded.

    Attributes:
        config: the parsed config.json.

    Raises:
        UserError: config.json is missing or damaged; otherwise, see `SafetensorsFolder`.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        config = read_object(path / CONFIG)
        if config is None:
            raise UserError(f"{path} is not a Hugging Face model: it has no {CONFIG}")
        self.config: dict[str, Any] = config


Layout = tuple[Shape, torch.dtype]
"""Shape and dtype of a tensor."""


def nbytes_of(layouts: Iterable[Layout]) -> int:
    """Return the total size of tensors in bytes."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in layouts)


def write_weights(folder: Path, layouts: Mapping[str, Layout], tensors: Iterable[Tensor], max_bytes: int) -> list[str]:
    """Write and sync safetensors: one file, or several with an index.

    Args:
        layouts: shapes and dtypes of the tensors by name, in order.
        tensors: values of the tensors, on any device, read one by one. A tensor may come in slices along its first
            axis.
        max_bytes: maximum bytes of tensors in a file, unless a single tensor is larger.

    Returns:
        Names of the files with tensors.
    """
    shards: list[dict[str, Layout]] = [{}]
    size = 0
    for name, layout in layouts.items():
        nbytes = nbytes_of([layout])
        if shards[-1] and size + nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = layout
        size += nbytes
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    values = iter(tensors)
    file_of: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        write_new(folder / name, _bytes_of_shard(shard, values))
        file_of |= dict.fromkeys(shard, name)
    if len(names) > 1:
        metadata = {"total_size": nbytes_of(layouts.values())}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": file_of})
    return names


def _bytes_of_shard(shard: Mapping[str, Layout], values: Iterator[Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file. The library's own writer needs all tensors of a file at once."""
    yield header_of(((name, dtype, shape) for name, (shape, dtype) in shard.items()), {"format": "pt"})
    for name, (shape, dtype) in shard.items():
        nbytes_left = nbytes_of([(shape, dtype)])
        while True:
            value = next(values)
            assert (value.dtype, tuple(value.shape[1:])) == (dtype, shape[1:]), name
            yield bytes_of(value.cpu().contiguous())
            nbytes_left -= value.nbytes
            if nbytes_left <= 0:
                break
        assert nbytes_left == 0, name


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write and sync a new JSON file."""
    write_new(path, [json_bytes(value)])


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return the contents of a JSON file."""
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def write_new(path: Path, buffers: Iterable[bytes | memoryview]) -> None:
    """Write and sync a new file."""
    with open(path, "xb") as file:
        file.writelines(buffers)
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
        free = free_bytes(temporary)
        if free < needed:
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
