"""Models on the meta device: all shapes, without memory, data, other processes or a GPU."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_patch import cpu
from pretrain.config import ParallelConfig, Recipe
from pretrain.engine import init_parallel
from pretrain.engine.locations import tensor_layouts
from pretrain.engine.model import build_model
from pretrain.engine.pipeline import stages
from pretrain.start.process import Processes


@contextlib.contextmanager
def as_rank(recipe: Recipe, rank: int) -> Iterator[Processes]:
    """Make this process one rank of the recipe's run in a ``with`` block. Its process groups do not communicate.

    Raises:
        RuntimeError: this process is in a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialized already: use a process without process groups")
    size = recipe.parallel.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        processes = Processes(rank, size, torch.device("cpu"))
        init_parallel(recipe)
        yield processes
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_on_meta(recipe: Recipe) -> nn.Module:
    """Return the whole model of a recipe, as a single rank would hold it, on the meta device.

    Raises:
        RuntimeError: torch sees a GPU, or this process is in a process group.
    """
    return build_rank_on_meta(replace(recipe, parallel=ParallelConfig()), 0)[0]


def build_rank_on_meta(recipe: Recipe, rank: int) -> list[nn.Module]:
    """Return the pipeline chunks of a rank of the recipe's run, on the meta device.

    Raises:
        RuntimeError: torch sees a GPU, or this process is in a process group.
    """
    cpu.install()
    with as_rank(recipe, rank), cpu.on_meta():
        return [build_model(recipe, **stage) for stage in stages(recipe.parallel)]


def checkpoint_layouts(recipe: Recipe) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each tensor of a recipe's model, by its name in a checkpoint.

    The names omit the prefix ``model/``.

    Raises:
        RuntimeError: torch sees a GPU, or this process is in a process group.
    """
    recipe = replace(recipe, parallel=ParallelConfig())
    cpu.install()
    with as_rank(recipe, 0), cpu.on_meta():
        return tensor_layouts([build_model(recipe)])
