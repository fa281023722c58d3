"""A run to compare, read from its folder: ``config.toml``, ``metrics.jsonl``, ``run.json``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmoe.errors import UserError
from pretrain.config import Recipe, load_recipe
from pretrain.tracking import read_metrics
from pretrain.tracking.folder import CONFIG, METRICS, RUN_INFO, read_run_info

# Prefixes of keys that do not define an experiment: the seed, and keys that change losses by rounding at most.
OF_NO_EFFECT = (
    "run.folder",
    "parallel.",
    "checkpoint.",
    "tracking.",
    "evaluation.",
    "guard.collapse_",
    "guard.hang_minutes",
    "train.seed",
    "train.micro_batch",
)

# Keys that define the predicted tokens and their context, by the model's objective.
_MEANING = {
    "gpt": ("data.document_mask", "data.chat", "data.bos"),
    "bert": ("data.noise_density",),
    "classifier": ("model.vocab_size",),
    "t5": ("data.noise_density", "data.mean_span"),
}

_BY = "compared by SHA-256, or by path if one is unknown"


@dataclass(frozen=True)
class ValidationLoss:
    """A validation: the steps and training tokens before it, and its loss in nats per token.

    The loss may be NaN or infinite.
    """

    step: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class File:
    """A tokenizer or a corpus: its path, and the SHA-256 of its content if the run recorded it."""

    path: str
    sha256: str | None = None

    def is_same(self, other: "File") -> bool:
        """Compare by content if both have a digest, else by path."""
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        return self.path == other.path


@dataclass(frozen=True)
class Run:
    """A run, read from its folder.

    Attributes:
        folder: path of the folder, as given.
        recipe: the resolved recipe. For a resumed run, the latest one.
        step: the last step logged.
        validations: at least one, ordered by step, one per step.
        params, active_params: number of all parameters, and of those that a token uses.
        flops_per_token: floating point operations of a training step per token, forward and backward, router included
            (`pretrain.config.counts.flops_per_token`).
        tokenizer, train, validation: the files that the run read.
    """

    folder: Path
    recipe: Recipe
    step: int
    validations: tuple[ValidationLoss, ...]
    params: int
    active_params: int
    flops_per_token: float
    tokenizer: File
    train: tuple[File, ...]
    validation: tuple[File, ...]

    @property
    def is_finished(self) -> bool:
        """True if the run has completed the recipe's last step."""
        return self.step >= self.recipe.train.steps

    def keys(self) -> dict[str, Any]:
        """Return the recipe keys and values that define the experiment, except the seed.

        The value of a file is its SHA-256 or, if that is unknown, its path.
        """
        values = {key: value for key, value in flatten(self.recipe).items() if not key.startswith(OF_NO_EFFECT)}
        for key, files in (("tokenizer", (self.tokenizer,)), ("train", self.train), ("validation", self.validation)):
            values[f"data.{key}"] = tuple(file.sha256 or file.path for file in files)
        return values


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as one dictionary, keyed by ``section.key``."""
    return {f"{section}.{key}": value for section, values in recipe.values().items() for key, value in values.items()}


def read_run(folder: Path) -> Run:
    """Read a run's folder, even while the run is in progress.

    Raises:
        UserError: the folder is not a run's, one of its files is damaged, or the run has no validation.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not the folder of a run: it does not exist or is not a folder")
    for name in (CONFIG, METRICS):
        if not (folder / name).is_file():
            raise UserError(f"{folder} is not the folder of a run: it has no {name}")
    try:
        recipe = load_recipe(str(folder / CONFIG))
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    rows = read_metrics(folder / METRICS)
    validations = tuple(_validations(recipe, rows))
    if not validations:
        why = "its data.validation is empty" if not recipe.data.validation else f"{METRICS} has none yet"
        raise UserError(f"{folder} has no validation to compare: {why}")
    info = _run_info(folder)
    data = info.get("data") or {}
    return Run(
        folder=folder,
        recipe=recipe,
        step=rows[-1]["step"],
        validations=validations,
        params=info.get("params", recipe.num_params()),
        active_params=info.get("active_params", recipe.num_active_params()),
        flops_per_token=info.get("flops_per_token", recipe.flops_per_token()),
        tokenizer=File(recipe.data.tokenizer, data.get("tokenizer")),
        train=_files(recipe.data.train, data.get("train")),
        validation=_files(recipe.data.validation, data.get("validation")),
    )


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise UserError if a run's validation loss is not comparable with the first run's."""
    first = runs[0]
    for run in runs[1:]:
        values = flatten(first.recipe)
        others = flatten(run.recipe)
        for key in ("model.kind", *_MEANING[first.recipe.model.objective]):
            if values[key] != others[key]:
                raise _incomparable(first, run, key, str(values[key]).lower(), str(others[key]).lower())
        if not first.tokenizer.is_same(run.tokenizer):
            key = f"their tokenizers differ ({_BY}): data.tokenizer"
            raise _incomparable(first, run, key, first.tokenizer.path, run.tokenizer.path)
        pairs = zip(first.validation, run.validation, strict=False)
        if len(first.validation) != len(run.validation) or not all(a.is_same(b) for a, b in pairs):
            key = f"their validation texts differ ({_BY}): data.validation"
            raise _incomparable(first, run, key, list(first.recipe.data.validation), list(run.recipe.data.validation))


def _incomparable(first: Run, run: Run, key: str, value: Any, other: Any) -> UserError:
    return UserError(
        f"losses of {first.folder} and {run.folder} are not comparable: {key} is {value} in the first and {other} in "
        "the second"
    )


def _validations(recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> list[ValidationLoss]:
    validations: dict[int, ValidationLoss] = {}
    for row in rows:
        if "val/loss" not in row:
            continue
        step = row["step"]
        loss = row["val/loss"]
        if not isinstance(loss, int | float):  # JSON has no NaN (`JsonlTracker`)
            loss = {"inf": math.inf, "-inf": -math.inf}.get(str(row.get("val/loss_nonfinite")), math.nan)
        tokens = row.get("tokens")
        if type(tokens) is not int:
            tokens = recipe.batches.first(step) * recipe.tokens_per_sequence
        validations[step] = ValidationLoss(step, tokens, float(loss))
    return list(validations.values())


def _run_info(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's ``run.json``; empty if there is no such file."""
    info = read_run_info(folder)
    path = folder / RUN_INFO
    for key in ("params", "active_params", "flops_per_token"):
        value = info.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UserError(f"{path}: {key}={value!r} must be a finite number of at least 0")
    data = info.get("data") or {}
    if not isinstance(data, dict):
        raise UserError(f"{path}: data={data!r} must be an object of SHA-256 digests")
    for key in ("tokenizer", "train", "validation"):
        value = data.get(key)
        if any(not isinstance(item, str | None) for item in (value if isinstance(value, list) else [value])):
            raise UserError(f"{path}: data.{key}={value!r} must be a SHA-256, a list of them, or null")
    return info


def _files(paths: Sequence[str], sums: Sequence[str | None] | None) -> tuple[File, ...]:
    if sums is None or len(sums) != len(paths):
        return tuple(File(path) for path in paths)
    return tuple(File(path, sha256) for path, sha256 in zip(paths, sums, strict=True))
