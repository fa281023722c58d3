"""``python -m bench gpipe``: the largest model that fits a memory budget per stage, and speed-up by number of stages.

The two tables of GPipe (arXiv 1811.06965) for our pipeline, with the sizes of its Transformer and a vocabulary of
32,768. The first counts on the meta device what the largest stage holds: weights, gradients and optimizer state as
``fmoe train --dry-run`` does, and what autograd keeps of every micro batch in flight. On the gpipe schedule all micro
batches are in flight; on 1F1B p - s of them at stage s of p (s from 0); with ``whole``, the batch at once. Recomputing
adds what one layer keeps. Gradients of activations and buffers of a kernel are not counted.

The second compares times of real steps on one and two stages with the law K m / (m + K - 1) of m micro batches on K
equal stages. Only these times depend on the machine.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bench import options, ranks, report
from bench.studies import pipeline
from pretrain.config import (
    AttentionConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)

# The whole batch at once, on one stage, is the paper's Naive-1.
MODES = (("whole", "none"), ("1f1b", "none"), ("1f1b", "full"), ("gpipe", "none"), ("gpipe", "full"))
GIB = 2**30


class Kept(saved_tensors_hooks):
    """Context that counts the bytes that autograd saves for a model on any device, also meta, without parameters."""

    def __init__(self, model: nn.Module):
        self._own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._storages: dict[int, Tensor] = {}  # kept alive, so that their numbers are not used again
        super().__init__(self._note, lambda x: x)

    def _note(self, x: Tensor) -> Tensor:
        if (number := x.untyped_storage()._cdata) not in self._own:
            self._storages[number] = x
        return x

    @property
    def bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in self._storages.values())


def main(argv: Sequence[str]) -> None:
    parser = options.parser("gpipe", __doc__, rounds=5, warmup=1, has_seed=False)
    parser.add_argument("--budget", type=float, default=16, help="GiB per stage; the paper's TPU v3 core has 16")
    parser.add_argument(
        "--stages", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of stages; real steps: 1, 2"
    )
    parser.add_argument("--micro-batches", type=int, default=32, help="micro batches per step in the first table")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="sgd: 12 bytes, as in the paper")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--no-steps", action="store_true", help="leave out the second table")
    arguments = parser.parse_args(argv)
    options.at_least(arguments, stages=1, micro_batches=1, rounds=2, warmup=0, hidden_size=64, budget=0.001)
    recipe = _recipe(arguments)
    fits = [
        _fit(recipe, stages, *mode, int(arguments.budget * GIB))
        for mode in MODES
        for stages in arguments.stages
        if mode[0] == "1f1b" or (stages == 1) == (mode[0] == "whole")
    ]
    rows = {"fits": fits}
    text = memory_table(fits, arguments)
    if not arguments.no_steps:
        steps = {stages: ranks.run(stages, pipeline.measure, _steps(arguments, stages)) for stages in (1, 2)}
        rows["steps"] = steps
        text += speed_table(steps[1]["gpipe"], steps[2]["gpipe"], arguments.stages)
    report.write_rows(rows, text, arguments.out, "gpipe")


def _recipe(arguments) -> Recipe:
    recipe = Recipe(
        model=ModelConfig(
            num_layers=1,
            hidden_size=arguments.hidden_size,
            ffn_hidden_size=4 * arguments.hidden_size,
            sequence_length=arguments.sequence_length,
            vocab_size=32768,
            tie_embeddings=False,
            attention=AttentionConfig(num_heads=max(1, arguments.hidden_size // 64)),
            moe=MoEConfig(num_experts=0),
        ),
        optimizer=OptimizerConfig(name=arguments.optimizer),
        train=TrainConfig(micro_batch=1, global_batch=arguments.micro_batches, precision=arguments.precision),
    )
    recipe.check()
    return recipe


def _steps(arguments, stages: int) -> SimpleNamespace:
    """Return arguments of `pipeline.measure`: small models, whose layers divide into the stages."""
    sizes = {"layers": 4, "hidden_size": 192, "sequence_length": 256, "micro_batches": [1, 4]}
    sizes |= {"schedules": ["gpipe"], "sleep": 0.0}
    return SimpleNamespace(stages=stages, rounds=arguments.rounds, warmup=arguments.warmup, **sizes)


def kept_bytes(recipe: Recipe) -> int:
    """Return the bytes that autograd keeps of the forward pass of one micro batch through the whole model."""
    from megatron_patch import cpu
    from pretrain.dryrun.holding import build
    from pretrain.engine.meta import as_rank

    cpu.install()
    recipe = replace(recipe, parallel=replace(recipe.parallel, pipeline=1))
    with as_rank(recipe, 0) as processes, cpu.on_meta():
        (model,) = build(recipe, processes).model
        tokens = torch.zeros(recipe.train.micro_batch, recipe.model.sequence_length, dtype=torch.int64, device="meta")
        kept = Kept(model)
        with kept:
            model(tokens, tokens, None, labels=tokens)
        return kept.bytes


def _with(recipe: Recipe, layers: int, recompute: str, stages: int = 1) -> Recipe:
    parallel = ParallelConfig(pipeline=stages, recompute=recompute)
    return replace(recipe, model=replace(recipe.model, num_layers=layers), parallel=parallel)


def _fit(recipe: Recipe, stages: int, schedule: str, recompute: str, budget: int) -> dict:
    """Return sizes of the deepest model in ``stages`` stages, each of which takes at most ``budget`` bytes."""
    from pretrain.dryrun import make_plan

    one, two = (kept_bytes(_with(recipe, layers, recompute)) for layers in (1, 2))
    layer = two - one
    ends = 2 * one - two
    # While a layer is recomputed, its whole forward pass is kept.
    extra = 0 if recompute == "none" else kept_bytes(_with(recipe, 2, "none")) - kept_bytes(_with(recipe, 1, "none"))

    def sizes(depth: int) -> dict:
        plan = make_plan(_with(recipe, depth * stages, recompute, stages))
        found = []
        for kind in plan.kinds:
            batch = recipe.train.global_batch
            waiting = min(batch, stages - kind.stages[0]) if schedule == "1f1b" else batch
            activations = waiting * (depth * layer + (ends if stages - 1 in kind.stages else 0)) + extra
            found.append((kind.holding.total + activations, kind.holding.total, activations))
        total, state, activations = max(found)
        return {"parameters": plan.parameters, "total": total, "state": state, "activations": activations}

    first = sizes(1)
    second = sizes(2)
    depth = max(0, 1 + (budget - first["total"]) // (second["total"] - first["total"]))
    while sizes(depth + 1)["total"] <= budget:  # the largest stage may be another one at another depth
        depth += 1
    while depth and sizes(depth)["total"] > budget:
        depth -= 1
    row = {"stages": stages, "schedule": schedule, "recompute": recompute, "layers": depth * stages}
    nothing = dict.fromkeys(("parameters", "total", "state", "activations"), 0)
    return row | {"kept_per_layer": layer} | (sizes(depth) if depth else nothing)


def memory_table(fits: Sequence[dict], arguments) -> str:
    """Return Markdown: the largest model of each number of stages, schedule and recomputation."""
    cells = [["stages", "schedule", "recompute", "layers", "parameters", "of the first", "state", "activations", "all"]]
    for row in fits:
        share = f"{row['parameters'] / fits[0]['parameters']:.1f}" if fits[0]["parameters"] else "-"
        shown = [f"{row[name] / GIB:.2f}" for name in ("state", "activations", "total")]
        names = [str(row["stages"]), row["schedule"], row["recompute"], str(row["layers"])]
        cells.append([*names, f"{row['parameters'] / 1e6:,.1f} M", share, *shown])
    title = (
        f"Largest model with at most {arguments.budget:g} GiB per stage: width {arguments.hidden_size}, "
        f"{arguments.micro_batches} micro batches of one sequence of {arguments.sequence_length}, "
        f"{arguments.optimizer}, {arguments.precision}; GiB of the largest stage:"
    )
    return "\n".join([title, "", *report.table(cells)]) + "\n"


def speed_table(one: list[list[float]], two: list[list[float]], stages: Sequence[int]) -> str:
    """Return Markdown: the speed-up of two stages over one, and the law for each number of stages.

    Args:
        one, two: rows of `pipeline.measure` with one and two stages.
    """
    cells = [["m", *(f"law, K = {count}" for count in stages), "measured, K = 2", "over K = 2, m = 1", "law"]]
    first = median(two[0][1:]) / two[0][0]
    for (number, *alone), (_, *both) in zip(one, two, strict=True):
        law = [f"{count * number / (number + count - 1):.2f}" for count in stages]
        over_first = first * number / median(both)
        base = two[0][0]
        relative = (number / (number + 1)) / (base / (base + 1))
        cells.append(
            [f"{number:.0f}", *law, f"{median(alone) / median(both):.2f}", f"{over_first:.2f}", f"{relative:.2f}"]
        )
    title = "Speed-up over one stage with the same micro batches; K m / (m + K - 1), and medians of real steps (gpipe):"
    return "\n".join(["", title, "", *report.table(cells)]) + "\n"
