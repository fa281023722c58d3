"""A run as its folder tells it: ``config.toml``, ``metrics.jsonl``, ``run.json``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fmoe.errors import UserError
from pretrain.config import Recipe, load_recipe
from pretrain.tracking import read_metrics
from pretrain.tracking.folder import CONFIG, METRICS, TOLD, read_told

# What changes no number of a run, or none but by rounding.
OF_NO_EFFECT = (
    "run.",
    "parallel.",
    "checkpoint.",
    "tracking.",
    "guard.collapse_",
    "guard.hang_minutes",
    "train.seed",
    "train.micro_batch",
)


@dataclass(frozen=True)
class Validation:
    """A validation: after how many steps, after how many tokens of training, and its loss in nats a token, which may
    be NaN or infinite."""

    step: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class File:
    """A tokenizer or a corpus: its path, and the SHA-256 of what is in it where the run tells."""

    path: str
    sha256: str | None = None

    def is_same(self, other: "File") -> bool:
        """By content where both tell, else by path."""
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        return self.path == other.path


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        folder: as it was given.
        recipe: the resolved one; of a run that was resumed, the last.
        step: the last that was logged.
        validations: at least one, in the order of steps, each step once.
        params, active_params: parameters in all, and those that a token meets.
        flops_per_token: floating point operations of a training step per token, forward and backward, router included
            (`pretrain.config.counts.flops_per_token`).
        tokenizer, train, validation: what it read.
    """

    folder: Path
    recipe: Recipe
    step: int
    validations: tuple[Validation, ...]
    params: int
    active_params: int
    flops_per_token: float
    tokenizer: File
    train: tuple[File, ...]
    validation: tuple[File, ...]

    @property
    def is_finished(self) -> bool:
        """Whether the last step of the recipe was made."""
        return self.step >= self.recipe.train.steps

    def keys(self) -> dict[str, Any]:
        """Everything of the recipe that makes it another experiment, by key; corpora by content."""
        values = {key: value for key, value in flatten(self.recipe).items() if not key.startswith(OF_NO_EFFECT)}
        for key, files in (("tokenizer", (self.tokenizer,)), ("train", self.train), ("validation", self.validation)):
            values[f"data.{key}"] = tuple(file.sha256 or file.path for file in files)
        return values


def flatten(recipe: Recipe) -> dict[str, Any]:
    """``section.key`` -> value."""
    return {f"{section}.{key}": value for section, values in asdict(recipe).items() for key, value in values.items()}


def read_run(folder: Path) -> Run:
    """Reads a run's folder, also while the run goes on.

    Raises:
        UserError: there is no run, a file of it is damaged, or it has no validation.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder of a run")
    for name in (CONFIG, METRICS):
        if not (folder / name).is_file():
            raise UserError(f"{folder} is no folder of a run: there is no {name} in it")
    try:
        recipe = load_recipe(str(folder / CONFIG))
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    rows = _rows(folder / METRICS)
    validations = tuple(_validations(recipe, rows))
    if not validations:
        why = "its data.validation is empty" if not recipe.data.validation else f"none is in its {METRICS} yet"
        raise UserError(f"{folder} has no validation to compare: {why}")
    told = _told(folder)
    data = told.get("data") or {}
    return Run(
        folder=folder,
        recipe=recipe,
        step=rows[-1]["step"],
        validations=validations,
        params=told.get("params", recipe.num_params()),
        active_params=told.get("active_params", recipe.num_active_params()),
        flops_per_token=told.get("flops_per_token", recipe.flops_per_token()),
        tokenizer=File(recipe.data.tokenizer, data.get("tokenizer")),
        train=_files(recipe.data.train, data.get("train")),
        validation=_files(recipe.data.validation, data.get("validation")),
    )


def check_comparable(runs: Sequence[Run]) -> None:
    """Raises UserError for the first run whose validation loss means something else than the first run's."""
    first = runs[0]
    for run in runs[1:]:
        values, others = flatten(first.recipe), flatten(run.recipe)
        for key in _meaning(first.recipe):
            if values[key] != others[key]:
                raise _incomparable(first, run, f"{key} is {values[key]} and {others[key]}")
        if not first.tokenizer.is_same(run.tokenizer):
            paths = f"{first.tokenizer.path} and {run.tokenizer.path}"
            raise _incomparable(first, run, f"their tokenizers differ, data.tokenizer is {paths}")
        pairs = list(zip(first.validation, run.validation, strict=False))
        if len(first.validation) != len(run.validation) or not all(a.is_same(b) for a, b in pairs):
            paths = f"{list(first.recipe.data.validation)} and {list(run.recipe.data.validation)}"
            raise _incomparable(first, run, f"they were validated on different text, data.validation is {paths}")


def _meaning(recipe: Recipe) -> list[str]:
    """Keys that say what is predicted, and from what."""
    keys = {"gpt": ["data.document_mask"], "bert": ["data.noise_density"]}
    return ["model.kind", *keys.get(recipe.model.kind, ["data.noise_density", "data.mean_span"])]


def _incomparable(first: Run, run: Run, why: str) -> UserError:
    return UserError(f"losses of {first.folder} and {run.folder} cannot be compared: {why}")


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics that count. Where the record goes back, as one that was put together from parts of a resumed
    run may, the later rows are those of the run that went on."""
    rows: list[dict[str, Any]] = []
    for row in read_metrics(path):
        if rows and row["step"] < rows[-1]["step"]:
            rows = [kept for kept in rows if kept["step"] < row["step"]]
        rows.append(row)
    return rows


def _validations(recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> list[Validation]:
    found: dict[int, Validation] = {}
    for row in rows:
        if "val/loss" not in row:
            continue
        step, loss = row["step"], row["val/loss"]
        if not isinstance(loss, int | float):  # JSON has no NaN (`JsonlTracker`)
            loss = {"inf": math.inf, "-inf": -math.inf}.get(str(row.get("val/loss_nonfinite")), math.nan)
        tokens = row.get("tokens")
        if type(tokens) is not int:
            tokens = recipe.batches.first(step) * recipe.tokens_per_sequence
        found[step] = Validation(step, tokens, float(loss))
    return list(found.values())


def _told(folder: Path) -> dict[str, Any]:
    """Return ``run.json`` with what a comparison reads of it checked; empty where there is none yet."""
    told, path = read_told(folder), folder / TOLD
    for key in ("params", "active_params", "flops_per_token"):
        value = told.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise UserError(f"{path} cannot be read: {key}={value!r} is not a number")
    data = told.get("data") or {}
    sums = [data.get("tokenizer"), data.get("train"), data.get("validation")] if isinstance(data, dict) else [data]
    for value in sums:
        if any(not isinstance(item, str | None) for item in (value if isinstance(value, list) else [value])):
            raise UserError(f"{path} cannot be read: data={data!r} is not what a run writes")
    return told


def _files(paths: Sequence[str], sums: Sequence[str | None] | None) -> tuple[File, ...]:
    if sums is None or len(sums) != len(paths):
        return tuple(File(path) for path in paths)
    return tuple(File(path, sha256) for path, sha256 in zip(paths, sums, strict=True))
