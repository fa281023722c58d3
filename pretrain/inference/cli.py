"""Command lines of ``fmoe generate`` and ``fmoe evaluate``."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from fmoe.cli import Parser, drop_output
from fmoe.errors import UserError
from pretrain.config import ParallelConfig, build_recipe
from pretrain.data.cli import INPUTS, add_format, path_argument

_RUN = "folder of a run or of one of its checkpoints"
# Sizes of [parallel] that are options of both commands, with their help.
_SPLIT = {
    "expert": "number of ranks among which the experts of a layer are divided",
    "tensor": "number of ranks among which attention heads, dense blocks and vocabulary are divided",
    "pipeline": "number of ranks among which the layers are divided",
    "expert_tensor": "slices of each expert: 1, or as many as --parallel.tensor",
}


def generate(argv: list[str]) -> int:
    """Print the prompt and the model's continuation; see docs/inference.md.

    Raises:
        UserError: there is no checkpoint, the tokenizer is not the run's, or the prompt or a value is invalid.
    """
    arguments = _generate_parser().parse_args(argv)
    _require_positive(arguments, "max_tokens", "num_samples")
    parallel = _split_of(arguments)
    if parallel.data > 1 and not parallel.is_fully_sharded:
        raise UserError(
            f"--parallel.data {parallel.data} needs --parallel.shard parameters: copies of the model would generate "
            "the same texts"
        )
    from pretrain.inference.generate import run  # imports torch and megatron-core: help and wrong options need neither

    return _on_rank(lambda: run(arguments, parallel, argv))


def _generate_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fmoe generate",
        description="Continue a text with a GPT, or fill in the spans <extra_id_0>, <extra_id_1>, ... of a text with "
        "a T5. A T5 trained on a source of samples, such as sentence pairs, also answers a text without spans. Runs in "
        "one process, or in as many as the --parallel options need, on GPUs if there are any. The checkpoint may come "
        "from any number of processes.",
        epilog='example: fmoe generate runs/quickstart --prompt "def main(" --max-tokens 200 --top-p 0.9',
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help=_RUN)
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue or fill in (default: read standard input)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest complete one)")
    parser.add_argument(
        "--max-tokens", type=int, default=200, metavar="N", help="maximum number of new tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
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
    _add_split(parser, "ranks that each compute all texts, with parts of the parameters")
    return parser


def evaluate(argv: list[str]) -> int:
    """Print how well models predict text; see docs/inference.md.

    Raises:
        UserError: there is no checkpoint, the tokenizer is not the run's, or the data are unreadable.
    """
    parser = Parser(
        prog="fmoe evaluate",
        description="Print loss, perplexity, accuracy and bits per byte of models, and the load of their experts, on "
        "the\nvalidation data of each run, or on the text given by --data. Runs in one process, or in as many as the "
        f"\n--parallel options need.\n\n{INPUTS}",
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
    _add_split(parser, "copies of the model, among which the sequences are divided")
    arguments = parser.parse_args(argv)
    _require_positive(arguments, "max_sequences", "stride", "memory_length")
    if arguments.stride is not None and arguments.data is None:
        raise UserError(
            f"--stride {arguments.stride} needs --data: a stride does not apply to the run's own validation data"
        )
    parallel = _split_of(arguments)
    # Imports torch and megatron-core.
    import megatron_patch  # noqa: F401 - first: it silences the warnings of megatron-core's imports
    from pretrain.inference.evaluate import run

    return _on_rank(lambda: run(arguments, parallel, argv))


def _add_common(parser: argparse.ArgumentParser, json_help: str) -> None:
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="new location of the run's data.tokenizer")
    parser.add_argument(
        "--imports",
        nargs="+",
        metavar="FILE_OR_MODULE",
        help="files or modules to import in place of the run's run.imports, e.g. because its files have moved",
    )
    parser.add_argument("--json", action="store_true", help=json_help)


def _on_rank(command: Callable[[], int]) -> int:
    """Call ``command`` as a rank of its launcher, or alone; return the exit code."""
    from pretrain.start.process import run_rank  # imports torch

    def work() -> int:
        try:
            code = command()
            if sys.stdout is not None:  # as in `fmoe.cli.run`
                sys.stdout.flush()
            return code
        except BrokenPipeError:  # the reader of the output has closed it
            drop_output()
            return 0

    return run_rank(work)


def _add_split(parser: argparse.ArgumentParser, data_help: str) -> None:
    for key, text in (_SPLIT | {"data": data_help}).items():
        option = f"--parallel.{key.replace('_', '-')}"
        parser.add_argument(option, dest=f"parallel.{key}", type=int, default=1, metavar="N", help=text)
    parser.add_argument(
        "--parallel.shard",
        choices=("none", "parameters"),
        default="none",
        help="parameters: the ranks that hold the same parameters keep a part each, and gather one layer at a time",
    )


def _split_of(arguments: argparse.Namespace) -> ParallelConfig:
    values = {key: value for key, value in vars(arguments).items() if key.startswith("parallel.")}
    keys = {key.removeprefix("parallel."): value for key, value in values.items()}
    # Activations are not kept, so that cutting them along the sequence, which must be divisible, saves little.
    return build_recipe({"parallel": {**keys, "sequence": False}}).parallel


def _require_positive(arguments: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1")
