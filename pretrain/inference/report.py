"""What evaluations say, as text and as values that JSON can hold; and what they are made on."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fmoe.errors import UserError
from fmoe.metrics import LayerReport
from pretrain.compare.table import markdown
from pretrain.data.inputs import open_validation
from pretrain.inference.evaluation import Evaluation
from pretrain.inference.load import Trained
from pretrain.inference.windows import Text, samples_of


@dataclass(frozen=True)
class Source:
    """What a run is evaluated on.

    Attributes:
        paths: as they are named, by the user or in the recipe.
        count: sequences; None where that is not known before the text was read.
        samples: the sequences, once.
    """

    paths: tuple[str, ...]
    count: int | None
    samples: Iterator


def open_source(
    trained: Trained,
    data: Sequence[Path] | None,
    text_key: str,
    stride: int | None,
    max_sequences: int | None,
    format: str = "auto",
) -> Source:
    """Opens ``data``, or by default the run's own validation data, of which the trainer takes the same sequences.

    Raises:
        UserError: see `pretrain.inference.windows.Text`; a run without validation data, or whose data have changed; a
            stride that the model has no use for.
    """
    recipe, model = trained.recipe, trained.recipe.model
    if data is None:
        if not recipe.data.validation:
            raise UserError(f"{trained.name} has no data.validation: name text with --data")
        try:
            samples, sums = open_validation(recipe, trained.tokenizer)
        except UserError as error:
            raise UserError(f"{trained.name}: {error}; --data names other text") from error
        were = trained.told.get("validation") or ()
        if len(were) == len(sums) and any(a and b and a != b for a, b in zip(were, sums, strict=True)):
            raise UserError(
                f"{trained.name}: data.validation={list(recipe.data.validation)} has other content than when the run "
                "was made; --data evaluates on what is there now"
            )
        num = recipe.train.validation_sequences
        if max_sequences is not None:
            num = min(max_sequences, samples.samples_per_epoch)
        return Source(recipe.data.validation, num, (samples[n] for n in range(num)))
    if stride is not None and model.kind != "gpt":
        raise UserError(f"--stride {stride} is for a GPT's windows; {trained.name} is a model.kind={model.kind}")
    if stride is not None and stride > model.sequence_length:
        raise UserError(
            f"--stride {stride} is more than model.sequence_length={model.sequence_length}: it skips tokens"
        )
    text = Text(data, trained.tokenizer, model.vocab_size, text_key, format)
    count = None
    if text.num_tokens is not None:
        block = recipe.spans.block if model.kind == "t5" else model.sequence_length - 2 * (model.kind == "bert")
        count = -(-max(text.num_tokens - block, 0) // (stride or block)) + 1
    if max_sequences is not None:
        count = max_sequences if count is None else min(count, max_sequences)
    found = samples_of(recipe, trained.tokenizer, text, stride)
    first = next(found)  # whether there is one shows before a model is made
    return Source(tuple(map(str, data)), count, islice(chain([first], found), max_sequences))


@dataclass(frozen=True)
class Result:
    """An evaluation, and of what on what."""

    trained: Trained
    source: Source
    found: Evaluation


def text(results: Sequence[Result]) -> str:
    """A table of the runs, one of each run's layers with experts, and what to mind."""
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
        rows = [[name, "dropped", "load cv", "dead experts", "entropy"]]
        rows += [
            [
                str(number),
                f"{layer.drop_rate:.4f}",
                f"{layer.load_cv:.3f}",
                str(layer.dead_experts),
                f"{layer.entropy:.3f}",
            ]
            for number, layer in result.found.layers.items()
        ]
        parts.append(markdown(rows))
    if said := notes(results):
        parts.append("\n".join(f"note: {line}" for line in said))
    return "\n\n".join(parts)


def notes(results: Sequence[Result]) -> list[str]:
    """What a reader has to know before comparing; one line each."""
    found = []
    first = results[0]
    if any(result.trained.recipe.model.kind != first.trained.recipe.model.kind for result in results):
        found.append("the models are of different kinds: their losses do not mean the same")
    elif any(result.trained.tokenizer.fingerprint != first.trained.tokenizer.fingerprint for result in results):
        found.append("the tokenizers differ: compare bits a byte, not losses a token")
    if any(result.source.paths != first.source.paths for result in results):
        found.append(
            "the runs were evaluated on their own validation data, which differ: --data takes one text for all"
        )
    return found


def values(results: Sequence[Result]) -> dict[str, Any]:
    """``runs`` and ``notes``; null for what a kind of model does not have, and for what is not finite."""
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
        "layers": [_layer_values(number, layer) for number, layer in found.layers.items()],
    }


def _layer_values(number: int, layer: LayerReport) -> dict[str, Any]:
    return {
        "layer": number,
        "drop_rate": layer.drop_rate,
        "load_cv": layer.load_cv,
        "dead_experts": layer.dead_experts,
        "entropy": layer.entropy,
        "load": layer.load,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
