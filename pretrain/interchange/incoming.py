"""Conversion of a Hugging Face folder to a run with one checkpoint: ``fmoe import``."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from fmoe.errors import UserError
from pretrain.checkpoint import TensorPiece, save_parts
from pretrain.checkpoint.shard import name_of
from pretrain.config import DataConfig, ModelConfig, OptimizerConfig, Recipe, RunConfig, TrainConfig, write_recipe
from pretrain.data.opening import naming
from pretrain.data.tokenizers import Tokenizer, load_tokenizer
from pretrain.files import read_object
from pretrain.interchange.configs import family_of, model_of
from pretrain.interchange.family import Family
from pretrain.interchange.folder import (
    GENERATION_CONFIG,
    HuggingFaceFolder,
    appearing,
    refuse_output,
    write_new,
)
from pretrain.interchange.outgoing import NO_TOKENIZER, TOKEN_IDS
from pretrain.interchange.published import PUBLISHED, without_ids
from pretrain.interchange.tensors import Place, sizes_of
from pretrain.interchange.tokenizer import SENTENCEPIECE, TOKENIZER, check_tokenizer, files_of, find_tokenizer
from pretrain.tracking.folder import CHECKPOINTS, CONFIG

TOKENIZER_FOLDER = "tokenizer"
_PRECISIONS: dict[torch.dtype, Any] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Learning rate of the written recipe, for continued training.
_LR = 1e-5
# Ending of the names of tensors that older folders have, although models compute them.
_IGNORED = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class Imported:
    """Result of an import: family, recipe, folder of checkpoints, and tokenizer file (None without one)."""

    family: Family
    recipe: Recipe
    checkpoint: Path
    tokenizer: Path | None


def import_folder(source: Path, out: Path, *, tokenizer: str | None = None) -> Imported:
    """Convert the model of a Hugging Face folder to a run: config.toml, a checkpoint at step 0, and the tokenizer.

    Args:
        source: folder with config.json and safetensors.
        out: a new or empty folder, which appears when it is complete.
        tokenizer: path of a tokenizer.json or sentencepiece model; None for the folder's, "none" for no tokenizer.

    Raises:
        UserError: the model's family or a value of config.json is not supported; a tensor is missing, unexpected, not
            finite, or of another shape or an unsupported dtype; the tokenizer is damaged; ``out`` is not empty; the
            disk is full.
    """
    refuse_output(out)
    folder = HuggingFaceFolder(source)
    with naming(str(source / "config.json")):
        family = family_of(folder.config)
    config = family.adapt(folder.config, folder)  # may read weights, whose errors name their file
    with naming(str(source / "config.json")):
        _, model = model_of(config)
    places, dtype = _match(folder, family, model)
    loaded = _tokenizer(folder, model, tokenizer)
    files = {} if loaded is None else files_of(loaded)
    path = out / TOKENIZER_FOLDER / next(iter(files)) if files else None
    recipe = Recipe(
        run=RunConfig(folder=str(out)),
        model=model,
        data=DataConfig(
            tokenizer="" if path is None else str(path),
            train=(str(out / "corpus" / "train"),),
            validation=(),
            bos=loaded is not None and loaded.adds_bos and loaded.bos is not None and model.objective == "gpt",
        ),
        optimizer=OptimizerConfig(lr=_LR, min_lr=0.0, warmup_steps=0),
        train=TrainConfig(precision=_PRECISIONS[dtype], init_from=str(out)),
    )
    with naming(str(source)):
        recipe.check()
    nbytes = 0
    for place in places:
        size = sum(map(prod, place.theirs.values())) if place.ours else 0
        nbytes += size * dtype.itemsize * (2 if place.dtype == torch.uint8 else 1)  # a byte of MXFP4 has two weights
    state = weights_only(recipe) | {PUBLISHED: _published(folder, tokenizer, loaded)}
    if loaded is not None:
        state["data"] = {"tokenizer": loaded.fingerprint, "end_of_document": loaded.end_of_document}
    write_run(out, recipe, _pieces(folder, family, model, places, dtype), nbytes, state, tokenizer=files)
    return Imported(family, recipe, out / CHECKPOINTS, path)


def write_run(
    out: Path,
    recipe: Recipe,
    pieces: Iterable[TensorPiece],
    nbytes: int,
    state: dict[str, Any],
    *,
    rank_states: Sequence[Mapping[str, Any]] | None = None,
    tokenizer: Mapping[str, bytes] | None = None,
) -> None:
    """Write a run with one checkpoint; the folder appears when it is complete.

    Args:
        pieces: the tensors, in total ``nbytes``.
        state, rank_states: states of the run and of the ranks; see `save_parts`.
        tokenizer: files for the run's folder of the tokenizer, by name.
    """
    with appearing(out, nbytes) as folder:
        save_parts(folder / CHECKPOINTS, state["step"], pieces, state, nbytes=nbytes, rank_states=rank_states)
        write_recipe(recipe, folder / CONFIG)
        if tokenizer:
            (folder / TOKENIZER_FOLDER).mkdir()
            for name, data in tokenizer.items():
                write_new(folder / TOKENIZER_FOLDER / name, [data])


def weights_only(recipe: Recipe) -> dict[str, Any]:
    """Return the state of a checkpoint that ``train.init_from`` can load, but from which no run can resume."""
    return {"step": 0, "recipe": recipe.values(), "weights_only": True}


def _tokenizer(folder: HuggingFaceFolder, model: ModelConfig, file: str | None) -> Tokenizer | None:
    """Load a folder's tokenizer, or the one in ``file``.

    Raises:
        UserError: the tokenizer is damaged or does not fit the model.
    """
    if file == NO_TOKENIZER:
        return None
    try:
        path = find_tokenizer(folder.path if file is None else Path(file))
        if path is None:
            return None
        tokenizer = load_tokenizer(path)
        if file is not None:
            return tokenizer
        check_tokenizer(tokenizer, folder.config.get("model_type"), model.vocab_size)
        if tokenizer.vocab_size > model.vocab_size:
            raise UserError(
                f"the vocabulary of {path} has {tokenizer.vocab_size} entries, which exceeds vocab_size="
                f"{model.vocab_size} of config.json"
            )
        if tokenizer.adds_bos and tokenizer.bos is None and model.objective == "gpt":
            raise UserError(f"{path} puts several tokens in front of a text, but data.bos supports only one")
    except UserError as error:
        raise UserError(f"{error}; pass --tokenizer FILE to use a file as it is, or --tokenizer none") from error
    return tokenizer


def _published(folder: HuggingFaceFolder, file: str | None, loaded: Tokenizer | None) -> dict[str, Any]:
    """Return the folder's settings that exports keep, without token ids if another tokenizer replaces the folder's."""
    published = {
        "config": {key: folder.config[key] for key in TOKEN_IDS if folder.config.get(key) is not None},
        "generation_config": read_object(folder.path / GENERATION_CONFIG) or {},
    }
    if file is None:
        return published
    for path in (folder.path / TOKENIZER, folder.path / SENTENCEPIECE):
        if loaded is not None and path.is_file() and path.read_bytes() == loaded.path.read_bytes():
            return published
    return without_ids(published)


def _match(folder: HuggingFaceFolder, family: Family, model: ModelConfig) -> tuple[list[Place], torch.dtype]:
    """Return the family's tensors in the layout that fits the folder best, and their common dtype (see `_dtype`).

    Raises:
        UserError: a tensor is missing or unexpected, or has another shape or an unsupported dtype.
    """
    stored = folder.tensors
    forms = family.forms(model)
    places = max(forms, key=lambda form: sum(name in stored for place in form for name in place.theirs))
    shapes = {name: shape for place in places for name, shape in place.theirs.items()}
    for name, shape in shapes.items():
        if name not in stored:
            raise UserError(f"{folder.path} has no tensor {name}")
        if stored[name].shape != shape:
            raise UserError(
                f"{folder.path}: {name} has shape {list(stored[name].shape)}, but config.json implies {list(shape)}"
            )
    dtype = _dtype(folder, places)  # first: quantized weights come with tensors of scales
    unexpected = {name for name in stored.keys() - shapes.keys() if not name.endswith((_IGNORED, *family.ignored))}
    for copy, name in family.copies.items():
        if copy not in unexpected:
            continue
        if stored[copy].shape != shapes[name] or not torch.equal(folder.read(copy), folder.read(name)):
            raise UserError(f"{folder.path}: {copy} differs from {name}, but the model shares them")
        unexpected.remove(copy)
    if unexpected:
        name = min(unexpected)
        raise UserError(f"{folder.path} has the tensor {name}, which is not part of this {family.name} model")
    return places, dtype


def _dtype(folder: HuggingFaceFolder, places: Sequence[Place]) -> torch.dtype:
    """Return the weights' common dtype; float32 if they differ."""
    dtypes = {folder.tensors[name].dtype: name for place in places if place.dtype is None for name in place.theirs}
    for dtype, name in dtypes.items():
        if dtype not in _PRECISIONS:
            raise UserError(
                f"{folder.path}: {name} has dtype {name_of(dtype)}, which is not supported: convert the weights to one "
                f"of {', '.join(map(name_of, _PRECISIONS))}"
            )
    return next(iter(dtypes)) if len(dtypes) == 1 else torch.float32


def _pieces(
    folder: HuggingFaceFolder, family: Family, model: ModelConfig, places: Sequence[Place], dtype: torch.dtype
) -> Iterator[TensorPiece]:
    sizes = sizes_of(model)
    num_slices = Counter(place.ours for place in places)
    for place in places:
        theirs = [folder.read(name).to(place.dtype or dtype) for name in place.theirs]
        for name, tensor in zip(place.theirs, theirs, strict=True):
            if not tensor.isfinite().all():
                raise UserError(f"{folder.path}: {name} has non-finite values")
            if not place.ours and tensor.any():
                raise UserError(f"{folder.path}: {name} must be zero in a {family.name} model")
        if not place.ours:
            continue
        try:
            ours = place.transform.join(theirs, sizes)
        except UserError as error:
            raise UserError(f"{folder.path}: {next(iter(place.theirs))}: {error}") from error
        ours = ours.to(dtype) if place.dtype == torch.uint8 else ours
        shape = tuple(ours.shape)
        begin = (0,) * len(shape)
        if place.expert is None:
            yield TensorPiece(place.ours, shape, begin, shape, ours)
        else:
            whole = (num_slices[place.ours], *shape)
            yield TensorPiece(place.ours, whole, (place.expert, *begin), (1, *shape), ours.unsqueeze(0))
