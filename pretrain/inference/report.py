"""Evaluation reports: the data to evaluate on, and the results as text and as JSON values."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fmoe.errors import UserError
from fmoe.metrics import LayerReport
from pretrain.data.inputs import bos_of, open_validation
from pretrain.formats import markdown
from pretrain.inference.evaluation import Evaluation
from pretrain.inference.load import Trained
from pretrain.inference.windows import Text, samples_of
from pretrain.tracking.metrics import DECLARED, Metric


@dataclass(frozen=True)
class Source:
    """Evaluation data of a run.

    Attributes:
        paths: paths as spelled by the user or in the recipe.
        count: number of sequences, or an upper bound on it; None if neither is known before the text is read.
        samples: iterator over the sequences.
        streams: for a model with memory, number of streams of text; sequence i continues stream ``i % streams``.
    """

    paths: tuple[str, ...]
    count: int | None
    samples: Iterator
    streams: int = 1


def open_source(
    trained: Trained,
    data: Sequence[Path] | None,
    text_key: str,
    stride: int | None,
    max_sequences: int | None,
    format: str = "auto",
) -> Source:
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
    recipe, model = trained.recipe, trained.recipe.model
    if data is None:
        if not recipe.data.validation:
            raise UserError(f"{trained.name} has no data.validation: pass text with --data")
        try:
            samples, sums = open_validation(recipe, trained.tokenizer)
        except UserError as error:
            raise UserError(f"{trained.name}: {error}; pass other text with --data") from error
        were = trained.run_data.get("validation") or ()
        if len(were) == len(sums) and any(a and b and a != b for a, b in zip(were, sums, strict=True)):
            raise UserError(
                f"{trained.name}: data.validation={list(recipe.data.validation)} has changed since the run; "
                "pass --data to evaluate on its present content"
            )
        num = recipe.train.validation_sequences
        if max_sequences is not None:
            num = min(max_sequences, samples.samples_per_epoch)
        return Source(recipe.data.validation, num, (samples[n] for n in range(num)), recipe.streams or 1)
    if stride is not None and model.objective != "gpt":
        raise UserError(f"--stride {stride} applies to a GPT only; {trained.name} has model.kind={model.kind}")
    if stride is not None and model.memory_length:
        raise UserError(
            f"--stride {stride} is not supported with model.memory_length={model.memory_length} of {trained.name}, "
            "whose memory holds the earlier tokens: omit --stride"
        )
    if stride is not None and stride > model.sequence_length:
        raise UserError(
            f"--stride {stride} exceeds model.sequence_length={model.sequence_length}: it would skip tokens"
        )
    text = Text(data, trained.tokenizer, model.vocab_size, text_key, format, bos_of(recipe, trained.tokenizer))
    count = None
    if text.num_tokens is not None:
        block = recipe.spans.block if model.kind == "t5" else model.sequence_length - 2 * (model.kind == "bert")
        count = -(-max(text.num_tokens - block, 0) // (stride or block)) + 1
    if max_sequences is not None:
        count = max_sequences if count is None else min(count, max_sequences)
    found = samples_of(recipe, trained.tokenizer, text, stride)
    first = next(found)  # fails on empty data before the model is built
    return Source(tuple(map(str, data)), count, islice(chain([first], found), max_sequences))


@dataclass(frozen=True)
class Result:
    """An evaluation with its model and data."""

    trained: Trained
    source: Source
    found: Evaluation


def text(results: Sequence[Result]) -> str:
    """Format a table of the runs, a table of each run's layers with experts, and notes."""
    rows = [["run", "step", "sequences", "tokens", "loss", "perplexity", "accuracy", "bits/byte"]]
    for result in results:
        found = result.found
        bits = found.bits_per_byte
        rows.append(
            [
                result.trained.name,
                str(result.trained.checkpoint.step),
                f"{found.sequences:,}",
                f"{found.tokens:,}",
                f"{found.loss:.4f}",
                f"{found.perplexity:.4g}",
                f"{found.accuracy:.4f}",
                "-" if bits is None else f"{bits:.4f}",
            ]
        )
    parts = [markdown(rows)]
    for result in results:
        if not result.found.layers:
            continue
        name = f"{result.trained.name}, layer" if len(results) > 1 else "layer"
        rows = []
        for number, layer in result.found.layers.items():
            figures = {m.label: f"{v:.4g}" for m, v in _layer_values(layer).items() if not isinstance(v, list)}
            rows.append([str(number), *figures.values()])
        parts.append(markdown([[name, *figures], *rows]))
    if said := notes(results):
        parts.append("\n".join(f"note: {line}" for line in said))
    return "\n\n".join(parts)


def notes(results: Sequence[Result]) -> list[str]:
    """Return caveats for the comparison, one line each."""
    found = []
    first = results[0]
    if any(result.trained.recipe.model.kind != first.trained.recipe.model.kind for result in results):
        found.append("the models are of different kinds: their losses are not comparable")
    elif any(result.trained.tokenizer.fingerprint != first.trained.tokenizer.fingerprint for result in results):
        found.append("the tokenizers differ: losses per token are not comparable, bits per byte (of a GPT) are")
    if any(result.source.paths != first.source.paths for result in results):
        found.append(
            "the runs were evaluated on their own data.validation, which differ: pass --data for the same text"
        )
    return found


def values(results: Sequence[Result]) -> dict[str, Any]:
    """Return JSON values of all results under ``runs`` and ``notes``; undefined and non-finite metrics are null."""
    return {"runs": [_values(result) for result in results], "notes": notes(results)}


def _values(result: Result) -> dict[str, Any]:
    found, trained = result.found, result.trained
    return {
        "run": trained.name,
        "checkpoint": str(trained.checkpoint.path),
        "step": trained.checkpoint.step,
        "kind": trained.recipe.model.kind,
        "precision": trained.recipe.train.precision,
        "data": list(result.source.paths),
        "sequences": found.sequences,
        "tokens": found.tokens,
        "bytes": found.bytes,
        "loss": _finite(found.loss),
        "perplexity": _finite(found.perplexity),
        "accuracy": _finite(found.accuracy),
        "bits_per_byte": _finite(found.bits_per_byte),
        "layers": [
            {"layer": number} | {metric.name: _finite(value) for metric, value in _layer_values(layer).items()}
            for number, layer in found.layers.items()
        ],
    }


def _layer_values(layer: LayerReport) -> dict[Metric, float | list[float]]:
    return {metric: metric.reduce(layer) for metric in DECLARED if metric.reduce and metric.is_evaluated}


def _finite(value: float | list[float] | None) -> float | list | None:
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if value is not None and math.isfinite(value) else None
