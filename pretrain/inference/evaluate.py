"""Quality of trained models on text: ``fmoe evaluate``."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fmoe.errors import UserError
from pretrain.config import ParallelConfig
from pretrain.data.progress import bar
from pretrain.inference import report
from pretrain.inference.evaluation import evaluate
from pretrain.inference.load import Trained, load_model, open_run, process_groups, start_ranks
from pretrain.inference.scores import score
from pretrain.start.process import Processes


def run(arguments: argparse.Namespace, parallel: ParallelConfig, argv: Sequence[str]) -> int:
    """Print how well models predict text, on rank 0.

    Args:
        arguments: those of `pretrain.inference.cli.evaluate`, parsed from ``argv``.
        parallel: the split of the models.
    """
    runs = [open_run(path, arguments.step, arguments.tokenizer, arguments.imports, parallel) for path in arguments.runs]
    seen: set[Path] = set()
    for trained in runs:
        path = trained.checkpoint.path.resolve()
        if path in seen:
            raise UserError(f"{trained.checkpoint.path} is given twice")
        seen.add(path)
        memory_length = trained.recipe.model.position.memory_length
        if arguments.memory_length is not None and not memory_length:
            raise UserError(
                f"--memory-length {arguments.memory_length} needs a model with memory; {trained.name} has "
                "position.memory_length=0"
            )
        if parallel.data > 1 and memory_length:
            raise UserError(
                f"--parallel.data {parallel.data} is not supported with position.memory_length="
                f"{memory_length} of {trained.name}: its streams of text are not divided"
            )
    options = (arguments.data, arguments.text_key, arguments.stride, arguments.max_sequences, arguments.format)
    data_of_runs = [report.open_data(trained, *options) for trained in runs]
    code = start_ranks(["evaluate", *argv], parallel)
    if code is not None:
        return code
    results = []
    with process_groups(parallel) as processes:
        for trained, data in zip(runs, data_of_runs, strict=True):
            with _progress(trained.name, data.count, processes) as on_progress:
                model = load_model(trained, processes, drops=True)
                evaluation = evaluate(
                    model,
                    trained.recipe,
                    data.samples,
                    streams=data.streams,
                    memory_length=arguments.memory_length,
                    byte_lengths=_byte_lengths(trained),
                    device=processes.device,
                    on_progress=on_progress,
                )
            figures = () if data.source is None else score(model, trained, data.source, evaluation.sequences, processes)
            results.append(report.RunEvaluation(trained, data, evaluation, *figures))
    if not processes.is_main:
        return 0
    if arguments.json:
        print(json.dumps(report.values(results), indent=1, allow_nan=False))
    else:
        print(report.text(results))
    return 0


def _byte_lengths(trained: Trained) -> np.ndarray | None:
    """Return the number of UTF-8 bytes of every token's text; None if the model does not predict text, or without a
    tokenizer."""
    model = trained.recipe.model
    if model.objective != "gpt" or trained.tokenizer is None:
        return None
    lengths = trained.tokenizer.byte_lengths
    return np.pad(lengths, (0, model.vocab_size - len(lengths)))


@contextlib.contextmanager
def _progress(name: str, total: int | None, processes: Processes) -> Iterator:
    """Show a progress bar if stderr is a terminal; yield a function that sets the number of sequences done."""
    if not (processes.is_main and sys.stderr.isatty()):
        yield lambda sequences: None
        return
    with bar(name, total, lambda rich: (rich.MofNCompleteColumn(), rich.TextColumn("sequences"))) as update:
        yield update
