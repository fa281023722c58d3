"""Conversion of a checkpoint to a folder that transformers loads: ``fmoe export``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmoe.errors import UserError
from pretrain.checkpoint import Checkpoint, open_checkpoint
from pretrain.checkpoint.shard import name_of
from pretrain.config import Recipe, build_recipe
from pretrain.data.opening import open_trained_tokenizer
from pretrain.data.tokenizers import Tokenizer
from pretrain.interchange.card import CARD, check_license, model_card
from pretrain.interchange.configs import config_of
from pretrain.interchange.families import family_for, why_own
from pretrain.interchange.family import Family
from pretrain.interchange.folder import (
    CONFIG,
    GENERATION_CONFIG,
    appearing,
    nbytes_of,
    refuse_output,
    write_json,
    write_new,
    write_weights,
)
from pretrain.interchange.llama_cpp import check_convertible, write_gguf
from pretrain.interchange.published import PUBLISHED
from pretrain.interchange.tensors import Place, sizes_of
from pretrain.interchange.tokenizer import files_for

SHARD_BYTES = 4 << 30
NO_TOKENIZER = "none"
# Keys of config.json with ids of special tokens, which an export keeps from an import.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Exported:
    """Result of an export: family, number of parameters, names of the files, and lines for the user."""

    family: Family
    num_params: int
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


def export_checkpoint(
    source: Path,
    out: Path,
    form: str = "auto",
    *,
    tokenizer: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    llama_cpp: Path | None = None,
    no_drops: bool = False,
    license: str | None = None,
    repo: str | None = None,
) -> Exported:
    """Write the model of a checkpoint as a Hugging Face folder.

    The checkpoint may come from any parallel layout. One process reads, converts and writes one tensor at a time, and
    needs no process group.

    Args:
        source: folder of a checkpoint, or of a run for its newest checkpoint.
        out: a new or empty folder, which appears when it is complete.
        form: name of a family in `families.FAMILIES`, or "auto" for the first that fits.
        tokenizer: new location of the recipe's tokenizer; None if it has not moved, "none" for no tokenizer.
        shard_bytes: maximum size of a weight file, unless it has a single tensor.
        llama_cpp: folder of llama.cpp, whose converter adds a GGUF file; None for no such file.
        no_drops: leave out the model's ``eval_capacity_factor``. ``fmoe generate`` also ignores it.
        license: license of the model, an identifier of the Hugging Face Hub, for the model card; None to state none.
        repo: name of the model in the model card's example, OWNER/NAME of the Hub; None for the name of ``out``.

    Raises:
        UserError: the checkpoint is damaged or has non-finite weights; the family or llama.cpp does not support the
            model; the tokenizer is unreadable or cannot be converted; ``out`` is not empty; the disk is full; the
            license has not the form of an identifier; the records of the run are damaged.
    """
    check_license(license)
    refuse_output(out)
    checkpoint = open_checkpoint(source)
    recipe = recipe_of(checkpoint)
    if no_drops:
        recipe = replace(recipe, model=recipe.model.with_values({"moe.eval_capacity_factor": None}))
    model = recipe.model
    family = family_for(model, form)
    places = family.tensors(model)
    dtype = _check_tensors(checkpoint, family, places)
    loaded = _load_tokenizer(checkpoint, recipe, tokenizer)
    config = config_of(family, model, name_of(dtype))
    files = dict(family.files())
    if loaded is not None:
        bos = recipe.data.bos if model.objective == "gpt" else None
        files |= files_for(loaded, model.sequence_length, bos=bos, model_type=config["model_type"])
    layouts = {name: (shape, place.dtype or dtype) for place in places for name, shape in place.theirs.items()}
    nbytes = nbytes_of(layouts.values())
    files[CARD] = model_card(
        checkpoint, recipe, config, repo or out.resolve().name, license=license, has_tokenizer=loaded is not None
    ).encode()
    pre = "" if llama_cpp is None else check_convertible(llama_cpp, family, model, loaded, files)
    with appearing(out, nbytes if llama_cpp is None else 2 * nbytes) as folder:
        names = write_weights(folder, layouts, _tensors(checkpoint, recipe, places, dtype), shard_bytes)
        generation = _token_settings(checkpoint, recipe, loaded, config)
        write_json(folder / CONFIG, config)
        write_json(folder / GENERATION_CONFIG, generation)
        for name, data in files.items():
            write_new(folder / name, [data])
        names += [CONFIG, GENERATION_CONFIG, *files]
        if llama_cpp is not None:
            names.append(write_gguf(llama_cpp, folder, out.resolve().name, dtype, pre))
    notes = family.notes(model)
    reason = why_own(model) if form == "auto" else ""
    if reason:
        notes = (f"--format auto chose {family.name}: {reason}", *notes)
    weights = [place for place in places if place.ours and place.dtype is None]
    num_params = sum(prod(shape) for place in weights for shape in place.theirs.values())
    return Exported(family, num_params, tuple(names), notes)


def _token_settings(
    checkpoint: Checkpoint, recipe: Recipe, tokenizer: Tokenizer | None, config: dict[str, Any]
) -> dict[str, Any]:
    """Return generation_config.json, and set the ids of special tokens in ``config``.

    The settings of an imported model are kept.
    """
    published = checkpoint.state.get(PUBLISHED, {})
    ids = published.get("config", {})
    config |= ids
    generation = {**ids, **published.get("generation_config", {})}
    if tokenizer is None:
        return generation
    end = tokenizer.end_of_document
    pad = end if tokenizer.pad is None else tokenizer.pad
    is_trained = not checkpoint.state.get("weights_only")
    for settings in (config, generation):
        eos = settings.get("eos_token_id")
        ends = eos if isinstance(eos, list) else [eos]
        if eos is None:
            settings["eos_token_id"] = end
        elif is_trained and end not in ends:
            settings["eos_token_id"] = [*ends, end]
        if recipe.data.bos:
            settings["bos_token_id"] = tokenizer.bos
    if generation.get("pad_token_id") is None:
        generation["pad_token_id"] = pad
    unused = range(tokenizer.vocab_size, recipe.model.vocab_size)
    if unused:  # as `fmoe generate` does
        generation["suppress_tokens"] = sorted({*(generation.get("suppress_tokens") or ()), *unused})
    if recipe.model.kind == "t5":  # the decoder starts with the padding token
        starts = {"pad_token_id": pad, "decoder_start_token_id": pad}
        config |= starts
        generation |= starts
    return generation


def recipe_of(checkpoint: Checkpoint) -> Recipe:
    """Return the recipe in a checkpoint's state. Raises UserError if it is missing or invalid."""
    values: Any = checkpoint.state.get("recipe")
    if not isinstance(values, dict):
        raise UserError(f"{checkpoint.path} has no recipe in its state")
    try:
        recipe = build_recipe(values)
        recipe.check()
    except UserError as error:
        raise UserError(f"the recipe of {checkpoint.path}: {error}") from error
    return recipe


def _load_tokenizer(checkpoint: Checkpoint, recipe: Recipe, file: str | None) -> Tokenizer | None:
    """Load the tokenizer that a model was trained with, from ``file`` if it has moved; None without one."""
    if file == NO_TOKENIZER or (file is None and not recipe.data.tokenizer):
        return None
    try:
        return open_trained_tokenizer(recipe, file, checkpoint.state.get("data", {}))
    except UserError as error:
        raise UserError(f"{error}; pass the model's tokenizer with --tokenizer FILE, or --tokenizer none") from error


def _check_tensors(checkpoint: Checkpoint, family: Family, places: Sequence[Place]) -> torch.dtype:
    """Return the weights' common dtype, after a check of the tensors' names and sizes."""
    ours = {place.ours: place for place in places if place.ours}
    for name in checkpoint.names():
        is_left_out = family.left_out and name.startswith(family.left_out)
        if name.startswith("model/") and not is_left_out and name not in ours:
            raise UserError(f"{checkpoint.path} has the tensor {name}, which is not part of a {family.name} model")
    for name, place in ours.items():
        shape = checkpoint.shape(name)
        whole = shape if place.expert is None else shape[1:]
        if prod(whole) != sum(map(prod, place.theirs.values())):
            raise UserError(f"{checkpoint.path}: the shape of {name} is {shape}, but the recipe requires another")
    dtypes = {checkpoint.dtype(name) for name, place in ours.items() if place.dtype is None}
    if len(dtypes) > 1:
        raise UserError(
            f"{checkpoint.path} has weights of {' and '.join(sorted(map(name_of, dtypes)))}: all must have one dtype"
        )
    return dtypes.pop()


def _tensors(checkpoint: Checkpoint, recipe: Recipe, places: Sequence[Place], dtype: torch.dtype) -> Iterator[Tensor]:
    sizes = sizes_of(recipe.model)
    for place in places:
        if not place.ours:
            yield from (torch.zeros(shape, dtype=dtype, device="cpu") for shape in place.theirs.values())
            continue
        if place.expert is None:
            ours = checkpoint.read(place.ours)
        else:
            shape = checkpoint.shape(place.ours)
            ours = checkpoint.read(place.ours, (place.expert, *(0 for _ in shape[1:])), (1, *shape[1:]))[0]
        if not ours.isfinite().all():
            raise UserError(f"{checkpoint.path}: {place.ours} has non-finite values")
        try:
            parts = place.transform.split(ours, sizes)
        except UserError as error:
            raise UserError(f"{checkpoint.path}: {place.ours}: {error}") from error
        for theirs, shape in zip(parts, place.theirs.values(), strict=True):
            yield theirs.reshape(shape)
