"""Loading the model of a run or checkpoint, whole or split over ranks."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fmoe.errors import UserError
from fmoe.runtime import launcher
from pretrain.checkpoint import Checkpoint, open_checkpoint, steps
from pretrain.checkpoint.folders import step_folders, step_name
from pretrain.config import OptimizerConfig, ParallelConfig, Recipe, TrainConfig, build_recipe
from pretrain.config.imports import import_plugins, import_stored
from pretrain.data.opening import open_trained_tokenizer
from pretrain.start import process, ranks
from pretrain.start.job import Job
from pretrain.start.launch import rendezvous
from pretrain.start.process import Processes
from pretrain.tracking.folder import CHECKPOINTS, CONFIG, RUN_INFO, read_run_info

ONE_PROCESS = ParallelConfig()


@dataclass(frozen=True)
class Trained:
    """A checkpoint with the recipe and tokenizer of its model.

    Attributes:
        name: the path as the user spelled it.
        recipe: the checkpoint's recipe, with the split `open_run` was given.
        tokenizer: the run's tokenizer, verified by its SHA-256 if that is recorded; None if
            ``data.tokenizer`` is empty.
        run_data: the record ``data`` in the run's ``run.json``; empty if the file is missing.
    """

    name: str
    checkpoint: Checkpoint
    recipe: Recipe
    tokenizer: Any
    run_data: dict[str, Any]


def open_run(
    path: Path,
    step: int | None = None,
    tokenizer: Path | None = None,
    imports: Sequence[str] | None = None,
    parallel: ParallelConfig = ONE_PROCESS,
) -> Trained:
    """Open a run's newest complete checkpoint, or the checkpoint of a given step.

    Args:
        path: folder of a run, of its checkpoints, or of one checkpoint.
        step: step of the checkpoint; None for the newest complete one, or for ``path`` if it is a checkpoint.
        tokenizer: new location of ``data.tokenizer``; None if it has not moved.
        imports: files or modules to import instead of ``run.imports``; None if they have not moved.
        parallel: the split of the model over ranks, which may differ from the run's.

    Raises:
        UserError: there is no such checkpoint, or it is damaged; the tokenizer is missing or is not the run's; a plugin
            of the run cannot be imported; the model does not allow the split.
    """
    checkpoint = _open(path, step)
    try:
        recipe = _with_plugins(build_recipe(checkpoint.state["recipe"]), checkpoint.path, imports)
    except KeyError:
        raise UserError(f"{checkpoint.path} has no recipe in its state: it is not the checkpoint of a run") from None
    except UserError as error:
        raise UserError(f"the recipe of {checkpoint.path}: {error}") from error
    run_data = _run_data(checkpoint.path)
    data = checkpoint.state.get("data", {})
    try:
        opened = None
        if recipe.data.tokenizer:
            opened = open_trained_tokenizer(recipe, tokenizer, data, run_data.get("tokenizer"))
    except UserError as error:
        hint = "" if tokenizer else "; if the file has moved, pass --tokenizer FILE"
        raise UserError(f"{path}: {error}{hint}") from error
    recipe = replace(recipe, parallel=parallel)
    if parallel.world_size > 1:
        # Rules of the optimizer and of global batches do not apply.
        train = TrainConfig(global_batch=parallel.dense_data, micro_batch=1, precision=recipe.train.precision)
        data = replace(recipe.data, validation=())
        try:
            replace(recipe, optimizer=OptimizerConfig(), train=train, data=data).check()
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
    return Trained(str(path), checkpoint, recipe, opened, run_data)


def _with_plugins(recipe: Recipe, path: Path, imports: Sequence[str] | None) -> Recipe:
    if imports is not None:
        return import_plugins(replace(recipe, run=replace(recipe.run, imports=tuple(imports))))
    path = path.resolve()
    try:
        import_stored(recipe, path.parent.parent if path.parent.name == CHECKPOINTS else path)
    except UserError as error:
        raise UserError(f"{error}; if you trust this code, pass its present path with --imports") from error
    return recipe


def _open(path: Path, step: int | None) -> Checkpoint:
    if not path.exists():
        raise UserError(f"{path} does not exist: pass the folder of a run or of a checkpoint")
    folders = step_folders(path)
    if not folders:
        try:
            checkpoint = open_checkpoint(path)
        except UserError as error:
            if (path / CONFIG).is_file():
                raise UserError(f"the run {path} has no checkpoint yet") from error
            raise
        if step not in (None, checkpoint.step):
            raise UserError(f"--step {step}: {path} is the checkpoint of step {checkpoint.step}")
        return checkpoint
    folder = folders[0].parent
    complete = steps(folder)
    if step is None and not complete:
        return open_checkpoint(folders[0])  # raises the damage of the newest
    if step not in (None, *complete):
        names = ", ".join(map(str, complete)) or "none"
        raise UserError(f"--step {step} has no complete checkpoint in {folder}: the complete steps are {names}")
    return open_checkpoint(folder / step_name(complete[-1] if step is None else step))


def _run_data(checkpoint: Path) -> dict[str, Any]:
    """Return the ``data`` record of a checkpoint's run from its ``run.json``; empty without the file."""
    run = checkpoint.parent.parent
    info = read_run_info(run) if checkpoint.parent.name == CHECKPOINTS else {}
    data = info.get("data") if info else {}
    if not isinstance(data, dict):
        raise UserError(f"{run / RUN_INFO} is invalid: its key data has no JSON object")
    return data


def start_ranks(command: Sequence[str], parallel: ParallelConfig) -> int | None:
    """Start the ranks of a split on this machine, and return the command's exit code when they have ended.

    Args:
        command: name and arguments of a function of `pretrain.inference.cli`, which each rank calls.

    Returns:
        None if there is nothing to start: for a single process, and in the ranks themselves.

    Raises:
        UserError: a launcher started another number of ranks.
    """
    if launcher.is_launched() or parallel.world_size == 1:
        Recipe(parallel=parallel).check_world_size(launcher.world_size())
        return None
    program = f"fmoe {command[0]}"
    size = parallel.world_size
    job = Job(program, Recipe(parallel=parallel), tuple(command), processes_per_node=size, program=program)
    with rendezvous(job) as environment:
        return ranks.run(job, environment, command=(sys.executable, "-m", "pretrain.inference"))


@contextlib.contextmanager
def process_groups(parallel: ParallelConfig = ONE_PROCESS, seed: int = 0) -> Iterator[Processes]:
    """Set up Megatron-core's process groups for a split, on GPUs if this machine has any.

    Args:
        seed: seed of all random number generators.

    Raises:
        UserError: a launcher started another number of ranks than the split needs.
    """
    from megatron_patch import cpu
    from pretrain.engine import init_parallel, stop_parallel

    recipe = Recipe(parallel=parallel, train=TrainConfig(seed=seed))
    recipe.check_world_size(launcher.world_size())
    cpu.install()
    processes = process.start()
    try:
        init_parallel(recipe)
        yield processes
    finally:
        stop_parallel()
        process.stop()


def load_model(trained: Trained, processes: Processes, *, drops: bool) -> nn.Module:
    """Load a checkpoint's model, or this rank's part of it, in the run's precision and in evaluation mode. Collective.

    Args:
        processes: rank and device, from `process_groups` with the split of ``trained.recipe``.
        drops: apply the recipe's ``moe.eval_capacity_factor``. False lifts the capacity limit, so that a GPT's output
            for a token depends on no later token and no other sequence, unless experts choose their tokens.

    Raises:
        UserError: the checkpoint is damaged, or its tensors do not fit its recipe.
    """
    from megatron_patch import bf16_linear
    from megatron_patch.fsdp import FullyShardedDataParallel
    from pretrain.engine import state
    from pretrain.engine.model import build_model
    from pretrain.engine.pipeline import stages
    from pretrain.models.config import DTYPES

    recipe = trained.recipe
    if not drops:
        recipe = replace(recipe, model=recipe.model.with_values({"moe.eval_capacity_factor": None}))
    (stage,) = stages(recipe.parallel)
    model = build_model(recipe, **stage).to(DTYPES[recipe.train.precision])
    if bf16_linear.is_needed():
        bf16_linear.mark_weights(model)
    if recipe.parallel.is_fully_sharded:
        FullyShardedDataParallel(model.config, model, reshard_after_forward=True)  # shards the model in place
    state.load_model([model], trained.checkpoint, processes.device)
    return model.eval().requires_grad_(False)
