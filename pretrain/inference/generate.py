"""Texts of a trained model: ``fmoe generate``."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from fmoe.cli import drop_output
from fmoe.errors import UserError
from fmoe.runtime import launcher
from pretrain.config import ParallelConfig
from pretrain.data.opening import bos_of
from pretrain.data.sources import refuse_other_encoding
from pretrain.inference import decoding
from pretrain.inference.load import Trained, load_model, open_run, process_groups, start_ranks
from pretrain.inference.sampling import Sampling
from pretrain.inference.text import TextStream, answer, encode_spans, spans_of
from pretrain.start.process import Processes


def run(arguments: argparse.Namespace, parallel: ParallelConfig, argv: Sequence[str]) -> int:
    """Print the prompt and the model's continuation, on rank 0.

    Args:
        arguments: those of `pretrain.inference.cli.generate`, parsed from ``argv``.
        parallel: the split of the model.
    """
    try:
        sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    except UserError as error:
        name, reason = str(error).split("=", 1)
        raise UserError(f"--{name.replace('_', '-')} {reason}") from None
    prompt = _prompt(arguments.prompt)
    trained = open_run(arguments.run, arguments.step, arguments.tokenizer, arguments.imports, parallel)
    ids = _prompt_ids(prompt, trained)
    is_t5 = trained.recipe.model.kind == "t5"
    if is_t5 and parallel.pipeline > 1:
        raise UserError(f"--parallel.pipeline={parallel.pipeline} must be 1 to generate with model.kind=t5")
    code = start_ranks(["generate", *argv, f"--prompt={prompt}"], parallel)
    if code is not None:
        return code
    with process_groups(parallel, arguments.seed) as processes:
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
        streams = processes.is_main and not (arguments.json or is_t5)
        printer = _Printer(prompt, trained, ids, arguments.num_samples) if streams else None
        samples: list[list[int]] = [[] for _ in range(arguments.num_samples)]
        for drawn in steps:
            for sample, token in zip(samples, drawn, strict=True):
                if token is not None:
                    sample.append(token)
            if printer is not None:
                try:
                    printer.add(drawn)
                except BrokenPipeError:
                    if processes.world_size == 1:
                        raise
                    drop_output()  # this rank goes on, because the others need it
    if not processes.is_main:
        return 0
    if printer is not None:
        printer.close()
    elif arguments.json:
        print(json.dumps(_generated(arguments, trained, prompt, ids, samples), indent=1, ensure_ascii=False))
    else:
        for number, tokens in enumerate(samples):
            _print_head(number, len(samples))
            print(answer(prompt, tokens, trained.tokenizer))
    return 0


def _decoder(
    arguments: argparse.Namespace, trained: Trained, ids: list[int], processes: Processes
) -> tuple[decoding.Decoder, list[int], int]:
    """Load the model. Return its decoder, the tokens that it begins with, and the maximum number of new ones."""
    model = trained.recipe.model
    position = model.position
    if position.memory_length and arguments.no_cache:
        raise UserError(f"--no-cache is not supported with position.memory_length={position.memory_length}")
    module = load_model(trained, processes, drops=False)
    if model.kind == "t5":
        inputs = torch.tensor([ids], device=processes.device, dtype=torch.int64)
        # Learned positions, if the model has any, end there.
        max_tokens = min(arguments.max_tokens, max(model.sequence_length, trained.recipe.decoder_length))
        return decoding.T5Decoder(module, inputs, arguments.num_samples), [trained.tokenizer.role("pad")], max_tokens
    if position.memory_length:
        return decoding.MemoryDecoder(module, position.memory_length), ids, arguments.max_tokens
    keeps = not arguments.no_cache and position.encoding != "transformer_xl"
    return decoding.GPTDecoder(module, model.sequence_length, keeps=keeps), ids, arguments.max_tokens


def _prompt(text: str | None) -> str:
    if text is None:
        if launcher.world_size() > 1:
            raise UserError("no prompt: pass --prompt TEXT, because the ranks share standard input")
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
    if kind in ("bert", "classifier"):
        raise UserError(f"{trained.name} has model.kind={kind}, which does not generate text: use a run of a gpt or t5")
    if tokenizer is None:
        raise UserError(f"{trained.name} has data.tokenizer=, without which there is no text to generate")
    if kind == "t5":
        # A source of samples may train on texts without spans, such as sentences to translate.
        ids = encode_spans(prompt, tokenizer, needs_spans=trained.recipe.data.samples is None)
    else:
        ids = tokenizer.encode(prompt)
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
            sample["spans"] = {str(number): text for number, text in spans.items()}
            sample["text"] = answer(prompt, tokens, tokenizer)
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
