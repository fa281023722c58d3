"""``fmoe generate`` and ``fmoe evaluate``."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fmoe.cli import Parser, drop_output
from fmoe.errors import UserError, require
from pretrain.data.cli import INPUTS, add_format, path_argument
from pretrain.data.opening import bos_of
from pretrain.data.sources import refuse_other_encoding
from pretrain.inference import decoding, report
from pretrain.inference.evaluation import evaluate as evaluate_model
from pretrain.inference.load import Trained, load_model, open_run, single_process
from pretrain.inference.sampling import Sampling
from pretrain.inference.text import TextStream, encode_spans, fill, spans_of
from pretrain.start.process import Processes

_RUN = "folder of a run or of one of its checkpoints"


def generate(argv: list[str]) -> int:
    """Print the prompt and the model's continuation; see docs/inference.md.

    Raises:
        UserError: there is no checkpoint, the tokenizer is not the run's, or the prompt or a value is invalid.
    """
    arguments = _generate_parser().parse_args(argv)
    try:
        return _generate(arguments)
    except BrokenPipeError:  # the reader of the output has closed it
        drop_output()
        return 0


def _generate_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fmoe generate",
        description="Continue a text with a GPT, or fill in the spans <extra_id_0>, <extra_id_1>, ... of a text with "
        "a T5. Runs in one process, on a GPU if there is one; the checkpoint may come from any number of processes.",
        epilog='example: fmoe generate runs/quickstart --prompt "def main(" --max-tokens 200 --top-p 0.9',
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help=_RUN)
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue (default: read standard input)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest complete one)")
    parser.add_argument(
        "--max-tokens", type=int, default=200, metavar="N", help="maximum number of new tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=Sampling.temperature,
        metavar="T",
        help="divisor of the logits; 0 always takes the most probable token (default: %(default)s)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw only from the K most probable tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw only from the fewest most probable tokens that sum to at least P"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: %(default)s)")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="texts to draw (default: %(default)s)")
    parser.add_argument("--no-cache", action="store_true", help="recompute the whole window for every token (GPT only)")
    _add_common(parser, "print one JSON object at the end instead of streaming text")
    return parser


def evaluate(argv: list[str]) -> int:
    """Print how well models predict text; see docs/inference.md.

    Raises:
        UserError: there is no checkpoint, the tokenizer is not the run's, or the data are unreadable.
    """
    parser = Parser(
        prog="fmoe evaluate",
        description="Print loss, perplexity, accuracy and bits per byte of models, and the load of their experts, on "
        f"the\nvalidation data of each run, or on the text given by --data. Runs in one process.\n\n{INPUTS}",
        epilog="example: fmoe evaluate runs/dense runs/moe --data book.txt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=_RUN)
    parser.add_argument(
        "--data",
        nargs="+",
        action="extend",
        type=path_argument,
        metavar="INPUT",
        help="text, or prefixes of .bin/.idx pairs, read as one stream in the given order (default: the "
        "sequences of data.validation that the run itself is validated on)",
    )
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="JSON key or column with the text (default: text)"
    )
    add_format(parser)
    parser.add_argument("--max-sequences", type=int, metavar="N", help="evaluate only the first N sequences")
    parser.add_argument(
        "--stride",
        type=int,
        metavar="S",
        help="tokens from one window to the next, for a GPT on --data (default: the window's length)",
    )
    parser.add_argument(
        "--memory-length",
        type=int,
        metavar="M",
        help="number of hidden states in the memory of a model with memory (default: position.memory_length)",
    )
    parser.add_argument("--step", type=int, help="step of the checkpoints (default: the newest complete one)")
    _add_common(parser, "print everything as JSON")
    arguments = parser.parse_args(argv)
    _require_positive(arguments, "max_sequences", "stride", "memory_length")
    if arguments.stride is not None and arguments.data is None:
        raise UserError(
            f"--stride {arguments.stride} needs --data: a stride does not apply to the run's own validation data"
        )
    return _evaluate(arguments)


def _add_common(parser: argparse.ArgumentParser, json_help: str) -> None:
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="new location of the run's data.tokenizer")
    parser.add_argument(
        "--imports",
        nargs="+",
        metavar="FILE_OR_MODULE",
        help="files or modules to import in place of the run's run.imports, e.g. because its files have moved",
    )
    parser.add_argument("--json", action="store_true", help=json_help)


def _require_positive(arguments: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1")


def _generate(arguments: argparse.Namespace) -> int:
    _require_positive(arguments, "max_tokens", "num_samples")
    try:
        sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    except UserError as error:
        name, reason = str(error).split("=", 1)
        raise UserError(f"--{name.replace('_', '-')} {reason}") from None
    prompt = _prompt(arguments.prompt)
    trained = open_run(arguments.run, arguments.step, arguments.tokenizer, arguments.imports)
    ids = _prompt_ids(prompt, trained)
    is_t5 = trained.recipe.model.kind == "t5"
    with single_process(arguments.seed) as processes:
        decoder, begin, max_tokens = _decoder(arguments, trained, ids, processes)
        steps = decoding.generate(
            decoder,
            begin,
            sampling,
            max_tokens=max_tokens,
            end=trained.tokenizer.end_of_document,
            vocab_size=trained.tokenizer.vocab_size,
            num_samples=arguments.num_samples,
            device=processes.device,
        )
        streams = not (arguments.json or is_t5)
        printer = _Printer(prompt, trained, ids, arguments.num_samples) if streams else None
        samples: list[list[int]] = [[] for _ in range(arguments.num_samples)]
        for drawn in steps:
            for sample, token in zip(samples, drawn, strict=True):
                if token is not None:
                    sample.append(token)
            if printer is not None:
                printer.add(drawn)
    if printer is not None:
        printer.close()
    elif arguments.json:
        print(json.dumps(_generated(arguments, trained, prompt, ids, samples), indent=1, ensure_ascii=False))
    else:
        for number, tokens in enumerate(samples):
            _print_head(number, len(samples))
            print(fill(prompt, spans_of(tokens, trained.tokenizer)))
    return 0


def _decoder(
    arguments: argparse.Namespace, trained: Trained, ids: list[int], processes: Processes
) -> tuple[decoding.Decoder, list[int], int]:
    """Load the model. Return its decoder, the tokens that it begins with, and the maximum number of new ones."""
    model = trained.recipe.model
    if model.position.memory_length and arguments.no_cache:
        raise UserError(f"--no-cache is not supported with position.memory_length={model.position.memory_length}")
    module = load_model(trained, processes, drops=False)
    if model.kind == "t5":
        inputs = torch.tensor(ids, device=processes.device, dtype=torch.int64)
        # Learned positions, if the model has any, end there.
        max_tokens = min(arguments.max_tokens, max(model.sequence_length, trained.recipe.decoder_length))
        return decoding.T5Decoder(module, inputs, arguments.num_samples), [trained.tokenizer.role("pad")], max_tokens
    if model.position.memory_length:
        return decoding.MemoryDecoder(module, model.position.memory_length), ids, arguments.max_tokens
    keeps = not arguments.no_cache and model.position.encoding != "transformer_xl"
    return decoding.GPTDecoder(module, model.sequence_length, keeps=keeps), ids, arguments.max_tokens


def _prompt(text: str | None) -> str:
    if text is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError("no prompt: pass --prompt TEXT or text on standard input")
        try:
            data = sys.stdin.buffer.read()
            refuse_other_encoding(data, "the prompt on standard input")
            text = data.decode().removeprefix("\ufeff").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"the prompt on standard input is not UTF-8 at byte {error.start}") from error
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not UTF-8 at character {error.start}") from error
    if not text:
        raise UserError("the prompt is empty: pass --prompt TEXT or text on standard input, of at least one character")
    return text


def _prompt_ids(prompt: str, trained: Trained) -> list[int]:
    tokenizer = trained.tokenizer
    kind = trained.recipe.model.kind
    length = trained.recipe.model.sequence_length
    if kind == "bert":
        raise UserError(f"{trained.name} has model.kind=bert, which does not generate text: use a run of a gpt or t5")
    ids = encode_spans(prompt, tokenizer) if kind == "t5" else tokenizer.encode(prompt)
    if not ids:
        raise UserError(f"the prompt has no tokens with the tokenizer {tokenizer.path}: use another prompt")
    bos = bos_of(trained.recipe, tokenizer)
    ids = ids if bos is None else [bos, *ids]
    if len(ids) > length:
        raise UserError(f"the prompt takes {len(ids)} tokens, which exceeds model.sequence_length={length}: shorten it")
    return ids


class _Printer:
    """Printer of samples, one after the other; the first unfinished sample is printed token by token."""

    def __init__(self, prompt: str, trained: Trained, ids: list[int], count: int):
        self._prompt = prompt
        self._end = trained.tokenizer.end_of_document
        self._streams = [TextStream(trained.tokenizer, ids) for _ in range(count)]
        self._texts = [""] * count  # not printed yet
        self._is_over = [False] * count
        self._current = 0
        self._begin()

    def add(self, drawn: list[int | None]) -> None:
        for number, token in enumerate(drawn):
            if token is not None:
                self._texts[number] += self._streams[number].add(token)
                if token == self._end:
                    self._finish(number)
        self._print()

    def close(self) -> None:
        for number, is_over in enumerate(self._is_over):
            if not is_over:
                self._finish(number)
        self._print()
        print(flush=True)

    def _finish(self, number: int) -> None:
        self._texts[number] += self._streams[number].close()
        self._is_over[number] = True

    def _print(self) -> None:
        """Print what is new of the current sample. While it has ended, begin the next one."""
        self._flush()
        while self._is_over[self._current] and self._current + 1 < len(self._streams):
            print()
            self._current += 1
            self._begin()
            self._flush()

    def _begin(self) -> None:
        _print_head(self._current, len(self._streams))
        print(self._prompt, end="", flush=True)

    def _flush(self) -> None:
        print(self._texts[self._current], end="", flush=True)
        self._texts[self._current] = ""


def _print_head(number: int, count: int) -> None:
    if count > 1:
        print(f"==> sample {number + 1} of {count} <==")


def _generated(
    arguments: argparse.Namespace, trained: Trained, prompt: str, ids: list[int], samples: list[list[int]]
) -> dict:
    tokenizer = trained.tokenizer
    values = []
    for tokens in samples:
        is_over = tokens[-1] == tokenizer.end_of_document
        sample: dict[str, Any] = {"finish": "end" if is_over else "length", "tokens": tokens}
        if trained.recipe.model.kind == "t5":
            spans = spans_of(tokens, tokenizer)
            sample |= {"spans": {str(number): text for number, text in spans.items()}, "text": fill(prompt, spans)}
        else:
            stream = TextStream(tokenizer, ids)
            sample["text"] = "".join(map(stream.add, tokens)) + stream.close()
        values.append(sample)
    return {
        "run": trained.name,
        "checkpoint": str(trained.checkpoint.path),
        "step": trained.checkpoint.step,
        "prompt": prompt,
        "prompt_tokens": ids,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
        "samples": values,
    }


def _evaluate(arguments: argparse.Namespace) -> int:
    runs = [open_run(path, arguments.step, arguments.tokenizer, arguments.imports) for path in arguments.runs]
    seen: set[Path] = set()
    for trained in runs:
        path = trained.checkpoint.path.resolve()
        if path in seen:
            raise UserError(f"{trained.checkpoint.path} is given twice")
        seen.add(path)
        if arguments.memory_length is not None and not trained.recipe.model.position.memory_length:
            raise UserError(
                f"--memory-length {arguments.memory_length} needs a model with memory; {trained.name} has "
                "position.memory_length=0"
            )
    options = (arguments.data, arguments.text_key, arguments.stride, arguments.max_sequences, arguments.format)
    data_of_runs = [report.open_data(trained, *options) for trained in runs]
    results = []
    with single_process() as processes:
        for trained, data in zip(runs, data_of_runs, strict=True):
            with _progress(trained.name, data.count) as on_progress:
                evaluation = evaluate_model(
                    load_model(trained, processes, drops=True),
                    trained.recipe,
                    data.samples,
                    streams=data.streams,
                    memory_length=arguments.memory_length,
                    byte_lengths=_byte_lengths(trained),
                    device=processes.device,
                    on_progress=on_progress,
                )
            results.append(report.RunEvaluation(trained, data, evaluation))
    if arguments.json:
        print(json.dumps(report.values(results), indent=1, allow_nan=False))
    else:
        print(report.text(results))
    return 0


def _byte_lengths(trained: Trained) -> np.ndarray | None:
    """Return the number of UTF-8 bytes of every token's text; None for a T5 or a BERT."""
    if trained.recipe.model.objective != "gpt":
        return None
    lengths = trained.tokenizer.byte_lengths
    return np.pad(lengths, (0, trained.recipe.model.vocab_size - len(lengths)))


@contextlib.contextmanager
def _progress(name: str, total: int | None) -> Iterator:
    """Show a progress bar if stderr is a terminal; yield a function that sets the number of sequences done."""
    if not sys.stderr.isatty():
        yield lambda sequences: None
        return
    console = require("rich.console", "pretrain", "the progress bar")
    rich = require("rich.progress", "pretrain", "the progress bar")
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("sequences"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console.Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda sequences: progress.update(task, completed=sequences)
