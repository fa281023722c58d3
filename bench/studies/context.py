"""``python -m bench context``: a step over long sequences on P ranks, divided by sequences, heads or tokens.

A GPT with experts trains on the same P sequences, one per micro batch, in P processes of one thread each: each rank
with its own sequence (data), with its heads (tensor), or with its slice of every sequence (context). The time is
that of the forward and backward passes on the slowest rank, without the optimizer. "Kept" is the memory that autograd
holds for one micro batch at the end of its forward pass, without parameters. Splits are timed one after the other, not
in common rounds.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch.distributed as dist

from bench import options, ranks, report

SPLITS = ("data", "tensor", "context")
HEAD_WIDTH = 32


@dataclass(frozen=True)
class Row:
    """A split at a sequence length.

    Attributes:
        kept: bytes that autograd holds, on the rank that holds the most.
        seconds: time of each round, on the slowest rank.
    """

    split: str
    length: int
    kept: float
    seconds: Sequence[float]


def main(argv: Sequence[str]) -> None:
    parser = options.parser("context", __doc__, rounds=10, warmup=2, has_seed=False)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks P")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048], help="tokens per sequence")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    arguments = parser.parse_args(argv)
    options.at_least(arguments, ranks=2, rounds=2, warmup=0)
    for split in arguments.splits:
        for length in arguments.lengths:
            recipe_of(arguments, split, length)
    rows = [Row(**row) for split in arguments.splits for row in ranks.run(arguments.ranks, measure, arguments, split)]
    report.write_rows([asdict(row) for row in rows], "\n".join(table(rows)) + "\n", arguments.out, "context")


def recipe_of(arguments: Any, split: str, length: int):
    """Return the recipe of a split; raise UserError for an invalid one."""
    from pretrain.config import AttentionConfig, DataConfig, ModelConfig, ParallelConfig, Recipe, TrainConfig

    recipe = Recipe(
        model=ModelConfig(
            num_layers=arguments.layers,
            hidden_size=arguments.hidden_size,
            ffn_hidden_size=2 * arguments.hidden_size,
            sequence_length=length,
            vocab_size=256,
            attention=AttentionConfig(num_heads=max(arguments.hidden_size // HEAD_WIDTH, 1)),
        ),
        data=DataConfig(train=("made-up",)),
        parallel=ParallelConfig(**{split: arguments.ranks}),
        train=TrainConfig(micro_batch=1, global_batch=arguments.ranks, validation_sequences=arguments.ranks),
    )
    recipe.check()
    return recipe


def measure(arguments: Any, split: str) -> list[dict[str, Any]]:
    """Return, on every rank, the fields of a `Row` for each length."""
    recipes = [recipe_of(arguments, split, length) for length in arguments.lengths]
    processes = ranks.start_parallel(recipes[0])
    from bench.samples import Tokens
    from bench.studies.recompute import kept_bytes
    from pretrain.engine import Engine

    rows = []
    for recipe in recipes:
        engine = Engine(recipe, processes)
        samples = Tokens(recipe)
        kept = ranks.slowest(kept_bytes(engine, samples))  # the largest of all ranks
        seconds = []
        for turn in range(arguments.warmup + arguments.rounds):
            dist.barrier()
            begin = time.perf_counter()
            engine.backward(0, samples)
            took = ranks.slowest(time.perf_counter() - begin)
            engine.routing()
            if turn >= arguments.warmup:
                seconds.append(took)
        rows.append({"split": split, "length": recipe.model.sequence_length, "kept": kept, "seconds": seconds})
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """Return Markdown: a row per length and split, with the bytes kept relative to the first split at that length."""
    lines = ["| tokens | split | ms per step | kept per rank, MB | of the first |", "|---|---|---|---|---|"]
    for length in sorted({row.length for row in rows}):
        of_length = [row for row in rows if row.length == length]
        lines += [
            f"| {length} | {row.split} | {1e3 * median(row.seconds):.1f} | {row.kept / 1e6:.2f} "
            f"| {row.kept / of_length[0].kept:.1%} |"
            for row in of_length
        ]
    return lines
