"""``python -m bench classes``: memory and loss of an output layer with millions of classes, split over ranks.

The plan counts what each rank of a GPT with one layer holds, on the meta device, as ``fmoe train --dry-run`` does. Its
tied embedding, whose rows are the classes, is nearly the whole model. The steps are real: the same model with fewer
classes and a smaller width on one rank and on ``--step-ranks``, from the same weights and tokens. Their losses must
agree within ``--tolerance``, and the largest rank must hold the bytes of the plan; otherwise the exit code is 1.

``--margin-classes 10000000`` adds timed steps of `fmoe.parallel.ShardedClassifier` on one rank and on ``--step-ranks``.
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from bench import options, ranks, report
from bench.samples import Tokens
from bench.traffic import Traffic
from fmoe import random
from fmoe.errors import UserError
from pretrain.config import (
    AttentionConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)

HELD = ("weights", "gradients", "masters", "moments")
GIB = 2**30


def main(argv: Sequence[str]) -> int:
    parser = options.bare_parser("classes", __doc__)
    parser.add_argument("--classes", type=int, default=50_000_000, help="classes of the plan")
    parser.add_argument("--width", type=int, default=512, help="width of the plan's embedding")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64], help="tensor parallel sizes to plan")
    parser.add_argument("--optimizers", nargs="+", choices=("sgd", "adamw"), default=["sgd", "adamw"])
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--step-classes", type=int, default=1_000_000, help="classes of the real steps")
    parser.add_argument("--step-width", type=int, default=32, help="width of the real steps' model")
    parser.add_argument("--step-ranks", type=int, default=2, help="tensor parallel size of the real steps")
    parser.add_argument("--steps", type=int, default=3, help="number of real steps")
    parser.add_argument(
        "--margin-classes", type=int, default=0, help="classes of timed steps of `ShardedClassifier`; 0 for none"
    )
    parser.add_argument("--margin-width", type=int, default=32, help="width of these classes")
    parser.add_argument("--margin-batch", type=int, default=64, help="samples per step, over all ranks")
    parser.add_argument("--sample", type=float, default=0.1, help="share of the classes that take part in a step")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference of losses")
    arguments = parser.parse_args(argv)
    options.at_least(arguments, margin_classes=0, margin_width=1, margin_batch=arguments.step_ranks, sample=0)
    options.at_least(arguments, steps=1, step_ranks=2, ranks=1, classes=1, step_classes=1, width=8, step_width=8)
    if arguments.sample > 1:
        raise UserError(f"--sample={arguments.sample} must be at most 1")
    if arguments.margin_batch % arguments.step_ranks:
        raise UserError(
            f"--margin-batch={arguments.margin_batch} must be a multiple of --step-ranks={arguments.step_ranks}"
        )
    for size in (1, arguments.step_ranks):  # wrong sizes are named here, not by a rank after the plans
        recipe_of(arguments.step_classes, arguments.step_width, size)
    plans = [
        _plan(arguments.classes, arguments.width, size, optimizer, precision)
        for optimizer in arguments.optimizers
        for precision in arguments.precision
        for size in arguments.ranks
    ]
    runs = []
    for size in (1, arguments.step_ranks):
        found = ranks.run(size, steps, arguments.step_classes, arguments.step_width, size, arguments.steps)
        plan = _plan(arguments.step_classes, arguments.step_width, size, "adamw", "fp32")
        runs.append(found | {"planned": plan["total"]})
    text, is_met = _text(plans, runs, arguments.tolerance)
    timed = []
    if arguments.margin_classes:
        for size in (1, arguments.step_ranks):
            timed.append(ranks.run(size, margin_steps, arguments))
        text += "\n".join(_margin_lines(timed, arguments)) + "\n"
    report.write_rows({"plans": plans, "steps": runs, "margins": timed}, text, arguments.out, "classes")
    return 0 if is_met else 1


def recipe_of(classes: int, width: int, size: int, optimizer: str = "adamw", precision: str = "fp32") -> Recipe:
    """Return the recipe of a dense GPT of one layer, whose ``classes`` tokens ``size`` tensor parallel ranks split."""
    recipe = Recipe(
        model=ModelConfig(
            num_layers=1,
            hidden_size=width,
            ffn_hidden_size=width,
            sequence_length=64,
            vocab_size=classes,
            attention=AttentionConfig(num_heads=width // 8),
            moe=MoEConfig(num_experts=0),
        ),
        parallel=ParallelConfig(tensor=size),
        optimizer=OptimizerConfig(name=optimizer, lr=1e-2),
        train=TrainConfig(micro_batch=1, global_batch=1, precision=precision),
    )
    recipe.check()
    return recipe


def _plan(classes: int, width: int, size: int, optimizer: str, precision: str) -> dict:
    recipe = recipe_of(classes, width, size, optimizer, precision)
    from pretrain.dryrun import make_plan  # megatron-core, after the checks

    held = make_plan(recipe).largest.holding
    row = {"classes": classes, "width": width, "ranks": size, "optimizer": optimizer, "precision": precision}
    return row | {name: getattr(held, name) for name in (*HELD, "total")} | {"logits": 4 * 1000 * classes // size}


def steps(classes: int, width: int, size: int, count: int) -> dict:
    """Make ``count`` steps on ``size`` ranks; return the losses, the most bytes that a rank holds, and the bytes that
    this rank sent in the last step.
    """
    from bench.studies.memory import tensors_of

    recipe = recipe_of(classes, width, size)
    processes = ranks.start_parallel(recipe)
    from pretrain.engine import Engine

    engine = Engine(recipe, processes)
    tokens = Tokens(recipe)
    losses = []
    for _ in range(count):
        with Traffic() as traffic:
            losses.append(engine.train_step(0, tokens).loss)  # the same tokens: their loss falls
    # The plan leaves out AdamW's counters of steps, one number per tensor.
    held = sum(tensor.nbytes for of_kind in tensors_of(engine).values() for tensor in of_kind if tensor.dim())
    held = int(ranks.slowest(held))
    return {"classes": classes, "width": width, "ranks": size, "losses": losses, "held": held, "sent": traffic.sent}


def margin_steps(arguments: argparse.Namespace) -> dict:
    """Time steps of a sampled softmax with ArcFace's margin; return seconds, losses, and the most bytes of a rank."""
    from fmoe.optim import RowAdagrad
    from fmoe.parallel import ShardedClassifier

    group = dist.group.WORLD
    layer = ShardedClassifier(
        arguments.margin_classes, arguments.margin_width, group, angle=0.5, sample=arguments.sample
    )
    optimizer = RowAdagrad([layer.weight], lr=0.01)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(arguments.margin_batch, arguments.margin_width, generator=generator)
    labels = torch.randint(arguments.margin_classes, (arguments.margin_batch,), generator=generator)
    count = arguments.margin_batch // group.size()
    mine = slice(count * group.rank(), count * (group.rank() + 1))
    seconds = []
    losses = []
    for step in range(arguments.steps):
        random.set_position(seed=0, step=step)
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = layer(x[mine].requires_grad_(), labels[mine]).mean()
        loss.backward()
        optimizer.step()
        seconds.append(ranks.slowest(time.perf_counter() - begin))
        mean = loss.detach() / group.size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    held = layer.weight.nbytes + sum(value.nbytes for value in optimizer.state[layer.weight].values())
    return {"ranks": group.size(), "seconds": seconds, "losses": losses, "held": int(ranks.slowest(held))}


def _margin_lines(timed: list[dict], arguments: argparse.Namespace) -> list[str]:
    cells = [["ranks", "loss by step", "seconds by step", "bytes of rows and optimizer, largest rank"]]
    for row in timed:
        losses = ", ".join(f"{loss:.6f}" for loss in row["losses"])
        seconds = ", ".join(f"{value:.3f}" for value in row["seconds"])
        cells.append([str(row["ranks"]), losses, seconds, f"{row['held']:,}"])
    one, many = (statistics.median(row["seconds"]) for row in timed)
    return [
        "",
        f"{arguments.margin_classes:,} classes of width {arguments.margin_width} with ArcFace's margin, of which "
        f"{arguments.sample:.0%} take part, {arguments.margin_batch} samples, row-wise Adagrad:",
        "",
        *report.table(cells),
        "",
        f"efficiency of {timed[1]['ranks']} ranks, from medians: {one / many / timed[1]['ranks']:.0%}",
    ]


def _text(plans: list[dict], runs: list[dict], tolerance: float) -> tuple[str, bool]:
    cells = [["ranks", "optimizer", "precision", *HELD, "total per rank, GiB", "fp32 logits of 1,000 tokens, GiB"]]
    for plan in plans:
        sizes = [f"{plan[name] / GIB:.2f}" for name in (*HELD, "total", "logits")]
        cells.append([str(plan["ranks"]), plan["optimizer"], plan["precision"], *sizes])
    one, many = runs
    gaps = [abs(a - b) / abs(a) for a, b in zip(one["losses"], many["losses"], strict=True)]
    gap = max(gaps, key=lambda each: (math.isnan(each), each))
    exact = all(run["held"] == run["planned"] for run in runs)
    ran = [["ranks", "loss by step", "bytes of the largest rank", "of the plan", "MB sent in a step"]]
    for run in runs:
        losses = ", ".join(f"{loss:.6f}" for loss in run["losses"])
        ran.append([str(run["ranks"]), losses, f"{run['held']:,}", f"{run['planned']:,}", f"{run['sent'] / 1e6:.4f}"])
    lines = [
        f"{plans[0]['classes']:,} classes of width {plans[0]['width']}, planned, GiB of the largest rank:",
        "",
        *report.table(cells),
        "",
        f"Real steps with {one['classes']:,} classes of width {one['width']}, AdamW, fp32, 64 tokens:",
        "",
        *report.table(ran),
        "",
        f"largest relative difference of the losses: {gap:.1e} ({'met' if gap <= tolerance else 'missed'}: at most "
        f"{tolerance:g}); bytes are those of the plan: {'met' if exact else 'missed'}",
    ]
    return "\n".join(lines) + "\n", gap <= tolerance and exact
