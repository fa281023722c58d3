"""Reduction of gradients as the recipe says (``parallel.grad_reduce``, ...), and its state in checkpoints."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from fmoe.errors import UserError, add_name, known_names, one_line
from fmoe.parallel.all_reduce import Grid, Hierarchical, Ring
from fmoe.parallel.compression import DGC, Compressor, Memory, Numbers, OneBit, PowerSGD
from fmoe.runtime import launcher
from megatron_patch import grad_hooks
from pretrain.config import Recipe
from pretrain.engine.sync import OwnGradients

COMPRESSORS: dict[str, Callable[..., Compressor]] = {"dgc": DGC, "onebit": OneBit, "powersgd": PowerSGD}
"""Compressors by name, called with a process group and ``parallel.compress_options``."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Keys of a split between whose values factors of PowerSGD, which are not laid out like parameters, cannot pass.
_SPLIT = ("tensor", "context", "pipeline", "virtual_pipeline", "expert", "expert_tensor", "data")


def register_compressor(name: str, factory: Callable[..., Compressor]) -> None:
    """Register a compressor of gradients under a new name, for ``parallel.grad_compress``.

    Args:
        factory: called with the process group and ``parallel.compress_options``; returns a
            `fmoe.parallel.compression.Compressor`.

    Raises:
        UserError: the name belongs to another compressor.
    """
    add_name(COMPRESSORS, "parallel.grad_compress", name, factory)


def check_compression(recipe: Recipe) -> None:
    """Raise UserError if the compressor is unknown or refuses its options."""
    name = recipe.parallel.grad_compress
    if name == "none":
        return
    if name not in COMPRESSORS:
        known = known_names(name, ["none", *sorted(COMPRESSORS)])
        raise UserError(f"parallel.grad_compress={name!r} is not known; {known}")
    _compressor(recipe, None)


def _compressor(recipe: Recipe, group: Any) -> Compressor:
    name = recipe.parallel.grad_compress
    options = dict(recipe.parallel.compress_options)
    if name == "onebit":
        options.setdefault("beta1", recipe.optimizer.beta1)
    try:
        return COMPRESSORS[name](group, **options)
    except (TypeError, UserError) as error:
        raise UserError(f"parallel.compress_options with parallel.grad_compress={name}: {one_line(error)}") from None


def _all_reduce(recipe: Recipe, group: Any) -> Compressor:
    parallel = recipe.parallel
    if parallel.all_reduce == "ring":
        return Ring(group)
    if parallel.all_reduce == "grid":
        return Grid(group)
    try:
        return Hierarchical(group, parallel.node_size or launcher.number("LOCAL_WORLD_SIZE", parallel.world_size))
    except UserError as error:
        raise UserError(f"parallel.all_reduce=hierarchical: parallel.{error}") from None


def warmup_of(recipe: Recipe) -> int | None:
    """Return the number of steps after which 1-bit momenta are averaged; None if they never are."""
    return _compressor(recipe, None).warmup if recipe.parallel.grad_compress == "onebit" else None


def install(recipe: Recipe, model: Sequence[Any]) -> list[Compressor]:
    """Let wrapped chunks reduce gradients as in the recipe; return the compressors of dense layers and experts."""
    parallel = recipe.parallel
    if parallel.grad_reduce != "fp32" and not parallel.is_fully_sharded:
        grad_hooks.reduce_in(model, _DTYPES[parallel.grad_reduce])
    groups = (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group(),
    )
    if parallel.all_reduce != "library":
        compressors: list[Compressor] = [_all_reduce(recipe, group) for group in groups]
    elif parallel.sync_every > 1:
        compressors = [OwnGradients(group, parallel.sync_warmup) for group in groups]
    elif parallel.grad_compress != "none":
        compressors = [_compressor(recipe, group) for group in groups]
    else:
        return []
    grad_hooks.compress_gradients(model, *compressors)
    return compressors


def saved_memories(compressors: Sequence[Compressor]) -> Iterator[tuple[str, Memory]]:
    """Yield the memories that this rank saves, with the prefixes of their names in a checkpoint."""
    for compressor in compressors:
        for memory in compressor.memories():
            rank = "" if memory.is_shared else f"@{compressor.group.rank()}"
            if memory.is_saved:
                yield f"compressor/{memory.name}{rank}/", memory


def numbers(recipe: Recipe, compressors: Sequence[Compressor]) -> Numbers:
    """Return the rest of the compressors' state of this rank, for `set_numbers`."""
    return _identity(recipe) | {"numbers": [compressor.numbers() for compressor in compressors]}


def is_same_method(recipe: Recipe, saved: Numbers) -> bool:
    """Return whether the result of `numbers` is that of a run whose memories mean the same."""
    return bool(saved["method"] == _identity(recipe)["method"])


def set_numbers(recipe: Recipe, compressors: Sequence[Compressor], saved: Numbers) -> None:
    """Restore the result of `numbers`. With other options or at another split, only the number of steps is restored."""
    is_same = all(saved[key] == value for key, value in _identity(recipe).items())
    for compressor, values in zip(compressors, saved["numbers"], strict=True):
        if is_same:
            compressor.set_numbers(values)
        # That of the dense layers: a pipeline stage without experts has counted no steps of theirs.
        compressor.step = saved["numbers"][0]["step"]


def _identity(recipe: Recipe) -> Numbers:
    parallel = recipe.parallel
    return {
        "method": [parallel.grad_compress, parallel.all_reduce, parallel.sync_every > 1],
        "options": dict(parallel.compress_options),
        "split": {key: getattr(parallel, key) for key in _SPLIT} | {"stages": list(recipe.stage_layers)},
    }
