"""Conversion of a Hugging Face folder to a run with one checkpoint: ``fmoe import``."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from fmoe.errors import UserError
from pretrain.checkpoint import Piece, save_parts
from pretrain.checkpoint.shard import name_of
from pretrain.config import DataConfig, ModelConfig, OptimizerConfig, Recipe, RunConfig, TrainConfig, write_recipe
from pretrain.data.inputs import naming
from pretrain.data.tokenizers import Tokenizer, load_tokenizer
from pretrain.interchange.configs import family_of, model_of
from pretrain.interchange.family import Family
from pretrain.interchange.folder import (
    GENERATION_CONFIG,
    HuggingFaceFolder,
    Stored,
    appearing,
    refuse_output,
    write_bytes,
)
from pretrain.interchange.outgoing import NO_TOKENIZER, TOKEN_IDS
from pretrain.interchange.tensors import Place, sizes_of
from pretrain.interchange.tokenizer import SENTENCEPIECE, TOKENIZER, check_tokenizer, files_of, find_tokenizer
from pretrain.start.resume import PUBLISHED, without_ids
from pretrain.tracking.folder import CONFIG

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
    found, dtype = _match(folder, family, model)
    loaded = _tokenizer(folder, model, tokenizer)
    files = {} if loaded is None else files_of(loaded)
    path = out / "tokenizer" / next(iter(files)) if files else None
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
    try:
        recipe.check()
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    nbytes = sum(
        prod(shape) * (2 if place.dtype == torch.uint8 else 1)  # a byte of MXFP4 has two weights
        for place in found
        if place.ours
        for shape in place.theirs.values()
    )
    nbytes *= dtype.itemsize
    state: dict[str, Any] = {"step": 0, "recipe": asdict(recipe), "weights_only": True}  # so --resume is refused
    state[PUBLISHED] = {
        "config": {key: folder.config[key] for key in TOKEN_IDS if folder.config.get(key) is not None},
        "generation_config": folder.json(GENERATION_CONFIG) or {},
    }
    if not _is_own(folder, tokenizer, loaded):
        state[PUBLISHED] = without_ids(state[PUBLISHED])
    if loaded is not None:
        state["data"] = {"tokenizer": loaded.fingerprint, "end_of_document": loaded.end_of_document}
    with appearing(out, nbytes) as temporary:
        save_parts(temporary / "checkpoints", 0, _pieces(folder, family, model, found, dtype), state, nbytes=nbytes)
        write_recipe(recipe, temporary / CONFIG)
        if files:
            (temporary / "tokenizer").mkdir()
        for name, data in files.items():
            write_bytes(temporary / "tokenizer" / name, data)
    return Imported(family, recipe, out / "checkpoints", path)


def _tokenizer(folder: HuggingFaceFolder, model: ModelConfig, given: str | None) -> Tokenizer | None:
    """Load a folder's tokenizer, or the ``given`` one.

    Raises:
        UserError: the tokenizer is damaged or does not fit the model.
    """
    if given == NO_TOKENIZER:
        return None
    try:
        path = find_tokenizer(folder.path if given is None else Path(given))
        if path is None:
            return None
        tokenizer = load_tokenizer(path)
        if given is None:
            check_tokenizer(tokenizer, folder.config.get("model_type"), model.vocab_size)
        if given is None and tokenizer.vocab_size > model.vocab_size:
            raise UserError(
                f"the vocabulary of {path} has {tokenizer.vocab_size} entries, which exceeds vocab_size="
                f"{model.vocab_size} of config.json"
            )
        if given is None and tokenizer.adds_bos and tokenizer.bos is None and model.objective == "gpt":
            raise UserError(f"{path} puts several tokens in front of a text, but data.bos supports only one")
    except UserError as error:
        raise UserError(f"{error}; pass --tokenizer FILE to use a file as it is, or --tokenizer none") from error
    return tokenizer


def _is_own(folder: HuggingFaceFolder, given: str | None, loaded: Tokenizer | None) -> bool:
    """Return whether the folder's token ids are those of the ``loaded`` tokenizer."""
    if given is None or loaded is None:
        return given is None
    own = [folder.path / name for name in (TOKENIZER, SENTENCEPIECE)]
    return any(path.is_file() and path.read_bytes() == loaded.path.read_bytes() for path in own)


def _match(folder: HuggingFaceFolder, family: Family, model: ModelConfig) -> tuple[list[Place], torch.dtype]:
    """Return the family's tensors in the layout that fits the folder best, and their common dtype (see `_dtype`).

    Raises:
        UserError: a tensor is missing or unexpected, or has another shape or an unsupported dtype.
    """
    forms = family.forms(model)
    names = set(folder.tensors)
    found = max(forms, key=lambda form: sum(name in names for place in form for name in place.theirs))
    wanted: dict[str, tuple[int, ...]] = {}
    for place in found:
        wanted |= place.theirs
    for name, shape in wanted.items():
        if name not in names:
            raise UserError(f"{folder.path} has no tensor {name}")
        if folder.tensors[name].shape != shape:
            raise UserError(
                f"{folder.path}: {name} has shape {list(folder.tensors[name].shape)}, but config.json implies "
                f"{list(shape)}"
            )
    dtype = _dtype(folder, found)  # first: quantized weights come with tensors of scales
    left = sorted(name for name in names - wanted.keys() if not name.endswith((_IGNORED, *family.ignored)))
    for copy, name in family.copies.items():
        if copy not in left:
            continue
        if folder.tensors[copy].shape != wanted[name] or not torch.equal(folder.read(copy), folder.read(name)):
            raise UserError(f"{folder.path}: {copy} differs from {name}, but the model shares them")
        left.remove(copy)
    if left:
        raise UserError(f"{folder.path} has the tensor {left[0]}, which is not part of this {family.name} model")
    return found, dtype


def _dtype(folder: HuggingFaceFolder, found: Sequence[Place]) -> torch.dtype:
    """Return the weights' common dtype; float32 if they differ."""
    stored: Mapping[str, Stored] = folder.tensors
    dtypes = {stored[name].dtype: name for place in found if place.dtype is None for name in place.theirs}
    for dtype, name in dtypes.items():
        if dtype not in _PRECISIONS:
            raise UserError(
                f"{folder.path}: {name} has dtype {name_of(dtype)}, which is not supported: convert the weights to one "
                f"of {', '.join(map(name_of, _PRECISIONS))}"
            )
    return next(iter(dtypes)) if len(dtypes) == 1 else torch.float32


def _pieces(
    folder: HuggingFaceFolder, family: Family, model: ModelConfig, found: Sequence[Place], dtype: torch.dtype
) -> Iterator[Piece]:
    sizes, stacks = sizes_of(model), Counter(place.ours for place in found)
    for place in found:
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
        if place.expert is None:
            yield Piece(place.ours, tuple(ours.shape), (0,) * ours.dim(), tuple(ours.shape), ours)
        else:
            block, offset = (1, *ours.shape), (place.expert, *(0 for _ in ours.shape))
            yield Piece(place.ours, (stacks[place.ours], *ours.shape), offset, block, ours.unsqueeze(0))
