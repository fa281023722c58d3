"""From a checked recipe to a finished run: folder, checkpoint to go on from, trainer."""

import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from fmoe.errors import UserError
from megatron_patch import cpu
from pretrain import process
from pretrain.callbacks import Checkpointing, Tracking, Validation
from pretrain.checkpoint import Checkpoint, latest, open_checkpoint
from pretrain.config import Recipe, write_recipe
from pretrain.engine import init_parallel
from pretrain.inputs import open_inputs
from pretrain.process import Processes
from pretrain.tracking import build_trackers, read_metrics
from pretrain.trainer import Trainer, check_resumable

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"


def find_checkpoint(folder: Path, resume: str | None) -> Checkpoint | None:
    """The checkpoint to go on from; None to begin anew.

    Args:
        folder: of the run.
        resume: None for a new run; "run" for the newest of the folder; "auto" for that or, if there is none, a new
            run; else the folder of a checkpoint or of another run.

    Raises:
        UserError: a new run in the folder of another; a folder that holds no checkpoint.
    """
    newest = latest(folder / CHECKPOINTS)
    if resume is None:
        if (folder / METRICS).exists() or newest is not None:
            raise UserError(
                f"run.folder={folder} holds a run already: --resume goes on with it, or name another folder"
            )
        return None
    if resume == "auto":
        return None if newest is None else open_checkpoint(newest)
    if resume == "run":
        return open_checkpoint(folder)
    checkpoint = open_checkpoint(Path(resume))
    # Checkpoints are never overwritten and a record has no step twice: going back is another run.
    if newest is not None and checkpoint.path.resolve() != newest.resolve():
        raise UserError(
            f"run.folder={folder} holds a run whose newest checkpoint is {newest.name}: "
            f"go on from {checkpoint.path} in another folder"
        )
    return checkpoint


def is_finished(recipe: Recipe, checkpoint: Checkpoint | None) -> bool:
    """Whether the checkpoint is of the recipe's last step, in its own folder.

    Raises:
        UserError: the checkpoint cannot be gone on from with this recipe.
    """
    if checkpoint is None:
        return False
    check_resumable(recipe, checkpoint)
    if checkpoint.step < recipe.train.steps:
        return False
    if latest(Path(recipe.run.folder) / CHECKPOINTS) is None:
        raise UserError(f"train.steps={recipe.train.steps} are all done in {checkpoint.path}: ask for more")
    return True


def train(recipe: Recipe, resume: str | None) -> None:
    """Runs a recipe in this process, one of ``recipe.parallel.world_size``."""
    cpu.install()
    folder = Path(recipe.run.folder)
    inputs = open_inputs(recipe)
    checkpoint = find_checkpoint(folder, resume)
    if is_finished(recipe, checkpoint):
        if process.local_rank() == 0:
            summarize(recipe)
        return
    processes = process.start()
    dist.barrier()  # every rank has looked at the folder before one of them writes
    callbacks = []
    if inputs.validation is not None:
        callbacks.append(Validation(recipe.train.validation_every, recipe.train.validation_sequences))
    callbacks.append(
        Tracking(
            lambda: build_trackers(
                folder,
                wandb=recipe.tracking.wandb,
                tensorboard=recipe.tracking.tensorboard,
                console_every=recipe.tracking.console_every,
                total_steps=recipe.train.steps,
                config=asdict(recipe),
                resume_step=None if checkpoint is None else checkpoint.step,
                project=recipe.tracking.project,
            )
        )
    )
    if recipe.checkpoint.every:
        callbacks.append(Checkpointing(folder / CHECKPOINTS, recipe.checkpoint.every, recipe.checkpoint.keep))
    init_parallel(recipe, processes)
    trainer = Trainer(recipe, processes, inputs, callbacks)
    if checkpoint is not None:
        trainer.resume(checkpoint)
    if processes.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, folder / "config.toml")
    _describe(trainer, folder, processes)
    trainer.run()
    if processes.is_main:
        summarize(recipe)


def summarize(recipe: Recipe) -> None:
    """Says how a finished run ended and where its results are."""
    folder = Path(recipe.run.folder)
    last: dict = {}
    for record in read_metrics(folder / METRICS):
        last.update(record)
    losses = [f"training loss {last['loss']:.4f}"] if "loss" in last else []
    if "val/loss" in last:
        losses.append(f"validation loss {last['val/loss']:.4f}")
    if "corpus/unigram_entropy" in last:
        losses.append(f"unigram entropy {last['corpus/unigram_entropy']:.4f}")
    lines = [
        f"finished at step {last.get('step')}: {', '.join(losses)} (nats a token)",
        f"  metrics      {folder / METRICS}",
    ]
    if (newest := latest(folder / CHECKPOINTS)) is not None:
        lines.append(f"  checkpoint   {newest}")
    if (folder / "wandb").is_dir():
        lines.append(f"  wandb        {folder / 'wandb'}   (wandb leet {folder / 'wandb'})")
    if (folder / "tensorboard").is_dir():
        lines.append(f"  tensorboard  {folder / 'tensorboard'}")
    _say(lines)


def _say(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _describe(trainer, folder: Path, processes: Processes) -> None:
    """Writes ``run.json``: versions, sizes, and which experts each rank holds, read from the layers themselves."""
    layers = trainer.engine.moe_layers
    mine = torch.tensor([layers[0].first_expert, layers[0].num_local_experts] if layers else [0, 0])
    everyone = [torch.empty_like(mine, device=processes.device) for _ in range(processes.world_size)]
    dist.all_gather(everyone, mine.to(processes.device))
    if not processes.is_main:
        return
    held = [list(range(first, first + count)) for first, count in (x.tolist() for x in everyone)]
    model = trainer.recipe.model
    text = {
        "world_size": processes.world_size,
        "device": processes.device.type,
        "experts_of_rank": held,
        "params": model.num_params(),
        "active_params": model.num_active_params(),
        "versions": {name: version(name) for name in ("fmoe", "torch", "megatron-core")}
        | {"python": platform.python_version()},
    }
    (folder / "run.json").write_text(json.dumps(text, indent=1) + "\n")
    lines = [f"{model.num_params():,} parameters, {model.num_active_params():,} active a token"]
    lines += [f"  rank {rank} holds experts {ids[0]}-{ids[-1]} of each layer" for rank, ids in enumerate(held) if ids]
    _say(lines)
