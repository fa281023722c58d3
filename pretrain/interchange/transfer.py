"""Checkpoints as folders of other tools: ``fmoe checkpoint export`` and ``fmoe checkpoint import``.

The formats are torch.distributed.checkpoint (DCP) and safetensors, with fmoe's tensor names. Import also reads
checkpoints of Megatron-core, and renames their tensors. Values are not converted, so tensors are equal bit for bit.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from fmoe.errors import UserError
from pretrain.checkpoint import TensorPiece, codec, open_checkpoint
from pretrain.checkpoint.folders import STATE, rank_name
from pretrain.checkpoint.shard import name_of
from pretrain.config import ModelConfig, Recipe, build_recipe, load_recipe, write_recipe
from pretrain.config.imports import import_plugins, import_stored
from pretrain.config.model import full_name
from pretrain.data.opening import naming
from pretrain.interchange.dcp import BYTES_AROUND_A_PIECE, METADATA, DcpFolder, blocks, chunks_of, write_dcp
from pretrain.interchange.family import toml
from pretrain.interchange.folder import (
    INDEX,
    WEIGHTS,
    Layout,
    SafetensorsFolder,
    appearing,
    nbytes_of,
    refuse_output,
    write_new,
    write_weights,
)
from pretrain.interchange.incoming import weights_only, write_run
from pretrain.interchange.outgoing import SHARD_BYTES, recipe_of

RECIPE = "recipe.toml"
# Files of Megatron-core beside .metadata, and of Megatron-LM in the folder of all iterations.
MEGATRON = "metadata.json"
LATEST = "latest_checkpointed_iteration.txt"
# Beginnings of tensor names.
MODEL = "model/"
OPTIMIZER = "optimizer/"
MEMORY = "memory/"
SLICE_BYTES = 1 << 30
PRECISIONS = {torch.float32, torch.bfloat16, torch.float16}
# Keys of a run's state that resuming reads, beside its recipe, and their types.
_RESUMING_READS: dict[str, dict[str, Any]] = {
    "optimizer": {"step": int | float},
    "schedule": {"num_steps": int},
    "data": {"next_sample": int, "samples_per_epoch": int, "corpora": list | tuple},
}
Form = Literal["dcp", "safetensors"]


@dataclass(frozen=True)
class Transferred:
    """Result of an export or import.

    Attributes:
        num_tensors, nbytes: number of tensors, and their size in bytes.
        is_resumable: True if a run can resume from the result.
        is_checked: False if import could not check the recipe's routing, positions and norms. This happens for a
            checkpoint of Megatron-core that contains no Megatron-LM arguments.
    """

    num_tensors: int
    nbytes: int
    is_resumable: bool
    is_checked: bool = True


def export_tensors(
    source: Path,
    out: Path,
    form: Form = "dcp",
    *,
    optimizer: bool = False,
    shard_bytes: int = SHARD_BYTES,
    slice_bytes: int = SLICE_BYTES,
) -> Transferred:
    """Write the recipe and the tensors of a checkpoint to a folder of DCP or safetensors.

    The checkpoint may come from any parallel layout. Tensors keep their names and are not split among ranks.

    Args:
        source: folder of a checkpoint, or of a run for its newest checkpoint.
        out: a new or empty folder, which appears when it is complete.
        form: "dcp" for a folder of torch.distributed.checkpoint, or "safetensors".
        optimizer: also write the optimizer's tensors and all else that a run needs to resume.
        shard_bytes: maximum bytes of tensors in a safetensors file, unless a single tensor is larger.
        slice_bytes: maximum bytes to read at a time, unless a single row of a tensor is larger. Each slice becomes a
            chunk of a DCP folder.

    Raises:
        UserError: ``form`` is unknown; the checkpoint is damaged or lacks the optimizer state; ``out`` is not empty.
    """
    if form not in get_args(Form):
        raise UserError(f"--format {form} must be one of {', '.join(get_args(Form))}")
    refuse_output(out)
    checkpoint = open_checkpoint(source)
    recipe = recipe_of(checkpoint)
    if optimizer and checkpoint.state.get("weights_only"):
        raise UserError(f"{checkpoint.path} has no optimizer state: export it without --optimizer")
    names = [name for name in checkpoint.names() if optimizer or name.startswith(MODEL)]
    layouts = {name: (checkpoint.shape(name), checkpoint.dtype(name)) for name in names}
    slices = {name: list(blocks(shape, dtype.itemsize, slice_bytes)) for name, (shape, dtype) in layouts.items()}
    nbytes = nbytes_of(layouts.values())
    around = BYTES_AROUND_A_PIECE * sum(map(len, slices.values()))
    with appearing(out, nbytes + around) as folder:
        if form == "dcp":
            write_dcp(folder, checkpoint, slices)
        else:
            tensors = (checkpoint.read(name, *block) for name in names for block in slices[name])
            write_weights(folder, layouts, tensors, shard_bytes)
        write_recipe(recipe, folder / RECIPE)
        if optimizer:
            write_new(folder / STATE, [codec.dumps({**checkpoint.state, "step": checkpoint.step}, "state")])
            for rank in range(checkpoint.num_ranks):
                write_new(folder / rank_name(rank), [codec.dumps(checkpoint.rank_state(rank), "rank_state")])
    return Transferred(len(layouts), nbytes, optimizer)


@dataclass(frozen=True)
class StoredTensors:
    """Tensors of a folder.

    Attributes:
        layouts: shape and dtype by name.
        pieces: function that yields all tensors, each in one or more blocks.
    """

    layouts: Mapping[str, Layout]
    pieces: Callable[[], Iterable[TensorPiece]]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.layouts.values())


def import_tensors(source: Path, out: Path, *, recipe: str | None = None) -> Transferred:
    """Convert a folder with the tensors of a model to a run with one checkpoint.

    Args:
        source: a folder of DCP or safetensors with the names that `export_tensors` writes, or a checkpoint of
            Megatron-core's dist_checkpointing.
        out: a new or empty folder, which appears when it is complete.
        recipe: path or name of the model's recipe; None for the folder's recipe.toml.

    Raises:
        UserError: the folder has an unknown format, is damaged or has no recipe; a tensor is missing, unexpected or of
            another shape than in the recipe's model; Megatron's arguments differ from the recipe; ``out`` is not empty.
    """
    refuse_output(out)
    megatron = find_megatron(source)
    folder = open_folder(source) if megatron is None else DcpFolder(megatron)
    path = source / RECIPE
    if recipe is None and not path.is_file():
        raise UserError(f"{source} has no {RECIPE}: pass the model's recipe with --recipe")
    if recipe is None:
        loaded = load_recipe(str(path))
        try:
            import_stored(loaded, source)
        except UserError as error:
            raise UserError(f"{error}; if you trust this code, pass the recipe with --recipe") from error
    else:
        loaded = import_plugins(load_recipe(recipe))
    loaded = replace(loaded, run=replace(loaded.run, folder=str(out)))
    from pretrain.engine.meta import checkpoint_layouts  # imports megatron-core

    required = {f"{MODEL}{name}": layout for name, layout in checkpoint_layouts(loaded).items()}
    stored = stored_tensors(folder)
    is_checked = True
    if megatron is not None:
        stored, is_checked = _of_megatron(folder, loaded.model, required)
    _check_tensors(source, stored.layouts, required)
    is_resumable = any(name.startswith(OPTIMIZER) for name in stored.layouts)
    if is_resumable:
        state, rank_states = _states(source, loaded)
    else:
        loaded = replace(loaded, train=replace(loaded.train, init_from=str(out)))
        state = weights_only(loaded)
        rank_states = [{}]
    write_run(out, loaded, stored.pieces(), stored.nbytes, state, rank_states=rank_states)
    return Transferred(len(stored.layouts), stored.nbytes, is_resumable, is_checked)


def find_megatron(path: Path) -> Path | None:
    """Return the folder of a Megatron-core checkpoint: ``path`` itself or its latest iteration. Return None for other
    folders.

    Raises:
        UserError: the latest iteration is missing; metadata.json is damaged or has another format than ``torch_dist``.
    """
    if (path / LATEST).is_file():
        text = (path / LATEST).read_text(errors="replace").strip()
        path /= f"iter_{int(text):07d}" if re.fullmatch(r"\d{1,12}", text) else "release"
        if not (path / MEGATRON).is_file():
            raise UserError(f"{path / MEGATRON} is missing, but {LATEST} has {text[:20]!r}")
    settings = path / MEGATRON
    if not settings.is_file():
        return None
    try:
        values = json.loads(settings.read_bytes())
        backend = values["sharded_backend"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise UserError(f"{settings} is unreadable or has no sharded_backend, which must be torch_dist") from error
    if backend != "torch_dist":
        spelled = repr(backend) if isinstance(backend, str) else f"a {type(backend).__name__}"
        raise UserError(f"{settings}: sharded_backend={spelled} is not supported: it must be torch_dist")
    return path


def open_folder(path: Path) -> DcpFolder | SafetensorsFolder:
    """Open a folder of DCP or safetensors.

    Raises:
        UserError: the folder is missing or of an unknown format, or `DcpFolder` cannot read it.
    """
    if not path.is_dir():
        raise UserError(f"{path} is not a folder")
    if (path / METADATA).exists():
        return DcpFolder(path)
    if (path / WEIGHTS).exists() or (path / INDEX).exists():
        return SafetensorsFolder(path)
    raise UserError(f"{path} is of an unknown format: it has neither {METADATA} nor {WEIGHTS} nor {INDEX}")


def stored_tensors(folder: DcpFolder | SafetensorsFolder) -> StoredTensors:
    """Return the tensors of a folder, under the names that they have there."""
    layouts = {name: (tensor.shape, tensor.dtype) for name, tensor in folder.tensors.items()}
    if isinstance(folder, DcpFolder):
        return StoredTensors(layouts, lambda: _dcp_pieces(folder))
    return StoredTensors(layouts, lambda: _safetensors_pieces(folder))


def _dcp_pieces(folder: DcpFolder) -> Iterator[TensorPiece]:
    for name, chunk in chunks_of(folder, folder.tensors):
        yield TensorPiece(name, folder.tensors[name].shape, chunk.offset, chunk.shape, folder.read(name, chunk))


def _safetensors_pieces(folder: SafetensorsFolder) -> Iterator[TensorPiece]:
    for name, stored in folder.tensors.items():
        for offset, shape in blocks(stored.shape, stored.dtype.itemsize, SLICE_BYTES):
            rows = slice(offset[0], offset[0] + shape[0]) if shape else None
            yield TensorPiece(name, stored.shape, offset, shape, folder.read(name, rows))


def _of_megatron(
    folder: DcpFolder | SafetensorsFolder, model: ModelConfig, required: Mapping[str, Layout]
) -> tuple[StoredTensors, bool]:
    """Return the model's tensors under fmoe's names, and the result of `check_arguments`."""
    from pretrain.interchange.megatron import check_arguments, pieces_of, rename  # imports megatron-core

    assert isinstance(folder, DcpFolder)
    is_checked = check_arguments(folder, model)
    renamed = rename(folder, required)
    layouts = {tensor.name: (tensor.shape, tensor.dtype) for tensor in renamed}
    return StoredTensors(layouts, lambda: pieces_of(folder, renamed)), is_checked


def _check_tensors(source: Path, layouts: Mapping[str, Layout], required: Mapping[str, Layout]) -> None:
    """Raise UserError unless ``layouts`` has the names, shapes and dtypes of ``required``."""
    for name, (shape, dtype) in required.items():
        if name not in layouts:
            raise UserError(f"{source} has no tensor {name}, which the model of the recipe has")
        stored_shape, stored_dtype = layouts[name]
        if stored_shape != shape:
            raise UserError(
                f"{source}: {name} has shape {list(stored_shape)}, but the recipe's model has {list(shape)}"
            )
        # A weight may have another precision than the recipe's.
        if stored_dtype != dtype and not {stored_dtype, dtype} <= PRECISIONS:
            raise UserError(
                f"{source}: {name} has dtype {name_of(stored_dtype)}, but the recipe's model has {name_of(dtype)}"
            )
    for name in layouts:
        if name not in required and not name.startswith((OPTIMIZER, MEMORY)):
            raise UserError(f"{source} has the tensor {name}, which the model of the recipe does not have")


def _states(source: Path, recipe: Recipe) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the state of the run in a folder with optimizer tensors, and the states of its ranks.

    Raises:
        UserError: a file is missing or damaged, or lacks what resuming reads; the recipe has another model.
    """
    state = _read_state(source / STATE)
    rank_states = [_read_state(source / rank_name(rank)) for rank in range(len(list(source.glob("rank-*.json"))))]
    if not rank_states:
        raise UserError(f"{source / rank_name(0)} is missing; it belongs to the optimizer's state")
    path = source / STATE
    if type(state.get("step")) is not int or state["step"] < 0:
        raise UserError(f"{path} is damaged: it has no valid step")
    if state.get("weights_only"):
        raise UserError(f"{path} has weights_only=true, but {source} has tensors of the optimizer")
    if not isinstance(state.get("recipe"), dict):
        raise UserError(f"{path} is damaged: it has no recipe")
    with naming(f"the recipe of {path}"):
        stored = build_recipe(state["recipe"])
    for key, value in stored.model.values().items():
        required = recipe.model.value(key)
        if value != required:
            raise UserError(f"{path} has {full_name(key)}={toml(value)}, but the recipe has {toml(required)}")
    for section, keys in _RESUMING_READS.items():
        table = state.get(section)
        for key, kind in keys.items():
            if not isinstance(table, dict) or not isinstance(table.get(key), kind):
                raise UserError(f"{path} is damaged: it has no valid {section}.{key}")
    for rank, rank_state in enumerate(rank_states):
        if "rng" not in rank_state:
            raise UserError(f"{source / rank_name(rank)} is damaged: it has no rng")
    return state, rank_states


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = codec.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; it belongs to the optimizer's state") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(state, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object")
    return state
