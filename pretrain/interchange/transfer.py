"""Checkpoints as folders of other tools: ``fmoe checkpoint export`` and ``fmoe checkpoint import``.

The formats are torch.distributed.checkpoint (DCP) and safetensors, with fmoe's tensor names. Import also reads
checkpoints of Megatron-core, and renames their tensors. Values are not converted, so tensors are equal bit for bit.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from fmoe.errors import UserError
from pretrain.checkpoint import Piece, codec, open_checkpoint, save_parts
from pretrain.checkpoint.folders import STATE, rank_name
from pretrain.checkpoint.geometry import Shape
from pretrain.checkpoint.shard import name_of
from pretrain.config import ModelConfig, Recipe, build_recipe, load_recipe, write_recipe
from pretrain.config.imports import import_plugins, import_stored
from pretrain.interchange.dcp import BYTES_AROUND_A_PIECE, METADATA, DcpFolder, blocks, chunks_of, write_dcp
from pretrain.interchange.family import toml
from pretrain.interchange.folder import (
    INDEX,
    WEIGHTS,
    Planned,
    SafetensorsFolder,
    appearing,
    refuse_output,
    write_bytes,
    write_weights,
)
from pretrain.interchange.outgoing import SHARD_BYTES, recipe_of
from pretrain.tracking.folder import CHECKPOINTS, CONFIG

RECIPE = "recipe.toml"
# Files of Megatron-core beside .metadata, and of Megatron-LM in the folder of all iterations.
MEGATRON, LATEST = "metadata.json", "latest_checkpointed_iteration.txt"
MODEL, OPTIMIZER, MEMORY = "model/", "optimizer/", "memory/"
SLICE_BYTES = 1 << 30
PRECISIONS = {torch.float32, torch.bfloat16, torch.float16}
# Keys of a run's state that resuming reads, beside its recipe, and their types.
_RESUMING_READS: dict[str, dict[str, Any]] = {
    "optimizer": {"step": int | float},
    "schedule": {"num_steps": int},
    "data": {"next_sample": int, "samples_per_epoch": int, "corpora": list | tuple},
}
Form = Literal["dcp", "safetensors"]
Layout = tuple[Shape, torch.dtype]


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
    plan = [Planned(name, checkpoint.dtype(name), checkpoint.shape(name)) for name in names]
    slices = {p.name: list(blocks(p.shape, p.dtype.itemsize, slice_bytes)) for p in plan}
    nbytes = sum(planned.nbytes for planned in plan)
    around = BYTES_AROUND_A_PIECE * sum(map(len, slices.values()))
    with appearing(out, nbytes + around) as folder:
        if form == "dcp":
            write_dcp(folder, checkpoint, slices)
        else:
            tensors = (checkpoint.read(name, *block) for name in names for block in slices[name])
            write_weights(folder, plan, tensors, shard_bytes)
        write_recipe(recipe, folder / RECIPE)
        if optimizer:
            write_bytes(folder / STATE, codec.dumps({**checkpoint.state, "step": checkpoint.step}, "state"))
            for rank in range(checkpoint.num_ranks):
                write_bytes(folder / rank_name(rank), codec.dumps(checkpoint.rank_state(rank), "rank_state"))
    return Transferred(len(plan), nbytes, optimizer)


@dataclass(frozen=True)
class Source:
    """Tensors of a folder, by name.

    Attributes:
        layouts: shape and dtype by name.
        nbytes: bytes of all tensors.
        pieces: function that yields all tensors, each in one or more blocks.
    """

    layouts: Mapping[str, Layout]
    nbytes: int
    pieces: Callable[[], Iterable[Piece]]


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
        found = load_recipe(str(path))
        try:
            import_stored(found, source)
        except UserError as error:
            raise UserError(f"{error}; if you trust this code, pass the recipe with --recipe") from error
    else:
        found = import_plugins(load_recipe(recipe))
    wanted = _layouts(found)
    opened, is_checked = source_of(folder), True
    if megatron is not None:
        opened, is_checked = _of_megatron(folder, found.model, wanted)
    _check_tensors(source, opened.layouts, wanted)
    state, rank_states = _states(source, opened, found)
    write_run(out, found, opened, state, rank_states)
    return Transferred(len(opened.layouts), opened.nbytes, "weights_only" not in state, is_checked)


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


def source_of(folder: DcpFolder | SafetensorsFolder) -> Source:
    """Return the tensors of a folder, under the names that they have there."""
    return _dcp_source(folder) if isinstance(folder, DcpFolder) else _safetensors_source(folder)


def _dcp_source(folder: DcpFolder) -> Source:
    tensors = folder.tensors

    def pieces() -> Iterator[Piece]:
        for name, chunk in chunks_of(folder, tensors):
            yield Piece(name, tensors[name].shape, chunk.offset, chunk.shape, folder.read(name, chunk))

    nbytes = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    return Source({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, nbytes, pieces)


def _safetensors_source(folder: SafetensorsFolder) -> Source:
    tensors = folder.tensors

    def pieces() -> Iterator[Piece]:
        for name, stored in tensors.items():
            for offset, block in blocks(stored.shape, stored.dtype.itemsize, SLICE_BYTES):
                rows = slice(offset[0], offset[0] + block[0]) if block else None
                yield Piece(name, stored.shape, offset, block, folder.read(name, rows))

    nbytes = sum(prod(stored.shape) * stored.dtype.itemsize for stored in tensors.values())
    return Source({name: (stored.shape, stored.dtype) for name, stored in tensors.items()}, nbytes, pieces)


def _of_megatron(
    folder: DcpFolder | SafetensorsFolder, model: ModelConfig, wanted: Mapping[str, Layout]
) -> tuple[Source, bool]:
    """Return the model's tensors under fmoe's names, and the result of `check_arguments`."""
    from pretrain.interchange.megatron import check_arguments, pieces_of, rename  # imports megatron-core

    assert isinstance(folder, DcpFolder)
    is_checked = check_arguments(folder, model)
    found = rename(folder, wanted)
    nbytes = sum(prod(each.shape) * each.dtype.itemsize for each in found)
    layouts = {each.name: (each.shape, each.dtype) for each in found}
    return Source(layouts, nbytes, lambda: pieces_of(folder, found)), is_checked


def _layouts(recipe: Recipe) -> dict[str, Layout]:
    """Return shape and dtype of each tensor of the recipe's model, by name."""
    from pretrain.engine.meta import checkpoint_layouts  # imports megatron-core

    return {f"{MODEL}{name}": layout for name, layout in checkpoint_layouts(recipe).items()}


def _check_tensors(source: Path, layouts: Mapping[str, Layout], wanted: Mapping[str, Layout]) -> None:
    """Raise UserError unless ``layouts`` has the names, shapes and dtypes of ``wanted``."""
    for name, (shape, dtype) in wanted.items():
        if name not in layouts:
            raise UserError(f"{source} has no tensor {name}, which the model of the recipe has")
        found, found_dtype = layouts[name]
        if found != shape:
            raise UserError(f"{source}: {name} has shape {list(found)}, but the recipe's model has {list(shape)}")
        # A weight may have another precision than the recipe's.
        if found_dtype != dtype and not {found_dtype, dtype} <= PRECISIONS:
            raise UserError(
                f"{source}: {name} has dtype {name_of(found_dtype)}, but the recipe's model has {name_of(dtype)}"
            )
    for name in layouts:
        if name not in wanted and not name.startswith((OPTIMIZER, MEMORY)):
            raise UserError(f"{source} has the tensor {name}, which the model of the recipe does not have")


def _states(source: Path, opened: Source, recipe: Recipe) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the run's state, and a list of the ranks' states.

    Without optimizer tensors, the run's state is that of `weights_only`, and the list has one empty state.
    """
    if not any(name.startswith(OPTIMIZER) for name in opened.layouts):
        return weights_only(recipe), [{}]
    values = []
    for number in range(-1, len(list(source.glob("rank-*.json")))):
        path = source / (STATE if number < 0 else rank_name(number))
        try:
            values.append(codec.loads(path.read_bytes()))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}; it belongs to the optimizer's state") from error
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}") from error
        if not isinstance(values[-1], dict):
            raise UserError(f"{path} is damaged: it is not a JSON object")
    state, *rank_states = values
    if not rank_states:
        raise UserError(f"{source / rank_name(0)} is missing; it belongs to the optimizer's state")
    if type(state.get("step")) is not int or state["step"] < 0:
        raise UserError(f"{source / STATE} is damaged: it has no valid step")
    _check_resumable(source, state, rank_states, recipe)
    return state, rank_states


def _check_resumable(
    source: Path, state: Mapping[str, Any], rank_states: Sequence[Mapping[str, Any]], recipe: Recipe
) -> None:
    path = source / STATE
    if state.get("weights_only"):
        raise UserError(f"{path} has weights_only=true, but {source} has tensors of the optimizer")
    if not isinstance(state.get("recipe"), dict):
        raise UserError(f"{path} is damaged: it has no recipe")
    try:
        then = build_recipe(state["recipe"])
    except UserError as error:
        raise UserError(f"the recipe of {path}: {error}") from error
    now = asdict(recipe.model)
    for key, was in asdict(then.model).items():
        if was != (value := now[key]):
            raise UserError(f"{path} has model.{key}={toml(was)}, but the recipe has {toml(value)}")
    for section, keys in _RESUMING_READS.items():
        table = state.get(section)
        for key, kind in keys.items():
            if not isinstance(table, dict) or not isinstance(table.get(key), kind):
                raise UserError(f"{path} is damaged: it has no valid {section}.{key}")
    for rank, rank_state in enumerate(rank_states):
        if "rng" not in rank_state:
            raise UserError(f"{source / rank_name(rank)} is damaged: it has no rng")


def weights_only(recipe: Recipe) -> dict[str, Any]:
    """Return the state of a checkpoint that ``train.init_from`` can load, but from which no run can resume."""
    return {"step": 0, "recipe": asdict(recipe), "weights_only": True}


def write_run(
    out: Path, recipe: Recipe, opened: Source, state: dict[str, Any], rank_states: Sequence[dict[str, Any]]
) -> None:
    """Write a run with one checkpoint; the folder appears when it is complete."""
    recipe = replace(recipe, run=replace(recipe.run, folder=str(out)))
    if state.get("weights_only"):
        recipe = replace(recipe, train=replace(recipe.train, init_from=str(out)))
        state = {**state, "recipe": asdict(recipe)}
    with appearing(out, opened.nbytes) as folder:
        save_parts(
            folder / CHECKPOINTS,
            state["step"],
            opened.pieces(),
            state,
            nbytes=opened.nbytes,
            rank_states=rank_states,
        )
        write_recipe(recipe, folder / CONFIG)
