"""Saving of a checkpoint: collect tensors on the host, write files, commit.

Each rank writes its own files. Renaming the folder publishes the checkpoint.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from fmoe.files import is_full, sync
from pretrain.checkpoint import codec
from pretrain.checkpoint.files import SaveError, free_bytes, write_file
from pretrain.checkpoint.folders import MANIFEST, STATE, TMP, rank_name, remove, shard_name, step_name
from pretrain.checkpoint.geometry import Region, Shape
from pretrain.checkpoint.host import HostBuffers
from pretrain.checkpoint.manifest import (
    Manifest,
    StoredPiece,
    StoredTensor,
    check_coverage,
    files_from_json,
    files_to_json,
    manifest_to_json,
    seal,
    tensors_from_json,
    tensors_to_json,
)
from pretrain.checkpoint.ranks import Ranks
from pretrain.checkpoint.shard import CODES, RESERVED_KEY, name_of, write_shard

# For the estimate of a snapshot's size, in bytes: JSON per piece without its name, and a block of the filesystem.
_BYTES_OF_A_PIECE = 200
_BLOCK = 4096


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """This rank's share of a global tensor: a block, or the flat range [start, stop) of the flattened block.

    Attributes:
        name: name of the tensor, the same on all ranks and at every split.
        shape: shape of the whole tensor.
        offset: offset of the block in the tensor.
        block: shape of the block.
        data: elements of the piece, on any device and with any strides. The shape is ``block``; for a range, any shape.
        start, stop: the range, in elements of the flattened block (row-major). ``stop=None`` means the block's end.
    """

    name: str
    shape: Shape
    offset: Shape
    block: Shape
    data: Tensor
    start: int = 0
    stop: int | None = None

    @property
    def region(self) -> Region:
        """Part of the global tensor that the piece covers."""
        return Region.of(self.offset, self.block, self.start, self.stop)

    @property
    def place(self) -> tuple:
        """Key that is unique among the pieces of a checkpoint."""
        return self.name, self.offset, self.block, self.start, self.stop

    def check(self) -> None:
        """Check that name and dtype are allowed, and that region and data fit the tensor.

        Raises:
            UserError: a check failed; the message names the tensor and the problem.
        """
        region = self.region
        problem = region.misfit(self.shape)
        if not self.name or self.name == RESERVED_KEY:
            problem = "the name is empty or reserved"
        elif problem is None and self.data.numel() != region.size:
            problem = f"the data has {self.data.numel()} elements, but its region has {region.size}"
        elif problem is None and self.start == 0 and self.stop is None and self.data.shape != tuple(self.block):
            problem = f"the data has shape {tuple(self.data.shape)}, but its block has {tuple(self.block)}"
        elif problem is None and self.data.dtype not in CODES:
            problem = f"dtype {self.data.dtype} is not supported"
        if problem is not None:
            raise UserError(f"tensor {self.name}: {problem}")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One rank's share of a checkpoint, in host memory, as `write` takes it.

    ``state`` and ``rank_state`` are encoded by `codec.dumps`. ``rank_state`` is None if the share has no rank's state.
    """

    pieces: tuple[TensorPiece, ...]
    state: bytes
    rank_state: bytes | None

    @property
    def nbytes(self) -> int:
        """Estimate of the bytes on disk: tensors, states, and the metadata of each piece."""
        tensors = sum(piece.data.nbytes for piece in self.pieces)
        names = sum(len(piece.name) for piece in self.pieces)
        described = 3 * (names + _BYTES_OF_A_PIECE * len(self.pieces))
        return tensors + described + len(self.state) + len(self.rank_state or b"") + 4 * _BLOCK


def collect(
    pieces: Iterable[TensorPiece],
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    *,
    copy: bool = False,
    buffers: HostBuffers | None = None,
) -> Snapshot:
    """Copy a rank's pieces to the host and encode its states. Not collective.

    Args:
        copy: also copy tensors that are on the host already. Needed if training continues before `write` is done.
        buffers: destination of the copies; implies ``copy``. The previous snapshot in these buffers must be on disk
            already.

    Raises:
        UserError: a piece is invalid (see ``TensorPiece.check``).
        TypeError: a value in a state is not supported in JSON (see `codec.dumps`).
    """
    host = []
    for piece in pieces:
        piece.check()
        data = piece.data.detach()
        data = data.to("cpu", copy=copy).contiguous() if buffers is None else buffers.copy(piece.place, data)
        host.append(replace(piece, data=data))
    if buffers is not None:
        buffers.finish()
    return Snapshot(tuple(host), codec.dumps(dict(state), "state"), codec.dumps(dict(rank_state), "rank_state"))


def save(
    folder: Path,
    step: int,
    pieces: Iterable[TensorPiece],
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a checkpoint as ``folder/step-NNNNNNNN``. Collective over the group.

    If it raises, no new step folder is left.

    Args:
        folder: parent of step folders (``RUN/checkpoints``), on a filesystem that all ranks share; created if missing.
        step: at least 0; an existing step is never overwritten.
        pieces: this rank's share. Together, the ranks hold each element of each tensor exactly once.
        state: state of the run; rank 0's is saved.
        rank_state: state of this rank (random generators, ...).
        group: the ranks that save, on gloo or nccl; default all. Not needed in a single process.

    Returns:
        The step folder, complete and durable.

    Raises:
        UserError: on every rank, if any rank has an invalid argument. On the other ranks, the message names that rank.
        SaveError: on every rank, if the operating system refuses to write.
        RuntimeError: another rank raised an exception that is neither of these.
    """
    with Ranks(group).together():
        snapshot = collect(pieces, state, rank_state)
    return write(folder, step, snapshot, group=group)


def save_parts(
    folder: Path,
    step: int,
    pieces: Iterable[TensorPiece],
    state: Mapping[str, Any],
    *,
    nbytes: int,
    part_bytes: int = 1 << 30,
    rank_states: Sequence[Mapping[str, Any]] | None = None,
) -> Path:
    """Save a checkpoint, such as imported weights, from one process and in bounded memory.

    Args:
        folder, step, state: as for `save`.
        pieces: consumed one by one. Together they hold each element of each tensor exactly once.
        nbytes: bytes of all pieces, to detect a full disk before anything is written.
        part_bytes: maximum bytes of pieces held in memory. They are written as one part, a file like that of one rank.
            A larger piece is a part by itself.
        rank_states: state of each rank, in the order of ranks; None saves one empty state per part.

    Returns, raises: as for `save`.
    """
    draft = _Draft(folder, step, nbytes)
    encoded = codec.dumps(dict(state), "state")
    encoded_ranks = None if rank_states is None else [codec.dumps(dict(each), "rank_state") for each in rank_states]

    def write_part(number: int, part: Sequence[TensorPiece]) -> None:
        rank_state: bytes | None = None
        if encoded_ranks is None:
            rank_state = codec.dumps({}, "rank_state")
        elif number < len(encoded_ranks):
            rank_state = encoded_ranks[number]
        draft.write_rank(number, Snapshot(tuple(part), encoded, rank_state))

    with Ranks().together(draft.discard):
        draft.create()
        with draft.disk_full_as_save_error():
            num_parts = 0
            for part in _parts(pieces, part_bytes):
                write_part(num_parts, part)
                num_parts += 1
            num_ranks = num_parts if encoded_ranks is None else len(encoded_ranks)
            for number in range(num_parts, num_ranks):
                write_part(number, [])
            draft.commit(num_ranks, encoded, max(num_parts, num_ranks))
    return draft.final


def _parts(pieces: Iterable[TensorPiece], part_bytes: int) -> Iterator[list[TensorPiece]]:
    """Copy pieces to the host, and yield them in parts of at most ``part_bytes`` or of one piece; at least one part."""
    part: list[TensorPiece] = []
    size = 0
    for piece in pieces:
        piece.check()
        if part and size + piece.data.nbytes > part_bytes:
            yield part
            part = []
            size = 0
        part.append(replace(piece, data=piece.data.detach().cpu().contiguous()))
        size += piece.data.nbytes
    yield part


def write(folder: Path, step: int, snapshot: Snapshot, *, group: dist.ProcessGroup | None = None) -> Path:
    """Write a snapshot as ``folder/step-NNNNNNNN``. Collective over the group.

    Other arguments, result and errors are as for `save`. May run in a thread, if nothing else uses the group at the
    time.
    """
    ranks = Ranks(group)
    draft = _Draft(folder, step, ranks.total(snapshot.nbytes))
    with ranks.together(draft.discard):
        if ranks.rank == 0:
            draft.create()
    with ranks.together(draft.discard):
        if not draft.tmp.is_dir():
            raise UserError(f"{draft.tmp} is missing on this rank: checkpoints need a filesystem that all ranks share")
        with draft.disk_full_as_save_error():
            draft.write_rank(ranks.rank, snapshot)
    with ranks.together(draft.discard):
        if ranks.rank == 0:
            with draft.disk_full_as_save_error():
                draft.commit(ranks.size, snapshot.state, ranks.size)
    return draft.final


class _Draft:
    """A checkpoint that is being written to ``step-N.tmp``, until `commit` renames it.

    Args:
        needed: estimate of its bytes on disk.
    """

    def __init__(self, folder: Path, step: int, needed: int):
        self.final = Path(folder) / step_name(step)
        self.tmp = self.final.with_name(self.final.name + TMP)
        self._step = step
        self._needed = needed

    def create(self) -> None:
        """Create the folder, after checks of the step and of the free space."""
        folder = self.final.parent
        if self._step < 0:
            raise UserError(f"step={self._step} must be at least 0")
        if os.path.lexists(self.final):
            raise UserError(f"{self.final} already exists: checkpoints are never overwritten")
        if not folder.is_dir():
            folder.mkdir(parents=True)
            sync(folder.parent)
        remove(self.tmp)  # left by a process that died
        free = free_bytes(folder)
        if free < self._needed:
            message = f"{folder}: disk full: the checkpoint needs {self._needed} bytes, but only {free} are free"
            raise SaveError(message, errno.ENOSPC)
        self.tmp.mkdir()

    def discard(self) -> None:
        shutil.rmtree(self.tmp, ignore_errors=True)

    @contextmanager
    def disk_full_as_save_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            folder = self.final.parent
            raise SaveError(
                f"{error.filename or folder}: {error.strerror}: the checkpoint needs {self._needed} bytes, "
                f"and {free_bytes(folder)} are free now",
                error.errno,
            ) from error

    def write_rank(self, rank: int, snapshot: Snapshot) -> None:
        """Write one rank's tensors and state, and an index of both for `commit`."""
        shard = shard_name(rank)
        index: dict[str, StoredTensor] = {}
        tensors: dict[str, Tensor] = {}  # by their key in the shard
        for piece in snapshot.pieces:
            region = piece.region
            pieces = _pieces_of(index, piece.name, piece.data.dtype, tuple(piece.shape))
            if region.size == 0:
                continue  # an empty tensor is an index entry without pieces
            key = f"{piece.name}#{len(pieces)}" if pieces else piece.name
            while key in tensors:  # another tensor may have this name
                key += "#"
            tensors[key] = piece.data.reshape(region.block if region.is_whole else -1)
            pieces.append(StoredPiece(shard, key, region))
        files = {}
        if snapshot.rank_state is not None:
            files[rank_name(rank)] = write_file(self.tmp / rank_name(rank), [snapshot.rank_state])
        if tensors:
            files[shard] = write_shard(self.tmp / shard, tensors)
        entry = {"files": files_to_json(files), "tensors": tensors_to_json(index)}
        write_file(self._index_of(rank), [json.dumps(entry).encode()])

    def commit(self, num_ranks: int, state: bytes, num_parts: int) -> None:
        """Merge the ``num_parts`` indices into a manifest, check that no element is missing, and publish the folder."""
        files = {STATE: write_file(self.tmp / STATE, [state])}
        tensors: dict[str, StoredTensor] = {}
        for number in range(num_parts):
            path = self._index_of(number)
            entry = json.loads(path.read_bytes())
            path.unlink()
            files |= files_from_json(entry["files"])
            for name, tensor in tensors_from_json(entry["tensors"]).items():
                _pieces_of(tensors, name, tensor.dtype, tensor.shape).extend(tensor.pieces)
        for name, tensor in tensors.items():
            check_coverage(name, tensor)
        manifest = Manifest(self._step, num_ranks, files, tensors)
        write_file(self.tmp / MANIFEST, [seal(manifest_to_json(manifest))])
        sync(self.tmp)
        os.rename(self.tmp, self.final)
        try:
            sync(self.final.parent)
        except OSError:
            os.rename(self.final, self.tmp)  # not known to be durable, so not published
            raise

    def _index_of(self, rank: int) -> Path:
        return self.tmp / f"index-{rank:05d}.json"


def _pieces_of(index: dict[str, StoredTensor], name: str, dtype: torch.dtype, shape: Shape) -> list[StoredPiece]:
    """Return the list of a tensor's pieces in ``index``, which the caller extends. Add an unknown tensor."""
    tensor = index.setdefault(name, StoredTensor(dtype, shape, []))
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise UserError(
            f"tensor {name}: its pieces differ in dtype or shape: {name_of(tensor.dtype)} {tensor.shape} and "
            f"{name_of(dtype)} {shape}"
        )
    return tensor.pieces
