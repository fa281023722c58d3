"""Folders of torch.distributed.checkpoint (DCP): written by torch's writer, read without running code.

A folder has ``.distcp`` files, which hold tensors in pieces, and ``.metadata``, a pickle of the location of every
piece. A piece is what ``torch.save`` writes: a zip file with the tensor's bytes and a pickle that describes it.

torch's reader of ``.metadata`` would run any code in it, so `pretrain.interchange.pickled` reads it. ``torch.load``
reads the pieces, after a comparison with the zip's CRC-32, which torch ignores.
"""

import contextlib
import io
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from fmoe.errors import UserError, one_line
from pretrain.checkpoint import Checkpoint
from pretrain.checkpoint.geometry import Region, Shape, first_overlap
from pretrain.checkpoint.shard import dtype_named, name_of
from pretrain.interchange.pickled import Made, parse

METADATA = ".metadata"
# Bytes of zip and metadata around a piece, for the estimate of disk space.
BYTES_AROUND_A_PIECE = 4096
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def blocks(shape: Shape, itemsize: int, max_bytes: int) -> Iterator[tuple[Shape, Shape]]:
    """Split a tensor of ``shape`` along its first axis, and yield (offset, shape) of each slice.

    A slice has at most ``max_bytes``, unless a single row is larger.
    """
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    num_rows = max(1, max_bytes // max(1, itemsize * prod(inner)))
    for row in range(0, max(1, shape[0]), num_rows):
        yield (row, *(0 for _ in inner)), (min(num_rows, shape[0] - row), *inner)


def write_dcp(folder: Path, checkpoint: Checkpoint, slices: Mapping[str, Sequence[tuple[Shape, Shape]]]) -> None:
    """Write and sync tensors of a checkpoint in DCP format: one data file and ``.metadata``.

    Args:
        slices: (offset, shape) of each tensor's slices, by tensor name. They are read one by one and become the chunks
            of the tensor.
    """
    writer = _Writer(folder, sync_files=True, thread_count=1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
            dcp.save({}, storage_writer=writer, planner=_Planner(checkpoint, slices), no_dist=True)
    except dcp.CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        raise reason from error


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> None:
        """Return None. torch's method returns the path and a random ID, so files of equal tensors would differ."""


class _Planner(dcp.DefaultSavePlanner):
    """Save planner that reads slices from a checkpoint when torch's writer asks for them."""

    def __init__(self, checkpoint: Checkpoint, slices: Mapping[str, Sequence[tuple[Shape, Shape]]]):
        super().__init__()
        self._checkpoint = checkpoint
        self._slices = slices

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, slices in self._slices.items():
            properties = TensorProperties(dtype=self._checkpoint.dtype(name))
            for offset, shape in slices:
                chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
                data = TensorWriteData(chunk, properties, torch.Size(self._checkpoint.shape(name)))
                items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        self.mappings = {name: (name,) for name in self._slices}
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return self._checkpoint.read(write_item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes))


@dataclass(frozen=True)
class Location:
    """Data of a DCP folder: ``length`` bytes of ``file`` from ``position`` on."""

    file: str
    position: int
    length: int


@dataclass(frozen=True)
class Chunk(Location):
    """A block of a tensor of a DCP folder."""

    offset: Shape
    shape: Shape


@dataclass(frozen=True)
class Chunked:
    """A tensor of a DCP folder, stored in chunks that together hold each element once."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


class DcpFolder:
    """A DCP folder, read chunk by chunk.

    Attributes:
        path: the folder.
        tensors: its tensors by name.
        objects: its other objects by name, such as the state of a generator.

    Raises:
        UserError: ``.metadata`` is missing or damaged; a file is missing, too short or outside the folder; chunks of a
            tensor overlap, exceed it or leave elements out.
    """

    def __init__(self, path: Path):
        self.path = path
        metadata = path / METADATA
        try:
            self.tensors, self.objects = _contents_of(parse(metadata.read_bytes()))
        except FileNotFoundError:
            raise UserError(f"{path} is not a torch.distributed.checkpoint: it has no {METADATA}") from None
        except OSError as error:
            raise UserError(f"{metadata} cannot be read: {error.strerror}") from error
        except Exception as error:  # a damaged pickle may have any value in any place
            raise UserError(f"{metadata} is damaged or of an unknown format: {error}") from error
        self._check_files()
        for name, tensor in self.tensors.items():
            _check_chunks(path, name, tensor)

    def read(self, name: str, chunk: Chunk) -> Tensor:
        """Return the elements of a chunk, in its shape.

        Raises:
            UserError: the file is damaged or cannot be read.
        """
        with self._archive(name, chunk) as archive:
            return _tensor_in(archive, self.tensors[name].dtype, chunk.shape)

    def read_object(self, name: str) -> Any:
        """Return an object that ``torch.save`` stored, parsed as by `pretrain.interchange.pickled.parse`.

        Raises:
            UserError: the file is damaged or cannot be read.
        """
        with self._archive(name, self.objects[name]) as archive:
            return pickle_in(archive)

    @contextlib.contextmanager
    def _archive(self, name: str, where: Location) -> Iterator[zipfile.ZipFile]:
        """Open what ``torch.save`` stored. Convert errors of the ``with`` block to a UserError."""
        path = self._path_of(where.file)
        with reading(path, f"{name}: "), open(path, "rb") as file:
            yield zipfile.ZipFile(_Part(file, where.position, where.length))

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.position + chunk.length)
        for name, end in sorted(ends.items()):
            path = self._path_of(name)
            size = path.stat().st_size
            if size < end:
                raise UserError(f"{path} has {size} bytes, but {METADATA} requires {end}")

    def _path_of(self, name: str) -> Path:
        """Return the path of a file that ``.metadata`` names, after a check that it is a file of the folder."""
        path = self.path / name
        if not _PLAIN_NAME.fullmatch(name):
            raise UserError(
                f"{self.path / METADATA} names {name!r}, which must be a file name of letters, digits, '_', '.' "
                "and '-' that does not begin with '.' or '-'"
            )
        if not path.is_file():
            raise UserError(f"{path} is missing; {METADATA} names it")
        return path


def _contents_of(metadata: Any) -> tuple[dict[str, Chunked], dict[str, Location]]:
    """Return the tensors and the other objects that a parsed ``.metadata`` describes, by name."""
    if not _is(metadata, "Metadata"):
        raise ValueError("its pickle has no Metadata object")
    locations: dict[tuple[str, Shape | None], Location] = {}  # without an offset: objects other than tensors
    for index, info in metadata.state["storage_data"].items():
        name = _checked_name(index.state["fqn"])
        offset = index.state.get("offset")
        locations[name, None if offset is None else _size(offset)] = _location(name, info.state)
    tensors = {}
    objects = {}
    for name, entry in metadata.state["state_dict_metadata"].items():
        _checked_name(name)
        if _is(entry, "TensorStorageMetadata"):
            tensors[name] = _chunked(name, entry.state, locations)
        elif (name, None) in locations:
            objects[name] = locations[name, None]
    return tensors, objects


def _chunked(name: str, entry: Mapping[str, Any], locations: Mapping[tuple[str, Shape | None], Location]) -> Chunked:
    chunks = []
    for chunk in entry["chunks"]:
        offset = _size(chunk.state["offsets"])
        if (name, offset) not in locations:
            raise ValueError(f"{name} has no data at {list(offset)}")
        where = locations[name, offset]
        chunks.append(Chunk(where.file, where.position, where.length, offset, _size(chunk.state["sizes"])))
    dtype = entry["properties"].state[0].name.removeprefix("torch.")
    return Chunked(dtype_named(dtype), _size(entry["size"]), tuple(chunks))


def _checked_name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"the name of an entry has type {type(name).__name__}: it must be str")
    return name


def _location(name: str, info: Mapping[str, Any]) -> Location:
    """Return the location of data, from the attributes of its parsed ``_StorageInfo``."""
    if info.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed or encrypted")
    file = info["relative_path"]
    position = info["offset"]
    length = info["length"]
    if not isinstance(file, str) or type(position) is not int or type(length) is not int or min(position, length) < 0:
        raise ValueError(f"{name} has an invalid file, offset or length")
    return Location(file, position, length)


def _is(value: Any, name: str) -> bool:
    return isinstance(value, Made) and value.name.rpartition(".")[2] == name


def _size(value: Any) -> Shape:
    """Return a parsed shape or offset as a tuple of integers."""
    numbers = value.args[0] if _is(value, "Size") else value
    is_list = isinstance(numbers, tuple | list)
    if not is_list or any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"a shape or offset (a {type(numbers).__name__}) must have integers from 0 to 2^63 - 1")
    return tuple(numbers)


def _check_chunks(path: Path, name: str, tensor: Chunked) -> None:
    boxes = []
    for chunk in tensor.chunks:
        region = Region.of(chunk.offset, chunk.shape)
        misfit = region.misfit(tensor.shape)
        if misfit is not None:
            raise UserError(f"{path / METADATA}: {name}: {misfit}")
        boxes += [(chunk.file, box) for box in region.boxes]
    overlap = first_overlap(boxes)
    if overlap is not None:
        raise UserError(f"{path / METADATA}: {name}: two chunks hold the element at {list(overlap[2])}")
    missing = prod(tensor.shape) - sum(box.size for _, box in boxes)
    if missing:
        raise UserError(f"{path / METADATA}: {name}: {missing} of {prod(tensor.shape)} elements are missing")


def _tensor_in(archive: zipfile.ZipFile, dtype: torch.dtype, shape: Shape) -> Tensor:
    """Return the tensor in an archive that ``torch.save`` wrote."""
    member = archive.testzip()
    if member is not None:
        raise ValueError(f"{member} differs from its CRC-32")
    assert archive.fp is not None
    archive.fp.seek(0)
    tensor = torch.load(archive.fp, map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ValueError(f"a {type(tensor).__name__} is not a plain tensor")
    if tensor.dtype != dtype:
        raise ValueError(f"the tensor has dtype {name_of(tensor.dtype)}, but {METADATA} has {name_of(dtype)}")
    if tensor.numel() != prod(shape):
        raise ValueError(f"the tensor has shape {list(tensor.shape)}, but {METADATA} has {list(shape)}")
    return tensor.detach().reshape(shape)


def pickle_in(archive: zipfile.ZipFile) -> Any:
    """Parse the pickle in an archive that ``torch.save`` wrote.

    Raises:
        Exception: the pickle is missing, malformed or differs from its CRC-32.
    """
    (name,) = (name for name in archive.namelist() if name.partition("/")[2] == "data.pkl")
    return parse(archive.read(name))


@contextlib.contextmanager
def reading(path: Path, what: str = "") -> Iterator[None]:
    """Convert errors of the ``with`` block, which reads a file of ``torch.save``, to a UserError."""
    try:
        yield
    except Exception as error:  # of many kinds, from torch, zipfile and pickle
        raise UserError(f"{path} is damaged or cannot be read: {what}{one_line(error, 200)}") from error


class _Part(io.RawIOBase):
    """A readable file object with the ``length`` bytes of ``file`` from ``begin`` on."""

    def __init__(self, file: io.BufferedReader, begin: int, length: int):
        self._file = file
        self._begin = begin
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(view[: max(0, min(len(view), self._length - self._at))])
        self._at += count
        return count


def chunks_of(folder: DcpFolder, names: Iterable[str]) -> list[tuple[str, Chunk]]:
    """Return (name, chunk) pairs of the named tensors, ordered by file and position to read each file front to back."""
    chunks = [(name, chunk) for name in names for chunk in folder.tensors[name].chunks]
    return sorted(chunks, key=lambda item: (item[1].file, item[1].position))
