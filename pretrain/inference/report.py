"""Evaluation reports: the data to evaluate on, and the results as text and as JSON values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fmoe.errors import UserError
from fmoe.metrics import LayerReport
from pretrain.data.custom import SourceSamples
from pretrain.data.inputs import open_validation
from pretrain.data.opening import bos_of
from pretrain.formats import finite, markdown
from pretrain.inference.evaluation import Evaluation
from pretrain.inference.load import Trained
from pretrain.inference.scores import Loads
from pretrain.inference.windows import Text, samples_of
from pretrain.models import kind_of
from pretrain.tracking.metrics import DECLARED, Metric


@dataclass(frozen=True)
class EvaluationData:
    """Evaluation data of a run.

    Attributes:
        paths: paths as spelled by the user or in the recipe.
        count: number of sequences, or an upper bound on it; None if neither is known before the text is read.
        samples: iterator over the sequences.
        streams: for a model with memory, number of streams of text; sequence i continues stream ``i % streams``.
        source: the samples, if they are those of a registered source; else None.
    """

    paths: tuple[str, ...]
    count: int | None
    samples: Iterator
    streams: int = 1
    source: SourceSamples | None = None


def open_data(
    trained: Trained,
    data: Sequence[Path] | None,
    text_key: str,
    stride: int | None,
    max_sequences: int | None,
    format: str = "auto",
) -> EvaluationData:
    """Open the data on which a run's model is evaluated.

    Args:
        data: text files, folders, or prefixes of .bin/.idx pairs; None for the run's own validation data.
        text_key: key or column with the text in JSON files and tables.
        stride: tokens from one window of a GPT to the next; None for the window's length.
        max_sequences: maximum number of sequences. None for all of ``data`` or, for the run's own validation data, for
            as many as the run uses.
        format: format of text files, as for `pretrain.data.documents.find_sources`.

    Raises:
        UserError: see `pretrain.inference.windows.Text`. The run has no validation data, or its validation data
            have changed since the run. The stride does not apply to the model, or exceeds its sequence length.
            ``data`` has no tokens to predict.
    """
    recipe = trained.recipe
    model = recipe.model
    own_data = recipe.data
    if own_data.samples is not None and recipe.parallel.pipeline > 1:
        raise UserError(
            f"--parallel.pipeline {recipe.parallel.pipeline} is not supported with data.samples="
            f"{own_data.samples} of {trained.name}"
        )
    if data is None:
        if not own_data.validation:
            raise UserError(f"{trained.name} has no data.validation: pass text with --data")
        try:
            samples, sums = open_validation(recipe, trained.tokenizer)
        except UserError as error:
            hint = "; pass other text with --data" if own_data.samples is None else ""
            raise UserError(f"{trained.name}: {error}{hint}") from error
        recorded = trained.run_data.get("validation") or ()
        if len(recorded) == len(sums) and any(a and b and a != b for a, b in zip(recorded, sums, strict=True)):
            raise UserError(
                f"{trained.name}: data.validation={list(own_data.validation)} has changed since the run"
                + ("; pass --data to evaluate on its present content" if own_data.samples is None else "")
            )
        count = recipe.train.validation_sequences
        if max_sequences is not None:
            count = min(max_sequences, samples.samples_per_epoch)
        source = samples if isinstance(samples, SourceSamples) else None
        rows = (samples[n] for n in range(count))
        return EvaluationData(own_data.validation, count, rows, recipe.streams or 1, source)
    if own_data.samples is not None:
        raise UserError(f"--data is not supported with data.samples={own_data.samples} of {trained.name}")
    if stride is not None:
        _check_stride(stride, trained)
    text = Text(data, trained.tokenizer, model.vocab_size, text_key, format, bos_of(recipe, trained.tokenizer))
    counts = [] if max_sequences is None else [max_sequences]
    if text.num_tokens is not None:
        block = kind_of(recipe).block_length(recipe)
        counts.append(-(-max(text.num_tokens - block, 0) // (stride or block)) + 1)
    windows = samples_of(recipe, trained.tokenizer, text, stride)
    first = next(windows)  # fails on empty data before the model is built
    return EvaluationData(
        tuple(map(str, data)), min(counts, default=None), islice(chain([first], windows), max_sequences)
    )


def _check_stride(stride: int, trained: Trained) -> None:
    model = trained.recipe.model
    if model.objective != "gpt":
        raise UserError(f"--stride {stride} applies to a GPT only; {trained.name} has model.kind={model.kind}")
    if model.position.memory_length:
        raise UserError(
            f"--stride {stride} is not supported with position.memory_length={model.position.memory_length} of "
            f"{trained.name}, whose memory holds the earlier tokens: omit --stride"
        )
    if stride > model.sequence_length:
        raise UserError(
            f"--stride {stride} exceeds model.sequence_length={model.sequence_length}: it would skip tokens"
        )


_SUMS = ("sequences", "tokens", "bytes", "loss", "perplexity", "accuracy", "bits_per_byte")


@dataclass(frozen=True)
class RunEvaluation:
    """An evaluation with its model and data."""

    trained: Trained
    data: EvaluationData
    evaluation: Evaluation
    scores: dict[str, float] = field(default_factory=dict)
    loads: Loads = field(default_factory=dict)


def text(runs: Sequence[RunEvaluation]) -> str:
    """Format a table of the runs, a table of each run's layers with experts, and notes."""
    rows = [["run", "step", "sequences", "tokens", "loss", "perplexity", "accuracy", "bits/byte"]]
    for run in runs:
        sums = run.evaluation
        rows.append(
            [
                run.trained.name,
                str(run.trained.checkpoint.step),
                f"{sums.sequences:,}",
                f"{sums.tokens:,}",
                f"{sums.loss:.4f}",
                f"{sums.perplexity:.4g}",
                f"{sums.accuracy:.4f}",
                "-" if sums.bits_per_byte is None else f"{sums.bits_per_byte:.4f}",
            ]
        )
    parts = [markdown(rows)]
    for run in runs:
        if run.scores:
            parts.append(
                markdown([["run", *run.scores], [run.trained.name, *(f"{x:.4g}" for x in run.scores.values())]])
            )
        for number in run.evaluation.layers if run.loads else ():
            rows = [[str(label), *(f"{share:.1%}" for share in layers[number])] for label, layers in run.loads.items()]
            experts = [f"expert {expert}" for expert in range(len(rows[0]) - 1)]
            parts.append(markdown([[f"{run.trained.name}, layer {number}, class", *experts], *rows]))
        rows = []
        for number, layer in run.evaluation.layers.items():
            numbers = {metric: value for metric, value in _layer_values(layer).items() if not isinstance(value, list)}
            if not rows:
                name = f"{run.trained.name}, layer" if len(runs) > 1 else "layer"
                rows.append([name, *(metric.label for metric in numbers)])
            rows.append([str(number), *(f"{value:.4g}" for value in numbers.values())])
        if rows:
            parts.append(markdown(rows))
    lines = notes(runs)
    if lines:
        parts.append("\n".join(f"note: {line}" for line in lines))
    return "\n\n".join(parts)


def notes(runs: Sequence[RunEvaluation]) -> list[str]:
    """Return caveats for the comparison, one line each."""
    lines = []
    if len({run.trained.recipe.model.kind for run in runs}) > 1:
        lines.append("the models are of different kinds: their losses are not comparable")
    elif len({getattr(run.trained.tokenizer, "fingerprint", None) for run in runs}) > 1:
        lines.append("the tokenizers differ: losses per token are not comparable, bits per byte (of a GPT) are")
    if len({run.data.paths for run in runs}) > 1:
        lines.append(
            "the runs were evaluated on their own data.validation, which differ: pass --data for the same text"
        )
    return lines


def values(runs: Sequence[RunEvaluation]) -> dict[str, Any]:
    """Return JSON values of all results under ``runs`` and ``notes``; undefined and non-finite metrics are null."""
    return {"runs": list(map(_values, runs)), "notes": notes(runs)}


def _values(run: RunEvaluation) -> dict[str, Any]:
    sums = run.evaluation
    return {
        "run": run.trained.name,
        "checkpoint": str(run.trained.checkpoint.path),
        "step": run.trained.checkpoint.step,
        "kind": run.trained.recipe.model.kind,
        "precision": run.trained.recipe.train.precision,
        "data": list(run.data.paths),
        **{name: finite(getattr(sums, name)) for name in _SUMS},
        "scores": {name: finite(value) for name, value in run.scores.items()},
        "loads_by_class": run.loads,
        "layers": [
            {"layer": number} | {metric.name: finite(value) for metric, value in _layer_values(layer).items()}
            for number, layer in sums.layers.items()
        ],
    }


def _layer_values(layer: LayerReport) -> dict[Metric, float | list[float]]:
    return {metric: metric.reduce(layer) for metric in DECLARED if metric.reduce and metric.is_evaluated}
