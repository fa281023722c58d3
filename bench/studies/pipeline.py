"""``python -m bench pipeline``: the share of a step in which pipeline stages wait, against (p - 1) / (m + p - 1).

A GPT with experts in p stages of one thread each runs m micro batches forward and backward, on the 1F1B and on the
fill-drain (GPipe) schedule, without an optimizer step. A step of m micro batches takes ``(m + p - 1) * t`` if stages
are equal and sending is free; t is the time of one more micro batch, from the runs with the most and the fewest. The
measured share is ``1 - m * t / T(m)``, which includes the inequality of stages and the time of sending.
"""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch.distributed as dist

from bench import options, ranks, report
from bench.intervals import trimmed_mean_interval
from bench.samples import Tokens
from fmoe.errors import UserError
from pretrain.config import ModelConfig, ParallelConfig, Recipe, TrainConfig

SCHEDULES = ("1f1b", "gpipe")
LONGEST = 16  # micro batches, for t


def main(argv: Sequence[str]) -> None:
    parser = options.parser("pipeline", __doc__, rounds=10, warmup=2, has_seed=False)
    parser.add_argument("--stages", type=int, default=2, help="number of stages, p")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[2, 4, 8], help="numbers of micro batches, m")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--sequence-length", type=int, default=256)
    arguments = parser.parse_args(argv)
    if arguments.stages < 2 or arguments.layers % arguments.stages:
        raise UserError(f"--stages={arguments.stages} must be at least 2 and divide --layers={arguments.layers}")
    options.at_least(arguments, micro_batches=1, rounds=2, warmup=0)
    if max(arguments.micro_batches) >= LONGEST:
        raise UserError(f"--micro-batches={max(arguments.micro_batches)} must be below {LONGEST}")
    _recipe(arguments)  # raises UserError here instead of on a rank
    seconds = ranks.run(arguments.stages, measure, arguments)
    report.write_rows(seconds, "\n".join(table(seconds, arguments.stages)) + "\n", arguments.out, "pipeline")


def measure(arguments) -> dict[str, list[list[float]]]:
    """Return, on every rank, for each schedule a row per number of micro batches, `LONGEST` last: the number, and the
    slowest rank's seconds in each round.
    """
    for module in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=module)
    engines = _engines(arguments)
    numbers = [*sorted(set(arguments.micro_batches)), LONGEST]
    samples = Tokens(next(iter(engines.values())).recipe)
    found = {schedule: [[float(number)] for number in numbers] for schedule in engines}
    for turn in range(arguments.warmup + arguments.rounds):
        for index, number in enumerate(numbers):
            for schedule, engine in engines.items():
                for chunk in engine.model:
                    chunk.zero_grad_buffer()
                dist.barrier()
                begin = time.perf_counter()
                engine.accumulate(samples, 0, number, 0)
                seconds = ranks.slowest(time.perf_counter() - begin)
                if turn >= arguments.warmup:
                    found[schedule][index].append(seconds)
    return found


def _recipe(arguments) -> Recipe:
    recipe = Recipe(
        model=ModelConfig(
            num_layers=arguments.layers,
            hidden_size=arguments.hidden_size,
            ffn_hidden_size=4 * arguments.hidden_size,
            sequence_length=arguments.sequence_length,
            vocab_size=256,  # small, so that the output layer makes the last stage little longer
        ),
        parallel=ParallelConfig(pipeline=arguments.stages),
        train=TrainConfig(micro_batch=1, global_batch=LONGEST),
    )
    recipe.check()
    return recipe


def _engines(arguments) -> dict:
    recipe = _recipe(arguments)
    processes = ranks.start_parallel(recipe)
    from pretrain.engine import Engine

    return {
        schedule: Engine(replace(recipe, parallel=replace(recipe.parallel, schedule=schedule)), processes)
        for schedule in SCHEDULES
    }


def bubbles(rows: Sequence[Sequence[float]], index: int) -> list[float]:
    """Return the measured share in each round, for the ``index``-th number of micro batches."""
    (first, *shortest) = rows[0]
    (last, *longest) = rows[-1]
    # t from all rounds: that of one would bring its noise into all shares.
    t = median((b - a) / (last - first) for a, b in zip(shortest, longest, strict=True))
    number, *seconds = rows[index]
    return [1 - number * t / took for took in seconds]


def table(seconds: dict[str, list[list[float]]], stages: int) -> list[str]:
    """Return Markdown: for each schedule and number of micro batches, the measured share, the formula, and their
    ratio.
    """
    lines = ["| schedule | p | m | ms per step | share waiting, 95% interval | (p - 1) / (m + p - 1) | ratio |"]
    lines.append("|---|---|---|---|---|---|---|")
    ratios = []
    for schedule, rows in seconds.items():
        for index, (number, *took) in enumerate(rows[:-1]):
            share = trimmed_mean_interval([bubbles(rows, index)])
            formula = (stages - 1) / (number + stages - 1)
            ratios.append(share.estimate / formula)
            lines.append(
                f"| {schedule} | {stages} | {number:.0f} | {1e3 * median(took):.1f} | {share} | {formula:.3f} "
                f"| {ratios[-1]:.2f} |"
            )
    mean = math.exp(sum(math.log(max(r, 1e-9)) for r in ratios) / len(ratios))
    return [*lines, "", f"measured over (p - 1) / (m + p - 1), geometric mean of {len(ratios)}: {mean:.2f}"]
