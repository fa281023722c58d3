"""Saving: collect to the host, write, commit. Every rank writes its own file; the checkpoint appears in one rename."""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from pretrain.checkpoint import codec
from pretrain.checkpoint.files import SaveError, free_bytes, is_full, sync_folder, write_file
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

# For the estimate of what a snapshot takes: of a piece's JSON beside its name, and of a filesystem's blocks.
_BYTES_OF_A_PIECE = 200
_BLOCK = 4096


@dataclass(frozen=True, eq=False)
class Piece:
    """What this rank holds of a global tensor: a block, or the flat range [start, stop) of the flattened block.

    Attributes:
        name: of the tensor, the same on all ranks and at every split.
        shape: of the whole tensor.
        offset: of the block in the tensor.
        block: shape of the block.
        data: of shape ``block``, or ``stop - start`` elements of any shape. Any device and strides.
        start, stop: in elements of the flattened block (row-major); ``stop=None`` is its end.
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
        return Region.of(self.offset, self.block, self.start, self.stop)

    @property
    def place(self) -> tuple:
        """What tells this piece from all others of a checkpoint."""
        return self.name, self.offset, self.block, self.start, self.stop

    def check(self) -> None:
        """Checks that region and data fit the tensor.

        Raises:
            UserError: names the tensor and what does not fit.
        """
        region, problem = self.region, None
        if not self.name or self.name == RESERVED_KEY:
            problem = "the name is reserved"
        elif misfit := region.misfit(self.shape):
            problem = misfit
        elif self.data.numel() != region.size:
            problem = f"the data has {self.data.numel()} elements, its region {region.size}"
        elif self.start == 0 and self.stop is None and self.data.shape != tuple(self.block):
            problem = f"the data has shape {tuple(self.data.shape)}, its block {tuple(self.block)}"
        elif self.data.dtype not in CODES:
            problem = f"{self.data.dtype} cannot be saved"
        if problem:
            raise UserError(f"tensor {self.name}: {problem}")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What one rank contributes to a checkpoint, on the host, its states encoded: all that `write` needs."""

    pieces: tuple[Piece, ...]
    state: bytes
    rank_state: bytes

    @property
    def nbytes(self) -> int:
        """About what it takes on disk: tensors, states, and what the index and the headers say of each piece."""
        tensors = sum(piece.data.nbytes for piece in self.pieces)
        names = sum(len(piece.name) for piece in self.pieces)
        described = 3 * (names + _BYTES_OF_A_PIECE * len(self.pieces))
        return tensors + described + len(self.state) + len(self.rank_state) + 4 * _BLOCK


def collect(
    pieces: Iterable[Piece],
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    *,
    copy: bool = False,
    buffers: HostBuffers | None = None,
) -> Snapshot:
    """Brings a rank's pieces to the host. Not collective.

    Args:
        copy: copies tensors that are on the host already. Needed when training goes on before `write` is done.
        buffers: where to copy to; ``copy`` is then true. The snapshot before must have been written by now.

    Raises:
        UserError: a piece does not fit its tensor.
        TypeError: a value in a state has no JSON form (see `codec.dumps`).
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
    pieces: Iterable[Piece],
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Saves a checkpoint as ``folder/step-NNNNNNNN``. Collective over the group; `collect`, then `write`.

    Args:
        folder: holds the step folders (``RUN/checkpoints``), on a filesystem that all ranks share; made if need be.
        step: at least 0; a step that is there already is never overwritten.
        pieces: what this rank holds. Over all ranks, they hold each element of each tensor exactly once.
        state: of the run; rank 0's is saved.
        rank_state: of this rank (random generators, ...).
        group: the ranks that save; default all. gloo or nccl. None needed in a single process.

    Returns:
        The step folder, complete and durable when this returns.

    Raises:
        UserError: on every rank, when any rank was given something wrong (the message names it).
        SaveError: on every rank, when the system refused to write. In both cases, and for any other exception on a
            rank (RuntimeError on the others), neither a step folder nor a temporary one is left behind.
    """
    with Ranks(group).together():
        snapshot = collect(pieces, state, rank_state)
    return write(folder, step, snapshot, group=group)


def save_parts(
    folder: Path,
    step: int,
    pieces: Iterable[Piece],
    state: Mapping[str, Any],
    *,
    nbytes: int,
    part_bytes: int = 1 << 30,
) -> Path:
    """Saves what no run has made, such as imported weights: one process, which need not hold all of it at once.

    Args:
        folder, step, state: as for `save`.
        pieces: asked for one by one; together they hold each element of each tensor exactly once.
        nbytes: of all pieces, to tell a full disk before anything is written.
        part_bytes: of pieces that are held and written together, as those of a rank are.

    Returns, raises: as `save`.
    """
    final = Path(folder) / step_name(step)
    tmp = final.with_name(final.name + TMP)
    space, encoded, empty = _Space(final.parent, nbytes), codec.dumps(dict(state), "state"), codec.dumps({}, "state")
    with Ranks().together(lambda: shutil.rmtree(tmp, ignore_errors=True)):
        _prepare(final, tmp, space)
        with space.telling():
            parts, size = 0, 0
            held: list[Any] = []
            for piece in pieces:
                piece.check()
                if held and size + piece.data.nbytes > part_bytes:
                    _write_rank(tmp, parts, Snapshot(tuple(held), encoded, empty))
                    parts, held, size = parts + 1, [], 0
                held.append(replace(piece, data=piece.data.detach().cpu().contiguous()))
                size += piece.data.nbytes
            _write_rank(tmp, parts, Snapshot(tuple(held), encoded, empty))
            _commit(final, tmp, step, parts + 1, encoded)
    return final


def write(folder: Path, step: int, snapshot: Snapshot, *, group: dist.ProcessGroup | None = None) -> Path:
    """Writes a snapshot. Collective over the group; errors, arguments and result as for `save`.

    May run in a thread, given a group that nothing else uses meanwhile.
    """
    ranks = Ranks(group)
    final = Path(folder) / step_name(step)
    tmp = final.with_name(final.name + TMP)

    def undo() -> None:
        shutil.rmtree(tmp, ignore_errors=True)

    space = _Space(final.parent, ranks.total(snapshot.nbytes))
    with ranks.together(undo):
        if step < 0:
            raise UserError(f"step {step} cannot be saved: steps are counted from 0")
        if ranks.rank == 0:
            _prepare(final, tmp, space)
    with ranks.together(undo):
        if not tmp.is_dir():
            raise UserError(f"{tmp} is not seen here: checkpoints have to lie on a filesystem that all ranks share")
        with space.telling():
            _write_rank(tmp, ranks.rank, snapshot)
    with ranks.together(undo):
        if ranks.rank == 0:
            with space.telling():
                _commit(final, tmp, step, ranks.size, snapshot.state)
    return final


class _Space:
    """What a checkpoint takes and what there is: full disks are told with both.

    Args:
        folder: of the checkpoints; may not exist yet.
        needed: bytes, of all ranks.
    """

    def __init__(self, folder: Path, needed: int):
        self._folder, self._needed = folder, needed

    def check(self) -> None:
        """Raises SaveError if there is too little before a byte is written."""
        free = free_bytes(self._folder)
        if free < self._needed:
            message = f"{self._folder}: disk full: the checkpoint needs {self._needed} bytes, {free} are free"
            raise SaveError(message, errno.ENOSPC)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Within, an error of a full disk becomes a SaveError with the figures; other writers may have filled it."""
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            raise SaveError(
                f"{error.filename or self._folder}: {error.strerror}: the checkpoint needs {self._needed} bytes, "
                f"{free_bytes(self._folder)} are free beside what of it is written",
                error.errno,
            ) from error


def _prepare(final: Path, tmp: Path, space: _Space) -> None:
    if os.path.lexists(final):
        raise UserError(f"{final} is there already: checkpoints are never overwritten")
    if not final.parent.is_dir():
        final.parent.mkdir(parents=True)
        sync_folder(final.parent.parent)
    remove(tmp)  # left by a process that died
    space.check()
    tmp.mkdir()


def _index_name(rank: int) -> str:
    return f"index-{rank:05d}.json"


def _write_rank(tmp: Path, rank: int, snapshot: Snapshot) -> None:
    """Writes one rank's shard and state, and what the manifest has to say of them as a file for rank 0 to merge."""
    shard, data, index = shard_name(rank), {}, _Index()
    for piece in snapshot.pieces:
        region = piece.region
        pieces = index.pieces_of(piece.name, piece.data.dtype, tuple(piece.shape))
        if region.size == 0:
            continue  # an empty tensor is an index entry without pieces
        key = f"{piece.name}#{len(pieces)}" if pieces else piece.name
        while key in data:  # a tensor may have such a name itself
            key += "#"
        data[key] = piece.data.reshape(region.block if region.is_whole else -1)
        pieces.append(StoredPiece(shard, key, region))
    files = {rank_name(rank): write_file(tmp / rank_name(rank), [snapshot.rank_state])}
    if data:
        files[shard] = write_shard(tmp / shard, data)
    entry = {"files": files_to_json(files), "tensors": tensors_to_json(index.tensors())}
    write_file(tmp / _index_name(rank), [json.dumps(entry).encode()])


def _commit(final: Path, tmp: Path, step: int, num_ranks: int, state: bytes) -> None:
    """Merges the ranks' indices, checks that nothing is missing, and makes the checkpoint appear."""
    files, index = {STATE: write_file(tmp / STATE, [state])}, _Index()
    for rank in range(num_ranks):
        path = tmp / _index_name(rank)
        entry = json.loads(path.read_bytes())
        path.unlink()
        files |= files_from_json(entry["files"])
        for name, tensor in tensors_from_json(entry["tensors"]).items():
            index.pieces_of(name, tensor.dtype, tensor.shape).extend(tensor.pieces)
    tensors = index.tensors()
    for name, tensor in tensors.items():
        check_coverage(name, tensor)
    write_file(tmp / MANIFEST, [seal(manifest_to_json(Manifest(step, num_ranks, files, tensors)))])
    sync_folder(tmp)
    os.rename(tmp, final)
    try:
        sync_folder(final.parent)
    except OSError:
        os.rename(final, tmp)  # not known to be durable, so not there
        raise


class _Index:
    """Tensors as their pieces come in; all holders of one have to agree on what it is."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[torch.dtype, Shape, list[StoredPiece]]] = {}

    def pieces_of(self, name: str, dtype: torch.dtype, shape: Shape) -> list[StoredPiece]:
        known_dtype, known_shape, pieces = self._known.setdefault(name, (dtype, shape, []))
        if (known_dtype, known_shape) != (dtype, shape):
            raise UserError(
                f"tensor {name}: one piece is of a {name_of(known_dtype)} tensor {known_shape}, "
                f"another of a {name_of(dtype)} tensor {shape}"
            )
        return pieces

    def tensors(self) -> dict[str, StoredTensor]:
        return {name: StoredTensor(dtype, shape, tuple(pieces)) for name, (dtype, shape, pieces) in self._known.items()}
