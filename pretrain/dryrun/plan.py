"""All kinds of ranks of a run, and their totals."""

import itertools
from dataclasses import dataclass
from typing import Any

from megatron_patch import cpu
from pretrain.callbacks import build_callbacks
from pretrain.config import Recipe
from pretrain.dryrun.holding import Groups, Holding, build, groups, hold
from pretrain.engine.meta import as_rank
from pretrain.engine.model import check_parts


@dataclass(frozen=True)
class Grid:
    """The ranks of a run.

    Attributes:
        world_size: number of ranks.
        nodes, processes_per_node: machines, and ranks on each.
        groups: sizes of the process groups.
        micro_batches: number of micro batches per step and data parallel rank, at the final batch size.
    """

    world_size: int
    nodes: int
    processes_per_node: int
    groups: Groups
    micro_batches: int


@dataclass(frozen=True)
class RankKind:
    """A group of ranks with equal memory, except for padding and alignment of optimizer shards, and for Muon's state.

    Attributes:
        stages: pipeline stages of this kind, from 0.
        rank: the first rank of this kind.
        count: number of ranks.
        holding: memory of `rank`. For a sharded Muon, the bytes of its state are the largest of any rank.
    """

    stages: tuple[int, ...]
    rank: int
    count: int
    holding: Holding


@dataclass(frozen=True)
class Plan:
    """Memory, size and FLOPs of a run.

    Attributes:
        parameters, active_parameters: number of parameters of the model, and of those that a token uses.
        flops_per_token: FLOPs of a training step per token, forward and backward.
        tokens_per_step: number of tokens that enter the model in a step, at the final batch size.
        checkpoint_bytes: bytes of the tensors of one checkpoint, without names and checksums.
        kinds: kinds of ranks, in the order of their first pipeline stages.
    """

    recipe: Recipe
    grid: Grid
    parameters: int
    active_parameters: int
    flops_per_token: float
    tokens_per_step: int
    checkpoint_bytes: int
    kinds: tuple[RankKind, ...]

    @property
    def largest(self) -> RankKind:
        """Kind of rank that holds the most bytes; the first on a tie."""
        return max(self.kinds, key=lambda kind: kind.holding.total)


def make_plan(recipe: Recipe, nodes: int = 1) -> Plan:
    """Plan the run of a recipe. This needs no data, tokenizer or GPU, and writes nothing.

    Args:
        nodes: number of machines that the ranks are spread over.

    Raises:
        UserError: the model or a callback cannot be built with this recipe.
        RuntimeError: torch sees a GPU, or this process is in a process group.
    """
    cpu.install()
    check_parts(recipe)
    build_callbacks(recipe)
    parallel = recipe.parallel
    train = recipe.train
    size = parallel.world_size
    kinds: list[RankKind] = []
    axes: Any = None  # group sizes, the same on every rank
    for stages in _alike(recipe):
        rank = stages[0] * (size // parallel.pipeline)
        with as_rank(recipe, rank) as processes:
            axes = groups()
            holding = hold(build(recipe, processes))
        kinds.append(RankKind(tuple(stages), rank, len(stages) * (size // parallel.pipeline), holding))
    return Plan(
        recipe=recipe,
        grid=Grid(size, nodes, size // nodes, axes, train.global_batch // (train.micro_batch * axes.data)),
        parameters=sum(len(kind.stages) * kind.holding.distinct for kind in kinds),
        active_parameters=recipe.num_active_params(),
        flops_per_token=recipe.flops_per_token(),
        tokens_per_step=train.global_batch * recipe.tokens_per_sequence,
        checkpoint_bytes=sum(len(kind.stages) * kind.holding.saved for kind in kinds),
        kinds=tuple(kinds),
    )


def _alike(recipe: Recipe) -> list[list[int]]:
    """Group pipeline stages by the kinds of their layers, in order. First and last stage stay separate."""
    model = recipe.model
    parallel = recipe.parallel
    stages = parallel.pipeline
    if stages == 1:
        return [[0]]
    ends = list(itertools.accumulate(recipe.stage_layers, initial=0))
    chunks = [range(begin + 1, end + 1) for begin, end in itertools.pairwise(ends)]
    alike: dict[tuple, list[int]] = {}
    for stage in range(stages):
        numbers = [number for chunk in chunks[stage::stages] for number in chunk]
        experts = tuple(number in model.layers_with_experts for number in numbers)
        in_decoder = tuple(number > model.num_layers for number in numbers)  # of a T5
        ends_encoder = model.num_layers in numbers  # which has a norm at its end
        alike.setdefault((stage == 0, stage == stages - 1, experts, in_decoder, ends_encoder), []).append(stage)
    return list(alike.values())
