"""Loading the whole model of a run or checkpoint into this process."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fmoe.errors import UserError
from fmoe.runtime import launcher
from pretrain.checkpoint import Checkpoint, open_checkpoint, steps
from pretrain.checkpoint.folders import step_folders, step_name
from pretrain.config import ParallelConfig, Recipe, build_recipe
from pretrain.config.imports import import_plugins, import_stored
from pretrain.data.opening import open_trained_tokenizer
from pretrain.data.tokenizers import Tokenizer
from pretrain.start import process
from pretrain.start.process import Processes
from pretrain.tracking.folder import CHECKPOINTS, CONFIG, RUN_INFO, read_run_info


@dataclass(frozen=True)
class Trained:
    """A checkpoint with the recipe and tokenizer of its model.

    Attributes:
        name: the path as the user spelled it.
        recipe: the checkpoint's recipe, with all parallel sizes set to 1.
        tokenizer: the run's tokenizer, verified by its SHA-256 if that is recorded.
        run_data: the record ``data`` in the run's ``run.json``; empty if the file is missing.
    """

    name: str
    checkpoint: Checkpoint
    recipe: Recipe
    tokenizer: Tokenizer
    run_data: dict[str, Any]


def open_run(
    path: Path, step: int | None = None, tokenizer: Path | None = None, imports: Sequence[str] | None = None
) -> Trained:
    """Open a run's newest complete checkpoint, or the checkpoint of a given step.

    Args:
        path: folder of a run, of its checkpoints, or of one checkpoint.
        step: step of the checkpoint; None for the newest complete one, or for ``path`` if it is a checkpoint.
        tokenizer: new location of ``data.tokenizer``; None if it has not moved.
        imports: files or modules to import instead of ``run.imports``; None if they have not moved.

    Raises:
        UserError: there is no such checkpoint, or it is damaged; the tokenizer is missing or is not the run's; a plugin
            of the run cannot be imported.
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
        opened = open_trained_tokenizer(recipe, tokenizer, data, run_data.get("tokenizer"))
    except UserError as error:
        hint = "" if tokenizer else "; if the file has moved, pass --tokenizer FILE"
        raise UserError(f"{path}: {error}{hint}") from error
    return Trained(str(path), checkpoint, replace(recipe, parallel=ParallelConfig()), opened, run_data)


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


@contextlib.contextmanager
def single_process(seed: int = 0) -> Iterator[Processes]:
    """Set up Megatron-core's process groups for this process alone, on its GPU if it has one.

    Args:
        seed: seed of all random number generators.

    Raises:
        UserError: a launcher started several processes.
    """
    from megatron_patch import cpu
    from pretrain.engine import init_parallel, stop_parallel

    if launcher.world_size() > 1:
        raise UserError(f"WORLD_SIZE={launcher.world_size()} is not supported: start a single process")
    cpu.install()
    processes = process.start()
    try:
        recipe = Recipe()
        init_parallel(replace(recipe, train=replace(recipe.train, seed=seed)))
        yield processes
    finally:
        stop_parallel()
        process.stop()


def load_model(trained: Trained, processes: Processes, *, drops: bool) -> nn.Module:
    """Load the model of a checkpoint, in the run's precision and in evaluation mode, on the device of ``processes``.

    Args:
        drops: apply the recipe's ``moe.eval_capacity_factor``. False lifts the capacity limit, so that a GPT's output
            for a token depends on no later token and no other sequence, unless experts choose their tokens.

    Raises:
        UserError: the checkpoint is damaged, or its tensors do not fit its recipe.
    """
    from megatron_patch import bf16_linear
    from pretrain.engine import state
    from pretrain.engine.model import build_model
    from pretrain.models.config import DTYPES

    recipe = trained.recipe
    if not drops:
        recipe = replace(recipe, model=recipe.model.with_values({"moe.eval_capacity_factor": None}))
    model = build_model(recipe).to(DTYPES[recipe.train.precision])
    if bf16_linear.is_needed():
        bf16_linear.mark_weights(model)
    state.load_model([model], trained.checkpoint, processes.device)
    return model.eval().requires_grad_(False)
