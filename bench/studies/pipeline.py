"""``python -m bench pipeline``: the share of a step in which pipeline stages wait, against theory.

A GPT with experts in p stages of one thread each runs m micro batches forward and backward, on each schedule, without
an optimizer step. A step of m micro batches takes ``(m + p - 1) * t`` on 1F1B if stages are equal and sending is free;
t is the time of one more micro batch, from the runs with the most and the fewest. The measured share is
``1 - m * t / T(m)``, which includes the inequality of stages and the time of sending.

With ``--sleep``, every layer also sleeps in its forward pass, for the gradient of its input and for those of its
weights. Sleeping needs no core, so that more stages than cores can be measured: real schedules and messages, but work
of a known duration instead of computation. The formula of the zero-bubble schedule is for these three equal times.
"""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import options, ranks, report
from bench.intervals import trimmed_mean_interval
from bench.samples import Tokens
from fmoe.errors import UserError
from fmoe.runtime.deferral import deferrable
from pretrain.config import ModelConfig, ParallelConfig, Recipe, TrainConfig

CHUNKS = 2  # per stage, on the interleaved schedule
SCHEDULES: dict[str, dict[str, Any]] = {  # options of [parallel]
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"virtual_pipeline": CHUNKS},
    "zero_bubble": {"schedule": "zero_bubble"},
}
LONGEST = 16  # micro batches, for t


def main(argv: Sequence[str]) -> None:
    parser = options.parser("pipeline", __doc__, rounds=10, warmup=2, has_seed=False)
    parser.add_argument("--stages", type=int, default=2, help="number of stages, p")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[2, 4, 8], help="numbers of micro batches, m")
    parser.add_argument("--schedules", nargs="+", choices=tuple(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--layers", type=int, help=f"default: {CHUNKS} per stage")
    parser.add_argument("--hidden-size", type=int, help="default: 192, or 48 with --sleep")
    parser.add_argument("--sequence-length", type=int, help="default: 256, or 16 with --sleep")
    parser.add_argument("--sleep", type=float, default=0.0, help="ms per layer for each of three passes")
    arguments = parser.parse_args(argv)
    arguments.layers = arguments.layers or CHUNKS * arguments.stages
    arguments.hidden_size = arguments.hidden_size or (48 if arguments.sleep else 192)
    arguments.sequence_length = arguments.sequence_length or (16 if arguments.sleep else 256)
    chunks = arguments.stages * (CHUNKS if "interleaved" in arguments.schedules else 1)
    if arguments.stages < 2 or arguments.layers % chunks:
        raise UserError(
            f"--stages={arguments.stages} must be at least 2, and {chunks} divide --layers={arguments.layers}"
        )
    options.at_least(arguments, micro_batches=1, rounds=2, warmup=0, sleep=0)
    if max(arguments.micro_batches) >= LONGEST:
        raise UserError(f"--micro-batches={max(arguments.micro_batches)} must be below {LONGEST}")
    _recipe(arguments)  # raises UserError here instead of on a rank
    # Megatron-core divides all models of a process into the same number of chunks.
    flat = [schedule for schedule in arguments.schedules if schedule != "interleaved"]
    seconds = {}
    for schedules in (flat, [schedule for schedule in arguments.schedules if schedule not in flat]):
        if schedules:
            arguments.schedules = schedules
            seconds |= ranks.run(arguments.stages, measure, arguments)
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
    rows = {
        # Megatron-core's interleaved schedule needs a multiple of the number of stages.
        schedule: {n: [float(n)] for n in numbers if schedule != "interleaved" or n % arguments.stages == 0}
        for schedule in engines
    }
    for turn in range(arguments.warmup + arguments.rounds):
        for number in numbers:
            for schedule, engine in engines.items():
                if number not in rows[schedule]:
                    continue
                for chunk in engine.model:
                    chunk.zero_grad_buffer()
                dist.barrier()
                begin = time.perf_counter()
                engine.accumulate(samples, 0, number, 0)
                seconds = ranks.slowest(time.perf_counter() - begin)
                if turn >= arguments.warmup:
                    rows[schedule][number].append(seconds)
    return {schedule: list(found.values()) for schedule, found in rows.items()}


class _Sleep(torch.autograd.Function):
    """The identity, which sleeps for as long in each of the three passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.is_deferrable = True
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    @deferrable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        time.sleep((needs_x + needs_weight) * ctx.seconds)
        return grad if needs_x else None, grad.new_zeros(1) if needs_weight else None, None


def _build_sleeping(seconds: float, recipe: Recipe, **stage: Any) -> nn.Module:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from pretrain.engine.model import build_model

    model = build_model(recipe, **stage)
    for layer in list(model.modules()):
        if isinstance(layer, TransformerLayer):
            layer.slept = nn.Parameter(torch.zeros(1))
            layer.register_forward_hook(
                lambda layer, _, output: (_Sleep.apply(output[0], layer.slept, seconds), *output[1:])
            )
    return model


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
    recipes = {
        schedule: replace(recipe, parallel=replace(recipe.parallel, **SCHEDULES[schedule]))
        for schedule in arguments.schedules
    }
    processes = ranks.start_parallel(next(iter(recipes.values())))
    from pretrain.engine import Engine

    build = {"build": partial(_build_sleeping, arguments.sleep / 1e3)} if arguments.sleep else {}
    return {schedule: Engine(chosen, processes, **build) for schedule, chosen in recipes.items()}


def theory(schedule: str, stages: int, number: int) -> float:
    """Return the share of a step in which each of p equal stages waits, for ``number`` micro batches."""
    # Passes of a micro batch through a stage, in units of the time that a stage waits for each of the others.
    passes = {"interleaved": CHUNKS, "zero_bubble": 3}.get(schedule, 1)
    return (stages - 1) / (passes * number + stages - 1)


def bubbles(rows: Sequence[Sequence[float]], index: int) -> list[float]:
    """Return the measured share in each round, for the ``index``-th number of micro batches."""
    (first, *shortest) = rows[0]
    (last, *longest) = rows[-1]
    # t from all rounds: that of one would bring its noise into all shares.
    t = median((b - a) / (last - first) for a, b in zip(shortest, longest, strict=True))
    number, *seconds = rows[index]
    return [1 - number * t / took for took in seconds]


def table(seconds: dict[str, list[list[float]]], stages: int) -> list[str]:
    """Return Markdown: for each schedule and number of micro batches, the measured share, that of `theory`, and their
    ratio.
    """
    lines = ["| schedule | p | m | ms per step | share waiting, 95% interval | theory | ratio |"]
    lines.append("|---|---|---|---|---|---|---|")
    ratios = []
    for schedule, rows in seconds.items():
        for index, (number, *took) in enumerate(rows[:-1]):
            share = trimmed_mean_interval([bubbles(rows, index)])
            formula = theory(schedule, stages, int(number))
            ratios.append(share.estimate / formula)
            lines.append(
                f"| {schedule} | {stages} | {number:.0f} | {1e3 * median(took):.1f} | {share} | {formula:.3f} "
                f"| {ratios[-1]:.2f} |"
            )
    mean = math.exp(sum(math.log(max(r, 1e-9)) for r in ratios) / len(ratios))
    return [*lines, "", f"measured over theory, geometric mean of {len(ratios)}: {mean:.2f}"]
