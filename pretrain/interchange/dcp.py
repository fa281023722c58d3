"""Folders of torch.distributed.checkpoint (DCP): written by torch's writer, read without unpickling.

A folder has ``.distcp`` files, which hold tensors in pieces, and ``.metadata``, a pickle of the location of every
piece. A piece is what ``torch.save`` writes: a zip file with the tensor's bytes and a pickle that describes it.

Reading parses both pickles without running them (`pretrain.interchange.pickled`). It also compares the bytes with the
zip's CRC-32, which torch's own reader ignores.
"""

import contextlib
import io
import re
import struct
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

from fmoe.errors import UserError
from pretrain.checkpoint import Checkpoint
from pretrain.checkpoint.geometry import Region, Shape, first_overlap
from pretrain.checkpoint.shard import dtype_named, name_of
from pretrain.interchange.pickled import Made, Name, Persistent, parse

METADATA = ".metadata"
# Bytes of zip and metadata around a piece, for the estimate of disk space.
BYTES_AROUND_A_PIECE = 4096
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_READ_BYTES = 16 << 20
# Exceptions that reading a damaged file of torch.save may raise.
DAMAGE = (
    *(OSError, ValueError, RuntimeError, EOFError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(zipfile.BadZipFile, struct.error),
)
# Typed storages, by which torch.save names all but the newest dtypes.
_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}


def blocks(shape: Shape, itemsize: int, max_bytes: int) -> Iterator[tuple[Shape, Shape]]:
    """Split a tensor of ``shape`` along its first axis, and yield (offset, shape) of each slice.

    A slice has at most ``max_bytes``, unless a single row is larger.
    """
    rows = max(1, max_bytes // max(1, itemsize * prod(shape[1:]))) if shape else 1
    for row in range(0, max(1, shape[0]), rows) if shape else (0,):
        first = (min(rows, shape[0] - row),) if shape else ()
        yield (*(() if not shape else (row,)), *(0 for _ in shape[1:])), (*first, *shape[1:])


def write_dcp(folder: Path, checkpoint: Checkpoint, slices: Mapping[str, Sequence[tuple[Shape, Shape]]]) -> None:
    """Write and sync tensors of a checkpoint in DCP format: one data file and ``.metadata``.

    Args:
        slices: (offset, shape) of each tensor's slices, by tensor name. They are read one by one and become the chunks
            of the tensor.
    """
    planner, writer = _Planner(checkpoint, slices), _Writer(folder, sync_files=True, thread_count=1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    except dcp.CheckpointException as error:
        reasons = [reason for reason, _ in error.failures.values()]
        raise reasons[0] from error


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> None:
        """Return None. torch's method returns the path and a random ID, so files of equal tensors would differ."""


class _Planner(dcp.DefaultSavePlanner):
    """Save planner that reads slices from a checkpoint when torch's writer asks for them."""

    def __init__(self, checkpoint: Checkpoint, slices: Mapping[str, Sequence[tuple[Shape, Shape]]]):
        super().__init__()
        self._checkpoint, self._slices = checkpoint, slices

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, parts in self._slices.items():
            properties = TensorProperties(dtype=self._checkpoint.dtype(name))
            for offset, shape in parts:
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
            document = parse(metadata.read_bytes())
            self.tensors, self.objects = _contents_of(document)
        except FileNotFoundError:
            raise UserError(f"{path} is not a torch.distributed.checkpoint: it has no {METADATA}") from None
        except OSError as error:
            raise UserError(f"{metadata} cannot be read: {error.strerror}") from error
        except DAMAGE as error:
            raise UserError(f"{metadata} is damaged or of an unknown format: {error}") from error
        self._check_files()
        for name, tensor in self.tensors.items():
            _check_chunks(path, name, tensor)

    def read(self, name: str, chunk: Chunk) -> Tensor:
        """Return the elements of a chunk, in its shape.

        Raises:
            UserError: the file is damaged or cannot be read.
        """
        dtype = self.tensors[name].dtype
        with self._archive(name, chunk) as archive:
            tensor = _tensor_in(archive, dtype)
        if tensor.numel() != prod(chunk.shape):
            raise UserError(
                f"{self.path / chunk.file} is damaged: {name} has shape {list(tensor.shape)}, but "
                f"{list(chunk.shape)} in {METADATA}"
            )
        return tensor.reshape(chunk.shape)

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
        try:
            with open(path, "rb") as file, zipfile.ZipFile(_Part(file, where.position, where.length)) as archive:
                yield archive
        except DAMAGE as error:
            raise UserError(f"{path} is damaged or cannot be read: {name}: {error}") from error

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.position + chunk.length)
        for name, end in sorted(ends.items()):
            path = self._path_of(name)
            if (size := path.stat().st_size) < end:
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


def _contents_of(document: Any) -> tuple[dict[str, Chunked], dict[str, Location]]:
    """Return the tensors and the other objects that a parsed ``.metadata`` describes, by name."""
    if not _is(document, "Metadata"):
        raise ValueError("its pickle has no Metadata object")
    stored: dict[tuple[str, Shape | None], Any] = {}  # without an offset: objects other than tensors
    for index, info in document.state["storage_data"].items():
        if not isinstance(fqn := index.state["fqn"], str):
            raise ValueError(f"the name of an entry has type {type(fqn).__name__}: it must be str")
        offset = index.state.get("offset")
        stored[fqn, None if offset is None else _size(offset)] = info.state
    tensors, objects = {}, {}
    for name, entry in document.state["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise ValueError(f"the name of an entry has type {type(name).__name__}: it must be str")
        if not _is(entry, "TensorStorageMetadata"):
            if (name, None) in stored:
                objects[name] = Location(*_place(name, stored[name, None]))
            continue
        state = entry.state
        dtype = state["properties"].state[0]
        if not isinstance(dtype, Name):
            raise ValueError(f"{name} has no dtype")
        shape = _size(state["size"])
        chunks = []
        for chunk in state["chunks"]:
            offset, block = _size(chunk.state["offsets"]), _size(chunk.state["sizes"])
            if (name, offset) not in stored:
                raise ValueError(f"{name} has no data at {list(offset)}")
            chunks.append(Chunk(*_place(name, stored[name, offset]), offset, block))
        tensors[name] = Chunked(dtype_named(dtype.text.removeprefix("torch.")), shape, tuple(chunks))
    return tensors, objects


def _place(name: str, stored: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return file, position and length of data, from the attributes of its parsed ``_StorageInfo``."""
    if stored.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed or encrypted")
    file, begin, length = stored["relative_path"], stored["offset"], stored["length"]
    if not isinstance(file, str) or type(begin) is not int or type(length) is not int or min(begin, length) < 0:
        raise ValueError(f"{name} has an invalid file, offset or length")
    return file, begin, length


def _is(value: Any, name: str) -> bool:
    return isinstance(value, Made) and value.name.rpartition(".")[2] == name


def _size(value: Any) -> Shape:
    """Return a parsed shape, offset or stride as a tuple of integers."""
    numbers = value.args[0] if _is(value, "Size") else value
    if not isinstance(numbers, tuple | list) or any(
        type(number) is not int or not 0 <= number < 2**63 for number in numbers
    ):
        raise ValueError(
            f"a shape, offset or stride (a {type(numbers).__name__}) must have integers from 0 to 2^63 - 1"
        )
    return tuple(numbers)


def _check_chunks(path: Path, name: str, tensor: Chunked) -> None:
    boxes = []
    for chunk in tensor.chunks:
        region = Region.of(chunk.offset, chunk.shape)
        if misfit := region.misfit(tensor.shape):
            raise UserError(f"{path / METADATA}: {name}: {misfit}")
        boxes += [(chunk.file, box) for box in region.boxes]
    if overlap := first_overlap(boxes):
        raise UserError(f"{path / METADATA}: {name}: two chunks hold the element at {list(overlap[2])}")
    if missing := prod(tensor.shape) - sum(box.size for _, box in boxes):
        raise UserError(f"{path / METADATA}: {name}: {missing} of {prod(tensor.shape)} elements are missing")


def _tensor_in(archive: zipfile.ZipFile, dtype: torch.dtype) -> Tensor:
    """Return the tensor in an archive that ``torch.save`` wrote."""
    made = pickle_in(archive)
    if _is(made, "_rebuild_parameter"):
        made = made.args[0]
    if not (_is(made, "_rebuild_tensor_v2") or _is(made, "_rebuild_tensor_v3")):
        raise ValueError(f"a {made.name if isinstance(made, Made) else type(made).__name__} is not a plain tensor")
    storage, offset = made.args[:2]
    shape, strides = map(_size, made.args[2:4])
    if not isinstance(storage, Persistent) or not isinstance(storage.key, tuple) or storage.key[0] != "storage":
        raise ValueError("the tensor has no storage")
    kind, key = storage.key[1], storage.key[2]
    if not isinstance(key, str):
        raise ValueError("the tensor's storage has no name")
    found = made.args[6].text if _is(made, "_rebuild_tensor_v3") else str(_STORAGES[kind.text])
    if found.removeprefix("torch.") != name_of(dtype):
        raise ValueError(f"the tensor has dtype {found}, but {METADATA} has {name_of(dtype)}")
    if member(archive, "byteorder", b"little") != b"little":
        raise ValueError("its byte order is not little-endian")
    data = (
        torch.frombuffer(member(archive, f"data/{key}"), dtype=dtype)
        if prod(shape)
        else torch.empty(0, dtype=dtype, device="cpu")
    )
    if type(offset) is not int or offset < 0:
        raise ValueError(f"a tensor has the invalid storage offset {offset}")
    return data.as_strided(shape, strides, offset)


def pickle_in(archive: zipfile.ZipFile) -> Any:
    """Parse the pickle in an archive that ``torch.save`` wrote, without running it.

    Raises:
        Exception: the pickle is missing or malformed. The type is one of `DAMAGE`.
    """
    return parse(bytes(member(archive, "data.pkl")))


def member(archive: zipfile.ZipFile, name: str, default: bytes | None = None) -> bytearray | bytes:
    """Return the contents of a file in an archive that ``torch.save`` wrote.

    Args:
        name: path of the file below the archive's top folder.
        default: result if the file is missing; None to raise an error.

    Raises:
        ValueError: the file is missing and has no default, or is compressed or cut off.
        zipfile.BadZipFile: the file differs from its CRC-32.
    """
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    if not found:
        if default is None:
            raise ValueError(f"{name} is missing")
        return default
    if found[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    assert archive.fp is not None
    if found[0].file_size > archive.fp.seek(0, io.SEEK_END):
        raise ValueError(f"{name} should have {found[0].file_size} bytes, which is more than its archive has")
    data = bytearray(found[0].file_size)
    view, at = memoryview(data), 0
    with archive.open(found[0]) as file:
        while chunk := file.read(_READ_BYTES):
            view[at : at + len(chunk)] = chunk
            at += len(chunk)
    if at != len(data):
        raise ValueError(f"{name} is cut off")
    return data


class _Part(io.RawIOBase):
    """A readable file object with the ``length`` bytes of ``file`` from ``begin`` on."""

    def __init__(self, file: io.BufferedReader, begin: int, length: int):
        self._file, self._begin, self._length, self._at = file, begin, length, 0

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
    found = [(name, chunk) for name in names for chunk in folder.tensors[name].chunks]
    return sorted(found, key=lambda item: (item[1].file, item[1].position))
