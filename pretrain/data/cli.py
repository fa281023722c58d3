"""``fmoe data``: from text to tokens on disk, one command per step."""

import argparse
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fmoe.cli import Parser
from fmoe.errors import UserError, printable
from pretrain.data.corpus import CORPORA, SPLITS, example_folder, split_paths
from pretrain.data.indexed import IndexedCorpus, corpus_paths
from pretrain.data.prepare import prepare
from pretrain.data.sources import FORMATS
from pretrain.data.streams import STOPPING_STRATEGIES, Dataset, Mixture, parse_dataset
from pretrain.data.tokenizers import (
    DEFAULT_MAX_BYTES,
    DEFAULT_VOCAB_SIZE,
    MODEL_TYPES,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from pretrain.files import refuse_existing
from pretrain.formats import size_text

INPUTS = """\
INPUT is a .txt file (one document, of any size), .jsonl or .ndjson (one document per line), .json (the same, or one
array of objects), any of these compressed (.gz, .zst), .parquet (one document per row), a folder saved by Hugging Face
datasets, or a folder with any of these files below it. --format sets the format of files with other suffixes."""
_DATASETS = """\
In place of INPUT, --dataset streams Hugging Face datasets: a Hub id (owner/name), a folder, or a builder (json,
parquet, csv, text, ...) with --data-files. Give --split, --columns and --data-files once for all datasets, or once for
each --dataset, in the same order. Several datasets are read one after the other, or interleaved by --weights."""
_TOKENIZER = "sentencepiece model, or a tokenizer.json of Hugging Face tokenizers"
_SHOWN_TOKENS = 64


def main(argv: list[str] | None = None) -> int:
    """Run ``fmoe data`` with the arguments ``argv``, or with the command line's if it is None."""
    arguments = _parser().parse_args(argv)
    arguments.run(arguments)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fmoe data",
        allow_abbrev=False,
        description="Prepare training data: train a tokenizer on text, then convert text to token files.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=textwrap.dedent("""\
            example, from source files to tokens, as fmoe data example does it:
              fmoe data corpus --out data/pylib/out
              fmoe data tokenizer data/pylib/out/train.jsonl --out data/pylib/out/tokenizer.model
              fmoe data prepare data/pylib/out/train.jsonl --tokenizer data/pylib/out/tokenizer.model \\
                  --out data/pylib/out/train
              fmoe data show data/pylib/out/train --tokenizer data/pylib/out/tokenizer.model
            """),
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    corpus = _command(
        commands,
        "corpus",
        _corpus,
        "write a corpus from files of this machine",
        "Write train.jsonl, validation.jsonl and test.jsonl; nothing is downloaded. pylib has the sources of this\n"
        "Python's standard library; docs has English documentation of installed packages, of Python and of Debian.",
        "fmoe data corpus --out data/pylib/out",
    )
    _add_name(corpus)
    corpus.add_argument("--out", type=path_argument, required=True, metavar="DIR", help="folder for the three files")

    example = _command(
        commands,
        "example",
        _example,
        "make the corpus of the recipe quickstart, or another example",
        "Write text (like fmoe data corpus), a tokenizer of 2,048 pieces and the tokens of three splits.\n"
        "A step whose outputs exist is skipped; delete the folder to start anew.",
        "fmoe data example && fmoe train quickstart",
        can_overwrite=False,
    )
    _add_name(example)
    example.add_argument(
        "--out", type=path_argument, metavar="DIR", help="folder for all files (default: data/NAME/out)"
    )

    tokenizer = _command(
        commands,
        "tokenizer",
        _tokenizer,
        "train a tokenizer",
        "Train a tokenizer that decodes every text exactly: a sentencepiece model or, if FILE ends in .json, the\n"
        f"tokenizer.json of Hugging Face tokenizers (byte-level BPE).\n\n{INPUTS}\n\n{_DATASETS}",
        "fmoe data tokenizer wiki.jsonl books/ --out tokenizer.model --vocab-size 32000",
    )
    _add_inputs(tokenizer)
    _add_datasets(tokenizer)
    tokenizer.add_argument(
        "--out", type=path_argument, required=True, metavar="FILE", help="the model file to write, e.g. x.model, x.json"
    )
    tokenizer.add_argument("--vocab-size", type=int, help=f"total number of pieces (default: {DEFAULT_VOCAB_SIZE})")
    tokenizer.add_argument(
        "--model-type",
        default="bpe",
        choices=MODEL_TYPES,
        help="bytes: one token per byte, no sentinels unless set; needs --out x.json, no INPUT (default: %(default)s)",
    )
    tokenizer.add_argument(
        "--sentinels", type=int, help="number of <extra_id_N> for T5 (default: 1/64 of the vocabulary, at most 100)"
    )
    tokenizer.add_argument(
        "--max-bytes",
        type=int,
        default=DEFAULT_MAX_BYTES,
        help="size of the training sample in bytes; its lines are spread evenly over the text (default: %(default)s)",
    )
    tokenizer.add_argument(
        "--character-coverage",
        type=float,
        default=0.9999,
        help="share of characters with their own piece, sentencepiece only (default: %(default)s)",
    )

    prepared = _command(
        commands,
        "prepare",
        _prepare,
        "tokenize text or conversations into PREFIX.bin, PREFIX.idx and PREFIX.json",
        f"Write Megatron's indexed format, and a description next to it.\n\n{INPUTS}\n\n{_DATASETS}",
        "fmoe data prepare train.jsonl --tokenizer tokenizer.model --out out/train\n"
        "  fmoe data prepare chats.jsonl --chat --tokenizer runs/mixtral/tokenizer/tokenizer.json --out out/chats\n"
        "  fmoe data prepare --dataset owner/name:config --split train --columns text --tokenizer t.json --out out/a",
    )
    _add_inputs(prepared)
    _add_datasets(prepared)
    prepared.add_argument("--tokenizer", type=path_argument, required=True, metavar="FILE", help=_TOKENIZER)
    prepared.add_argument(
        "--out", type=path_argument, required=True, metavar="PREFIX", help="output path without suffix"
    )
    prepared.add_argument(
        "--bos",
        action="store_true",
        help="begin each document with the tokenizer's BOS token, for recipes with data.bos=true",
    )
    prepared.add_argument(
        "--chat",
        action="store_true",
        help="rows are conversations, with messages, or with prompt and completion (or answer), for recipes with "
        "data.chat=true; the tokenizer's chat template is applied to messages",
    )
    prepared.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="with --chat: a conversation whose first answer begins after N tokens is unreadable (default: no limit)",
    )
    prepared.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of processes (default: one per available processor, fewer for little text)",
    )

    show = _command(
        commands,
        "show",
        _show,
        "check a corpus and print its counts",
        "Check a corpus and print its counts; with a tokenizer, also print the first documents as text.",
        "fmoe data show out/train --tokenizer out/tokenizer.model --documents 5",
        can_overwrite=False,
    )
    show.add_argument("prefix", type=path_argument, metavar="PREFIX", help="path of the corpus without .bin")
    show.add_argument("--tokenizer", type=path_argument, metavar="FILE", help="tokenizer of the corpus")
    show.add_argument(
        "--documents", type=int, default=3, metavar="N", help="documents that --tokenizer shows (default: %(default)s)"
    )
    show.add_argument("--verify", action="store_true", help="read all tokens and check them against their checksum")
    return parser


def _command(
    commands: "argparse._SubParsersAction[Parser]",
    name: str,
    run: Callable[[argparse.Namespace], None],
    summary: str,
    description: str,
    example: str,
    *,
    can_overwrite: bool = True,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=("examples" if "\n" in example else "example") + f":\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if can_overwrite:
        parser.add_argument("--overwrite", action="store_true", help="replace existing outputs")
    parser.set_defaults(run=run)
    return parser


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", default="pylib", choices=CORPORA, metavar="NAME", help="pylib (default) or docs"
    )


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="*", type=path_argument, metavar="INPUT", help="file or folder to read")
    parser.add_argument(
        "--text-key", default="text", help="JSON key or column that holds the text (default: %(default)s)"
    )
    add_format(parser)
    parser.add_argument(
        "--on-error",
        default="stop",
        choices=("stop", "skip"),
        help="reaction to an unreadable document: invalid UTF-8 or JSON, or no text (default: %(default)s)",
    )


def _add_datasets(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Hugging Face datasets")
    group.add_argument(
        "--dataset",
        action="append",
        default=[],
        metavar="NAME[:CONFIG][@REVISION]",
        help="Hub id, folder or builder; repeat the option for several datasets",
    )
    group.add_argument("--split", action="append", metavar="SPLIT", help="split to read (default: train)")
    group.add_argument(
        "--columns", action="append", nargs="+", metavar="COLUMN", help="columns with text, joined (default: text)"
    )
    group.add_argument(
        "--data-files", action="append", nargs="*", metavar="FILE", help="files or patterns that make up the split"
    )
    group.add_argument("--separator", metavar="TEXT", help="text between joined columns (default: an empty line)")
    group.add_argument(
        "--weights",
        nargs="+",
        type=float,
        metavar="P",
        help="probabilities with sum 1: interleave the datasets (default: one after the other)",
    )
    group.add_argument("--seed", type=int, help=f"seed of the interleaving (default: {Mixture.seed})")
    group.add_argument(
        "--stopping-strategy",
        choices=STOPPING_STRATEGIES,
        help=f"end of the interleaving; all_exhausted repeats shorter datasets (default: {Mixture.stopping_strategy})",
    )
    group.add_argument("--max-documents", type=int, metavar="N", help="read only the first N rows")


def _inputs(arguments: argparse.Namespace) -> list[Path] | Mixture:
    """Return the INPUT paths, or the `Mixture` of ``--dataset``; raise UserError if options conflict."""
    names = arguments.dataset
    paths = arguments.inputs
    keys = ("split", "columns", "data_files", "separator", "weights", "seed", "stopping_strategy", "max_documents")
    options = {key: getattr(arguments, key) for key in keys if getattr(arguments, key) is not None}
    if not names:
        if options:
            raise UserError(f"{_option(next(iter(options)))} needs --dataset")
        return paths
    if paths:
        raise UserError(f"--dataset {names[0]} and INPUT {paths[0]} are mutually exclusive: pass one or the other")
    if arguments.text_key != "text":
        raise UserError(f"--text-key {arguments.text_key} applies only to INPUT: with --dataset, pass --columns")
    if arguments.format != "auto":
        raise UserError(f"--format {arguments.format} applies only to INPUT: omit it with --dataset")
    datasets = [Dataset(*parse_dataset(name)) for name in names]
    for key in ("split", "columns", "data_files"):
        values = options.pop(key, None)
        if values is None:
            continue
        if len(values) not in (1, len(names)):
            raise UserError(
                f"{_option(key)} is given {len(values)} times for {len(names)} --dataset: give it once, or once for "
                "each"
            )
        for number, dataset in enumerate(datasets):
            value = values[number % len(values)]
            field: Any = value if key == "split" else tuple(value)
            datasets[number] = replace(dataset, **{key: field})
    if "weights" in options:
        options["weights"] = tuple(options["weights"])
    return Mixture(tuple(datasets), **options)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--format`` to a parser."""
    parser.add_argument(
        "--format",
        default="auto",
        choices=FORMATS,
        help="format of all files; bytes are not decoded (default: auto, by each file's suffix)",
    )


def path_argument(text: str) -> Path:
    """Convert a command line argument to a path; raise ArgumentTypeError if it is empty."""
    if not text:  # from an unset shell variable; Path would read it as the current folder
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def _corpus(arguments: argparse.Namespace) -> None:
    refuse_existing(split_paths(arguments.out).values(), arguments.overwrite)
    for split in CORPORA[arguments.name](arguments.out).values():
        skipped = f", skipped {split.skipped} files that are not UTF-8" if split.skipped else ""
        size = size_text(split.text_bytes)
        print(f"{_shown(split.path)}: {split.documents:,} documents, {size} of text{skipped}")


def _example(arguments: argparse.Namespace) -> None:
    out = arguments.out or example_folder(arguments.name)
    model = out / "tokenizer.model"
    # A step puts its outputs in place when they are complete. Of several outputs, this is the last.
    steps: list[tuple[Path, list[str | Path]]] = [
        (out / "test.jsonl", ["corpus", arguments.name, "--out", out]),
        (model, ["tokenizer", out / "train.jsonl", "--out", model, "--vocab-size", "2048"]),
    ]
    for split in SPLITS:
        text = out / f"{split}.jsonl"
        steps.append((out / f"{split}.idx", ["prepare", text, "--tokenizer", model, "--out", out / split]))
    for output, argv in steps:
        if not output.exists():
            main([*map(str, argv), "--overwrite"])
    print(f"{_shown(out)} is complete")


def _tokenizer(arguments: argparse.Namespace) -> None:
    refuse_existing([arguments.out], arguments.overwrite, arguments.inputs)
    tokenizer = train_tokenizer(
        _inputs(arguments),
        arguments.out,
        arguments.vocab_size,
        arguments.model_type,
        arguments.max_bytes,
        text_key=arguments.text_key,
        sentinels=arguments.sentinels,
        character_coverage=arguments.character_coverage,
        format=arguments.format,
        skip_errors=arguments.on_error == "skip",
    )
    size = size_text(tokenizer.path.stat().st_size)
    print(f"{_shown(tokenizer.path)}: {tokenizer.vocab_size:,} pieces, {len(tokenizer.sentinels)} sentinels, {size}")


def _prepare(arguments: argparse.Namespace) -> None:
    inputs = _inputs(arguments)
    if not inputs:
        raise UserError("no input: pass at least one file or folder as INPUT, or --dataset")
    if arguments.chat:
        for name, default in (("text_key", "text"), ("columns", None), ("separator", None)):
            value = getattr(arguments, name)
            if value != default:
                raise UserError(f"{_option(name)} {value} applies to text: omit it with --chat")
    elif arguments.sequence_length is not None:
        raise UserError(f"--sequence-length {arguments.sequence_length} needs --chat")
    refuse_existing(corpus_paths(arguments.out), arguments.overwrite, [*arguments.inputs, arguments.tokenizer])
    done = prepare(
        inputs,
        arguments.tokenizer,
        arguments.out,
        text_key=arguments.text_key,
        num_workers=arguments.workers,
        progress=True,
        format=arguments.format,
        skip_errors=arguments.on_error == "skip",
        bos=arguments.bos,
        chat=arguments.chat,
        sequence_length=arguments.sequence_length,
    )
    answers = "" if done.answer_tokens is None else f" ({done.answer_tokens:,} of answers)"
    empty = f", {done.empty_documents:,} empty documents skipped" if done.empty_documents else ""
    print(
        f"{done.documents:,} documents, {done.tokens:,} tokens{answers}, {size_text(done.text_bytes)} of text "
        f"({done.text_bytes / done.tokens:.2f} bytes per token){empty}"
    )
    if done.skipped:
        lines = [f"{done.skipped:,} documents skipped:", *done.first_skipped]
        unlisted = done.skipped - len(done.first_skipped)
        if unlisted:
            lines.append(f"and {unlisted:,} more")
        print("\n  ".join(lines))
    for path in done.paths:
        print(f"{_shown(path)}: {size_text(path.stat().st_size)}")


def _show(arguments: argparse.Namespace) -> None:
    corpus = IndexedCorpus(arguments.prefix)
    size = f"{corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens"
    print(f"{_shown(corpus.prefix)}: {size} of {corpus.dtype.name}")
    if corpus.num_documents:
        least, half, most = np.quantile(corpus.lengths, [0, 0.5, 1], method="lower")
        print(f"tokens per document: minimum {least:,}, median {half:,}, maximum {most:,}")
    counts = corpus.counts
    if counts is not None and counts.unigrams is not None:
        print(f"token ids: {np.count_nonzero(counts.unigrams):,} distinct, the largest is {counts.largest:,}")
    for dataset in corpus.description.get("mixture", {}).get("datasets", ()):
        print(f"dataset: {dataset}")
    if "chat" in corpus.description:
        print(f"conversations: {corpus.description['chat']['answer_tokens']:,} tokens are of answers")
    for key in ("tokenizer", "text_bytes", "empty_documents", "skipped_documents", "fmoe"):
        if key in corpus.description:
            print(f"{key}: {corpus.description[key]}")
    if arguments.verify:
        corpus.verify()
        print("checksum: correct")
    if arguments.tokenizer is not None:
        _show_documents(corpus, load_tokenizer(arguments.tokenizer), arguments.documents)


def _show_documents(corpus: IndexedCorpus, tokenizer: Tokenizer, count: int) -> None:
    expected = corpus.tokenizer_fingerprint
    if expected not in (None, tokenizer.fingerprint):
        raise UserError(
            f"{corpus.prefix} was prepared with another tokenizer than {tokenizer.path}: pass the file with SHA-256 "
            f"{expected}, not {tokenizer.fingerprint}"
        )
    for i in range(min(count, corpus.num_documents)):
        tokens = corpus.document(i)
        dots = "..." if len(tokens) > _SHOWN_TOKENS else ""
        # repr: the terminal must not interpret control characters of a document
        print(f"document {i}, {len(tokens):,} tokens: {tokenizer.decode(tokens[:_SHOWN_TOKENS])!r}{dots}")


def _shown(path: Path) -> str:
    return printable(str(path))
