"""Loading of any block or flat range of a tensor, assembled from the stored pieces that hold it."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fmoe.errors import UserError
from pretrain.checkpoint import codec
from pretrain.checkpoint.files import content_problem, size_problem
from pretrain.checkpoint.folders import MANIFEST, STATE, TMP, TRASH, rank_name, step_folders, step_of
from pretrain.checkpoint.geometry import Box, Region, Shape
from pretrain.checkpoint.manifest import StoredPiece, StoredTensor, check_coverage, read_manifest
from pretrain.checkpoint.save import TensorPiece
from pretrain.checkpoint.shard import CODES, name_of, open_shard

_NUM_OPEN_SHARDS = 64


def open_checkpoint(path: Path | str, *, verify: bool = True) -> "Checkpoint":
    """Open a step folder, or the newest one in a checkpoints folder or a run folder. Tensors are not read yet.

    Args:
        verify: compare the SHA-256 of each file with the manifest's before the file is first used.

    Raises:
        UserError: the path has no checkpoint; the manifest or the state is damaged; or a file is missing or has another
            size than recorded.
    """
    path = Path(path)
    if path.suffix in (TMP, TRASH) and step_of(path.stem) is not None:
        raise UserError(f"{path} is not a complete checkpoint: its writing or removal has not finished")
    if (path / MANIFEST).is_file() or (step_of(path.name) is not None and path.is_dir()):
        return Checkpoint(path, verify=verify)
    folders = step_folders(path)
    if not folders:
        raise UserError(f"{path} is not a checkpoint: it has no {MANIFEST}, step-* folder or checkpoints/step-* folder")
    return Checkpoint(folders[0], verify=verify)


class Checkpoint:
    """A complete checkpoint on disk, read piece by piece. Not collective: each rank reads only its share.

    Attributes:
        path: the step folder.
        step: the training step of the checkpoint.
        state: state of the run, as saved.
        num_ranks: number of ranks with a `rank_state`.
        manifest: the files and the index of tensors.
    """

    def __init__(self, path: Path, *, verify: bool = True):
        """Open a step folder; see `open_checkpoint`."""
        self.path = path
        self.manifest = read_manifest(path)
        self.step = self.manifest.step
        self.num_ranks = self.manifest.num_ranks
        self._verify = verify
        self._verified: set[str] = set()
        self._covered: set[str] = set()
        self._open_shard = lru_cache(_NUM_OPEN_SHARDS)(lambda name: open_shard(self._verified_path(name)))
        if step_of(path.name) not in (None, self.step):
            raise UserError(f"{path / MANIFEST} is of step {self.step}, unlike the name of its folder")
        for name, record in self.manifest.files.items():
            if (problem := size_problem(path / name, record)) is not None:
                raise UserError(f"{path / name} {problem}")
        self.state: dict[str, Any] = self._json(STATE)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Return the state of one rank. Ranks are numbered as in the run that saved the checkpoint.

        Raises:
            UserError: the checkpoint has no state of this rank, or the rank's file is damaged.
        """
        if not 0 <= rank < self.num_ranks:
            ranks = f"0..{self.num_ranks - 1}"
            raise UserError(f"{self.path} has no state of rank {rank}: the ranks that wrote it are {ranks}")
        return self._json(rank_name(rank))

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self.manifest.tensors)

    def shape(self, name: str) -> Shape:
        """Return the global shape of a tensor. Raise UserError for an unknown name."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor. Raise UserError for an unknown name."""
        return self._tensor(name).dtype

    def read(
        self,
        name: str,
        offset: Sequence[int] | None = None,
        block: Sequence[int] | None = None,
        start: int = 0,
        stop: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return a block of a tensor, or a flat range [start, stop) of the block; by default, the whole tensor.

        The tensor may have been saved at any parallel split. Only files with elements of the block or range are read.

        Args:
            offset: offset of the block in the tensor; default zeros.
            block: shape of the block; default from ``offset`` to the tensor's end.
            start, stop: the range, in elements of the flattened block, row-major.
            out: tensor on any device, to fill instead of a new CPU tensor. It must have the tensor's dtype, and as many
                elements as the block or range. It must be contiguous unless it has the block's shape.

        Returns:
            ``out`` or a new tensor. The new one has the shape ``block``, or is 1-D if a range was given.

        Raises:
            UserError: the tensor does not exist, the block or range is outside it, ``out`` has another dtype or
                size, or a file is damaged.
        """
        tensor = self._tensor(name)
        offset = (0,) * len(tensor.shape) if offset is None else tuple(offset)
        block = tuple(s - o for s, o in zip(tensor.shape, offset, strict=False)) if block is None else block
        wanted = Region.of(offset, block, start, stop)
        if (misfit := wanted.misfit(tensor.shape)) is not None:
            raise UserError(f"{self.path}: tensor {name}: {misfit}")
        if out is None:
            is_block = start == 0 and stop is None
            out = torch.empty(wanted.block if is_block else (wanted.size,), dtype=tensor.dtype, device="cpu")
        elif (out.dtype, out.numel()) != (tensor.dtype, wanted.size):
            raise UserError(
                f"{self.path}: tensor {name}: out has {out.numel()} elements of {name_of(out.dtype)}, "
                f"but the requested region has {wanted.size} of {name_of(tensor.dtype)}"
            )
        self._check_coverage(name, tensor)
        views = _views(out.detach(), wanted)
        for piece in tensor.pieces:
            for source in piece.region.boxes:
                for box, view in views:
                    if (common := source.common(box)) is not None:
                        view[common.slices_in(box.offset)].copy_(self._load(tensor, piece, source, common))
        return out

    def fill(self, piece: TensorPiece) -> None:
        """Read a piece of a tensor into ``piece.data``.

        Raises:
            UserError: as for `read`, or the checkpoint's tensor has another global shape than ``piece.shape``.
        """
        shape = self.shape(piece.name)
        if shape != tuple(piece.shape):
            raise UserError(
                f"{self.path}: tensor {piece.name} has shape {shape} in the checkpoint, expected {tuple(piece.shape)}"
            )
        self.read(piece.name, piece.offset, piece.block, piece.start, piece.stop, out=piece.data)

    def verify(self, share: int = 0, of: int = 1) -> None:
        """Check the size and SHA-256 of all files against the manifest, and that every tensor is complete.

        Args:
            share, of: for ranks that verify together: check only every ``of``-th file, beginning with number ``share``.
                The other files then count as verified.

        Raises:
            UserError: a checked file is bad (the message names all such files), or a tensor is incomplete.
        """
        files = self.manifest.files
        problems = {name: content_problem(self.path / name, files[name]) for name in sorted(files)[share::of]}
        bad = [f"{name} {problem}" for name, problem in problems.items() if problem is not None]
        if bad:
            raise UserError(f"{self.path}: {'; '.join(bad)}")
        self._verified |= files.keys()
        for name, tensor in self.manifest.tensors.items():
            self._check_coverage(name, tensor)

    def _tensor(self, name: str) -> StoredTensor:
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise UserError(f"{self.path} has no tensor {name}") from None

    def _check_coverage(self, name: str, tensor: StoredTensor) -> None:
        if name not in self._covered:
            try:
                check_coverage(name, tensor)
            except UserError as error:
                raise UserError(f"{self.path}: {error}") from None
            self._covered.add(name)

    def _verified_path(self, name: str) -> Path:
        path = self.path / name
        if self._verify and name not in self._verified:
            problem = content_problem(path, self.manifest.files[name])
            if problem is not None:
                raise UserError(f"{path} {problem}")
            self._verified.add(name)
        return path

    def _json(self, name: str) -> dict[str, Any]:
        if name not in self.manifest.files:
            raise UserError(f"{self.path / MANIFEST} is malformed: {name} is not among its files")
        path = self._verified_path(name)
        try:
            value = codec.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise UserError(f"{path} is invalid: not a JSON object")
        return value

    def _load(self, tensor: StoredTensor, piece: StoredPiece, source: Box, common: Box) -> Tensor:
        """Read the elements of the box ``common``, which lies in the piece's box ``source``."""
        region = piece.region
        try:
            stored = self._open_shard(piece.file).get_slice(piece.key)
        except SafetensorError as error:
            raise UserError(f"{self.path / piece.file} cannot be read: {error}") from error
        shape = list(region.block) if region.is_whole else [region.size]
        if (stored.get_dtype(), stored.get_shape()) != (CODES[tensor.dtype], shape):
            raise UserError(f"{self.path / piece.file}: {piece.key} differs in shape or dtype from {MANIFEST}")
        if region.is_whole:
            return stored[common.slices_in(region.offset)]
        # The box is contiguous in the piece: take the range from common's first to its last element.
        strides = [prod(source.shape[axis + 1 :]) for axis in range(len(source.shape))]
        corner = [c - s for c, s in zip(common.offset, source.offset, strict=True)]
        first = source.position + sum(c * s for c, s in zip(corner, strides, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(common.shape, strides, strict=True))
        return stored[first : last + 1].as_strided(common.shape, strides)


def _views(out: Tensor, wanted: Region) -> list[tuple[Box, Tensor]]:
    """Return each box of the region ``wanted``, and the view of ``out`` that holds the box's elements."""
    if wanted.is_whole:
        return [(box, out if out.shape == box.shape else out.view(box.shape)) for box in wanted.boxes]
    flat = out.view(-1)
    return [(box, flat[box.position : box.position + box.size].view(box.shape)) for box in wanted.boxes]
