"""A plan as text or JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pretrain.config.load import recipe_text
from pretrain.dryrun.plan import Plan, RankKind
from pretrain.formats import aligned, count_text, size_text

_HEADER = ("stages", "ranks", "layers", "experts", "parameters", "weights", "gradients", "masters", "moments", "total")


def describe(plan: Plan) -> str:
    """Format the resolved recipe as TOML, then the plan's summary."""
    return f"{recipe_text(plan.recipe)}\n{summary(plan)}"


def summary(plan: Plan) -> str:
    """Format a plan: model, process grid, bytes of each kind of rank, and details of the rank with the most bytes."""
    grid = plan.grid
    axes = grid.groups
    train = plan.recipe.train
    largest = plan.largest
    held = largest.holding
    lines = [
        f"{count_text(plan.parameters)} parameters in total ({plan.parameters:,}), "
        f"{count_text(plan.active_parameters)} active per token ({plan.active_parameters:,})",
        f"{count_text(plan.flops_per_token)} FLOPs per token, forward and backward; "
        f"{plan.tokens_per_step:,} tokens per step, "
        f"{count_text(plan.tokens_per_step * train.steps)} in {train.steps:,} steps",
        f"{size_text(plan.checkpoint_bytes)} per checkpoint",
        "",
        f"process grid: world size {grid.world_size:,}, {grid.nodes:,} {'node' if grid.nodes == 1 else 'nodes'} of "
        f"{grid.processes_per_node:,}",
        f"  dense part: tensor {axes.tensor:,} x context {axes.context:,} x data {axes.data:,} x "
        f"pipeline {axes.pipeline:,}",
    ]
    if plan.recipe.model.moe.num_experts:
        lines.append(
            f"  experts: expert tensor {axes.expert_tensor:,} x expert {axes.expert:,} x data {axes.expert_data:,} x "
            f"pipeline {axes.pipeline:,}"
        )
    chunks = plan.recipe.parallel.model_chunks
    if chunks > 1:
        lines.append(f"  each pipeline stage has {chunks} chunks of layers")
    lines += [
        f"  one step: {train.global_batch:,} sequences = data {axes.data:,} x accumulated {grid.micro_batches:,} x "
        f"micro batch {train.micro_batch:,}",
        "",
        "per rank, without activations:",
        *(f"  {line}" for line in aligned([_HEADER, *map(_row, plan.kinds)])),
        "",
        f"largest rank: {largest.rank:,}, {count_text(held.parameters)} parameters ({held.parameters:,})",
        f"  optimizer (masters and moments) {size_text(held.masters + held.moments)}, total {size_text(held.total)} "
        f"({held.total:,} bytes)",
    ]
    if held.memories:
        lines.append(f"  of which memory of earlier segments {size_text(held.memories)}")
    if held.on_host:
        size = size_text(held.on_host)
        lines.append(f"  of which in host memory, by optimizer.cpu_offload, {size} ({held.on_host:,} bytes)")
    elif plan.recipe.optimizer.cpu_offload:
        lines.append(
            f"optimizer.cpu_offload={plan.recipe.optimizer.cpu_offload:g}: at least this share of the moments, with "
            "their masters, is in host memory"
        )
    return "\n".join(lines) + "\n"


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values, recipe included. ``largest`` repeats the kind of rank with the most bytes."""
    values = asdict(plan)
    for kind, of in zip(values["kinds"], plan.kinds, strict=True):
        kind["holding"]["total"] = of.holding.total
    values["largest"] = values["kinds"][plan.kinds.index(plan.largest)]
    return values


def _row(kind: RankKind) -> tuple[str, ...]:
    held = kind.holding
    sizes = (held.weights, held.gradients, held.masters, held.moments, held.total)
    return (
        _ranges(kind.stages),
        f"{kind.count:,}",
        f"{len(held.layers):,}",
        f"{held.experts:,}",
        count_text(held.parameters),
        *map(size_text, sizes),
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: 0-3, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
