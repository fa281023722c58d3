"""Folders of Hugging Face models, read and written by ranks of which none ever holds all experts of the model."""

import copy
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe.convert.routed import RoutedMoE
from fmoe.errors import UserError, one_line, require
from fmoe.exchange.checks import shared_text
from fmoe.files import sync, write_atomically
from fmoe.parallel.checkpoint import whole_tensors
from fmoe.parallel.groups import ParallelGroups

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30

_EXPERT = re.compile(r"\bexperts\.(?:expert_)?(\d+)\.")  # in the name of a published tensor of one expert


def files_of(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a Hugging Face model folder, by the tensor's name.

    Raises:
        UserError: the folder has no safetensors files, lacks one of those in its index, or one is damaged.
    """
    safetensors = require("safetensors", "interop", "a model folder")
    index = folder / INDEX
    names = {WEIGHTS}
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
    files: dict[str, Path] = {}
    for name in sorted(names):
        path = folder / name
        if not path.exists():
            raise UserError(f"weights={folder} has no {name}: download or copy all files of the model")
        try:
            with safetensors.safe_open(path, "pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except Exception as error:  # safetensors has an exception of its own
            raise UserError(f"weights={folder}: {name} is damaged: {one_line(error)}") from error
    return files


def load_hf(model: Any, folder: str | Path) -> None:
    """Load the weights of a Hugging Face folder into a model whose experts may be split over ranks.

    Each rank reads only the experts that it holds, one layer at a time. Published names are converted as
    ``from_pretrained`` does.

    Args:
        model: a model of transformers after `fmoe.fmoefy`, or another model with the names of the folder; not wrapped,
            and not on the meta device.
        folder: folder with safetensors files.

    Raises:
        UserError: a file is missing or damaged, a tensor of the model is missing, or a shape differs.
    """
    folder = Path(folder)
    missing = {name for name in model.state_dict() if not name.endswith("_extra_state")}
    for state in _states(model, files_of(folder)):
        try:
            model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise UserError(f"weights={folder} does not fit the model: {one_line(error)}") from error
        missing -= state.keys()
    missing -= set(getattr(model, "all_tied_weights_keys", ()))  # copies of other tensors
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    if missing:
        raise UserError(f"weights={folder} lacks {len(missing)} tensors of the model, for example {min(missing)}")


def _states(model: nn.Module, files: Mapping[str, Path]) -> Iterator[dict[str, Tensor]]:
    """Yield parts of the model's state, each with all experts that this rank holds of a layer, or with one tensor."""
    safe_open = require("safetensors", "interop", "a model folder").safe_open
    experts = _experts_of(model)
    sources: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    convert = _Conversion(model)
    for name in files:
        target, pattern = convert.target(name)
        sources[target].append((name, pattern))
    # All tensors of a layer's experts are loaded together (`RoutedMoE`).
    parts: dict[str, list[str]] = defaultdict(list)
    for target in sources:
        layer = next((prefix for prefix in experts if target.startswith(prefix)), None)
        parts[target if layer is None else layer].append(target)

    opened = {path: safe_open(path, "pt") for path in set(files.values())}  # each has an index of all its tensors

    def read(name: str, local: range | None) -> Tensor:
        file = opened[files[name]]
        if local is None:
            return file.get_tensor(name)
        return file.get_slice(name)[local.start : local.stop]

    for prefix, targets in parts.items():
        local = experts.get(prefix)
        state: dict[str, Tensor] = {}
        for target in targets:
            tensors: dict[str | None, list[Tensor]] = defaultdict(list)
            for name, pattern in sorted(sources[target], key=_natural):
                of_one = _EXPERT.search(name)
                if local is None or (of_one and int(of_one[1]) in local):
                    tensors[pattern].append(read(name, None))
                elif not of_one:
                    tensors[pattern].append(read(name, local))
            if tensors:  # else of another rank's expert
                state |= convert.converted(target, tensors)
        yield state


def _natural(source: tuple[str, str | None]) -> list[Any]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", source[0])]


def _experts_of(model: nn.Module) -> dict[str, range]:
    """Return this rank's experts of each layer, by the prefix of their names in the state."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, RoutedMoE):
            layers[f"{name}." if name else ""] = module.local_experts
    return layers


class _Conversion:
    """Conversion of published tensors to those of a model, as the model's package defines it."""

    def __init__(self, model: nn.Module):
        self.model: Any = model
        self.renamings: list[Any] = []
        self.converters: list[Any] = []
        self.names = dict.fromkeys(model.state_dict(), True)
        self._rename: Any = None
        if not hasattr(model, "base_model_prefix"):  # not of transformers
            return
        loading = require("transformers.core_model_loading", "interop", "a model folder")
        mapping = require("transformers.conversion_mapping", "interop", "a model folder")
        for entry in mapping.get_model_conversion_mapping(model):
            known = self.converters if isinstance(entry, loading.WeightConverter) else self.renamings
            known.append(entry)
        self._rename = loading.rename_source_key

    def target(self, name: str) -> tuple[str, str | None]:
        """Return the model's name of a published tensor, and the pattern of the converter that makes it, if any."""
        if name in self.names or self._rename is None:
            return name, None
        prefix = self.model.base_model_prefix
        target: tuple[str, str | None] = self._rename(name, self.renamings, self.converters, prefix, self.names)
        return target

    def converted(self, target: str, tensors: Mapping[str | None, list[Tensor]]) -> dict[str, Tensor]:
        """Return the model's tensors that are made of published ones, by pattern."""
        if None in tensors:
            return {target: tensors[None][0]}
        pattern = next(iter(tensors))
        converter = copy.deepcopy(next(c for c in self.converters if pattern in c.source_patterns))
        for pattern, values in tensors.items():
            for value in values:
                converter.add_tensor(target, pattern, pattern, value)
        result: Any = converter.convert(target, model=self.model, config=self.model.config)
        tensors_of: dict[str, Tensor] = result[0] if isinstance(result, tuple) else result  # transformers 5.0
        return tensors_of


def save_hf(model: nn.Module, folder: str | Path, groups: ParallelGroups, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model as a folder that ``from_pretrained`` of plain transformers loads. Collective.

    Rank 0 writes, and gathers one tensor at a time. Files get their names when all are complete.

    Args:
        model: a model of transformers, wrapped by `DistributedDataParallel` or `fully_shard`, or not wrapped.
        folder: a folder without a model, the same on all ranks.
        groups: groups of `fmoe.parallel.init`.
        shard_bytes: maximum size of a weight file; a larger tensor gets its own file.

    Raises:
        UserError: the folder has a model, or cannot be written; raised on all ranks.
    """
    inner: Any = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    writer = _Writer(Path(folder), shard_bytes) if dist.get_rank(groups.data_group) == 0 else None
    tied = set(getattr(inner, "all_tied_weights_keys", ()))
    for name, value in whole_tensors(model, groups, leave_out=tied):
        if writer is not None:
            writer.add(name, value.contiguous().cpu())
    error = shared_text(groups.data_group, writer.finish(inner) if writer else "", 0, groups.mesh.device_type)
    if error:
        raise UserError(error)


class _Writer:
    """Writes tensors to the weight files of a folder. Keeps the first error until the end: other ranks send on."""

    def __init__(self, folder: Path, shard_bytes: int):
        self._folder = folder
        self._temporary = folder / ".tmp"
        self._shard_bytes = shard_bytes
        self._shards: list[list[str]] = []
        self._pending: dict[str, Tensor] = {}
        self._size = 0
        self._error = ""
        self._attempt(self._begin)

    def _attempt(self, action: Callable[[], None]) -> None:
        if not self._error:
            try:
                action()
            except UserError as error:
                self._error = str(error)
            except Exception as error:  # safetensors has an exception of its own
                self._error = f"folder={self._folder} cannot be written: {one_line(error)}"

    def _begin(self) -> None:
        present = next(self._folder.glob("*.safetensors*"), None)
        if present is not None:
            raise UserError(f"folder={self._folder} has a model already ({present.name}): name a new folder")
        shutil.rmtree(self._temporary, ignore_errors=True)  # of a process that was killed
        self._temporary.mkdir(parents=True)

    def add(self, name: str, value: Tensor) -> None:
        pending = sum(tensor.nbytes for tensor in self._pending.values())
        if self._pending and pending + value.nbytes > self._shard_bytes:
            self._attempt(self._write)
            self._pending = {}
        self._pending[name] = value

    def _write(self) -> None:
        save_file = require("safetensors.torch", "interop", "a model folder").save_file
        path = self._temporary / f"{len(self._shards)}.safetensors"
        save_file(self._pending, path, metadata={"format": "pt"})
        sync(path)
        self._shards.append(list(self._pending))
        self._size += sum(tensor.nbytes for tensor in self._pending.values())

    def finish(self, model: Any) -> str:
        """Write the rest and the configuration, and publish the files. Return the error; empty if there was none."""
        self._attempt(self._write)
        self._attempt(lambda: self._publish(model))
        shutil.rmtree(self._temporary, ignore_errors=True)
        return self._error

    def _publish(self, model: Any) -> None:
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
            if config is not None:
                config.save_pretrained(self._folder)
        for number, names in enumerate(self._shards):
            file = WEIGHTS if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
            (self._temporary / f"{number}.safetensors").rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._size}, "weight_map": weight_map}
            write_atomically(self._folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
        sync(self._folder)


def has_meta(module: nn.Module) -> bool:
    """Return whether a parameter or buffer of the module is on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@torch.no_grad()
def materialize(model: Any, device: torch.device | str) -> None:
    """Allocate a model of the meta device on ``device``, and compute the buffers that its state does not have.

    Raises:
        UserError: the model cannot compute these buffers.
    """
    missing = {}
    for name, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            if module._buffers[key] is not None and module._buffers[key].is_meta:
                missing[f"{name}.{key}"] = module
    if missing and not hasattr(model, "_init_weights"):
        raise UserError(
            f"the buffer {next(iter(missing))} is on the meta device and not part of the state: build the model on "
            "the CPU, or its buffers"
        )
    model.to_empty(device=device)
    for module in dict.fromkeys(missing.values()):
        model._init_weights(module)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
