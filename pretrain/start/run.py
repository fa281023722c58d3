"""Training of a recipe on one rank, from the lock of the run's folder to the summary at the end."""

import contextlib
import json
import logging
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

import fmoe
from fmoe.cli import drop_output
from fmoe.errors import UserError, one_line, printable
from fmoe.files import write_atomically
from megatron_patch import cpu
from pretrain.callbacks import (
    Callback,
    Checkpointing,
    CollapseWarning,
    Events,
    StepGuard,
    Stopping,
    Tracking,
    TrustRatios,
    Validation,
    Watchdog,
    build_callbacks,
)
from pretrain.checkpoint import Checkpoint, latest, open_checkpoint
from pretrain.config import Recipe, write_recipe
from pretrain.config.imports import digests
from pretrain.data.inputs import Inputs, open_inputs, with_counts
from pretrain.engine import init_parallel
from pretrain.engine.model import check_parts
from pretrain.report import REPORT, write_report
from pretrain.start import lock, process
from pretrain.start.process import EXIT_REQUEUE, Processes
from pretrain.start.resume import (
    agree_on_intact,
    changes,
    check_data,
    check_exists,
    check_resumable,
    check_seen_by_all,
    find_checkpoint,
    verify_together,
)
from pretrain.tracking import build_trackers, read_metrics
from pretrain.tracking.events import EVENTS
from pretrain.tracking.folder import CHECKPOINTS, CONFIG, METRICS, RUN_INFO, STACKS
from pretrain.trainer import Trainer

logger = logging.getLogger(__name__)


def is_finished(recipe: Recipe, inputs: Inputs, checkpoint: Checkpoint | None) -> bool:
    """Return whether the checkpoint is at the recipe's last step, so that nothing is left to train; False for None.

    Raises:
        UserError: this recipe cannot continue the checkpoint (`check_resumable`, `check_data`); or the checkpoint is at
            the last step, but belongs to another run.
    """
    if checkpoint is None:
        return False
    check_resumable(recipe, checkpoint)
    check_data(recipe, inputs, checkpoint)
    if checkpoint.step < recipe.train.steps:
        return False
    if latest(Path(recipe.run.folder) / CHECKPOINTS) is None:
        raise UserError(f"{checkpoint.path} is already at train.steps={recipe.train.steps}: increase train.steps")
    return True


def train(recipe: Recipe, resume: str | None, *, fallback: bool = False) -> int:
    """Train a recipe in this process, which is one of ``recipe.parallel.world_size`` ranks.

    Args:
        resume, fallback: see `find_checkpoint`.

    Returns:
        0, or `EXIT_REQUEUE` if a signal stopped the run.

    Raises:
        UserError: the recipe, its inputs or the run's folder are invalid.
        Diverged: a guard stopped the run.
    """
    cpu.install()
    folder = Path(recipe.run.folder)
    check_parts(recipe)
    own = build_callbacks(recipe)
    inputs = open_inputs(recipe)
    check_exists(folder, resume)
    meeting = process.meet(process.timeout(recipe.guard.hang_minutes))
    with contextlib.ExitStack() as stack:
        meeting.first(lambda: stack.enter_context(lock.hold(folder)))
        return _train(recipe, inputs, own, folder, meeting, resume, fallback)


def _train(
    recipe: Recipe,
    inputs: Inputs,
    own: Sequence[Callback],
    folder: Path,
    meeting: process.Meeting,
    resume: str | None,
    fallback: bool,
) -> int:
    checkpoint = find_checkpoint(folder, resume, fallback=fallback)
    weights = open_weights(recipe) if checkpoint is None else None
    # With ``fallback``, the newest intact checkpoint must be found first.
    if not fallback and is_finished(recipe, inputs, checkpoint):
        if process.local_rank() == 0:
            summarize(recipe)
        return 0
    processes = process.start(process.timeout(recipe.guard.hang_minutes), meeting)
    check_seen_by_all(folder, checkpoint)  # also a barrier: all ranks read the folder before one of them writes
    if checkpoint is not None and resume is not None:
        checkpoint = agree_on_intact(folder, resume, fallback=fallback)
        if is_finished(recipe, inputs, checkpoint):
            if processes.is_main:
                summarize(recipe)
            return 0
    else:  # a resumed run checked its tokens, and recorded their entropy, at its start
        inputs = with_counts(inputs, recipe.model.vocab_size)
    changed = [] if checkpoint is None else changes(recipe, checkpoint)
    events = Events(folder / EVENTS, None if checkpoint is None else checkpoint.path, changed)
    callbacks: list[Callback] = [events, *_guards(recipe)]
    if inputs.validation is not None:
        callbacks.append(Validation(recipe.train.validation_every, recipe.train.validation_sequences))
    if recipe.optimizer.has_trust_ratios and recipe.tracking.trust_every:
        callbacks.append(TrustRatios(recipe.tracking.trust_every))
    callbacks += own  # before tracking, which logs their metrics
    callbacks.append(
        Tracking(
            lambda: build_trackers(
                folder,
                wandb=recipe.tracking.wandb,
                tensorboard=recipe.tracking.tensorboard,
                trackio=recipe.tracking.trackio,
                console_every=recipe.tracking.console_every,
                total_steps=recipe.train.steps,
                config=asdict(recipe),
                resume_step=None if checkpoint is None else checkpoint.step,
                picture_every=recipe.tracking.picture_every,
                project=recipe.tracking.project,
            )
        )
    )
    watchdog = Watchdog(folder / STACKS, 60 * recipe.guard.hang_minutes) if recipe.guard.hang_minutes else None
    if watchdog is not None:
        callbacks.append(watchdog)
    if recipe.checkpoint.every:
        callbacks.append(Checkpointing(folder / CHECKPOINTS, recipe.checkpoint, events.saved))
        callbacks.append(Stopping())
    init_parallel(recipe, processes)
    trainer = Trainer(recipe, processes, inputs, callbacks)
    if checkpoint is not None:
        trainer.resume(checkpoint)
    elif weights is not None:
        weights = verify_together(weights.path)
        trainer.warm_start(weights)
    if processes.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, folder / CONFIG)
    _describe(trainer, folder, processes)
    if checkpoint is not None and processes.is_main:
        changes_text = f" with {', '.join(changed)}" if changed else ""
        _say([f"resumes from {checkpoint.path}{changes_text}"])
    try:
        if watchdog is not None:
            watchdog.start(trainer)
        trainer.run()
    finally:  # a run that diverged, was stopped or failed gets a report too
        if watchdog is not None:
            watchdog.stop()
        if processes.is_main:
            _write_report(folder)
    if not trainer.is_done:
        if processes.is_main:
            newest = latest(folder / CHECKPOINTS)
            _say([f"stopped at step {trainer.step} by a signal; --resume continues from {newest}"])
        return EXIT_REQUEUE
    if processes.is_main:
        summarize(recipe)
    return 0


def _guards(recipe: Recipe) -> list[Callback]:
    """Return the guards that the recipe enables."""
    guards: list[Callback] = [StepGuard(recipe.guard)]
    if recipe.guard.collapse_window and recipe.model.layers_with_experts:
        # Choices of the random gate are meant to be uniform.
        guard = replace(recipe.guard, collapse_uniform=0.0) if recipe.model.gate == "random" else recipe.guard
        guards.append(CollapseWarning(guard, recipe.model.layers_with_experts))
    return guards


def open_weights(recipe: Recipe) -> Checkpoint | None:
    """Open the checkpoint that ``train.init_from`` names; return None if the key is not set.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    if recipe.train.init_from is None:
        return None
    try:
        return open_checkpoint(recipe.train.init_from)
    except UserError as error:
        raise UserError(f"train.init_from: {error}") from error


def summarize(recipe: Recipe) -> None:
    """Print the final losses of a finished run and the location of its results."""
    folder = Path(recipe.run.folder)
    last: dict = {}
    for record in read_metrics(folder / METRICS):
        last.update(record)
    named = {"loss": "training loss", "val/loss": "validation loss", "corpus/unigram_entropy": "unigram entropy"}
    losses = [f"{name} {_figure(last, key)}" for key, name in named.items() if key in last]
    lines = [
        f"finished at step {last.get('step')}: {', '.join(losses)} (nats per token)",
        f"  metrics      {folder / METRICS}",
    ]
    if (newest := latest(folder / CHECKPOINTS)) is not None:
        lines.append(f"  checkpoint   {newest}")
    if (folder / REPORT).is_file():
        lines.append(f"  report       {folder / REPORT}   (open it in a browser)")
    if (folder / "wandb").is_dir():
        lines.append(f"  wandb        {folder / 'wandb'}   (wandb leet {folder / 'wandb'})")
    if (folder / "tensorboard").is_dir():
        lines.append(f"  tensorboard  {folder / 'tensorboard'}   (tensorboard --logdir {folder / 'tensorboard'})")
    if (folder / "trackio").is_dir():
        lines.append(f"  trackio      {folder / 'trackio'}   (TRACKIO_DIR={folder / 'trackio'} trackio show)")
    _say(lines)


def _figure(row: dict, key: str) -> str:
    """Format a row's value of a metric, which may be NaN or infinite."""
    value = row[key]
    return f"{value:.4f}" if isinstance(value, int | float) else str(row.get(f"{key}_nonfinite", value))


def _write_report(folder: Path) -> None:
    try:
        write_report([folder], folder / REPORT, False)
    except Exception as error:  # the run is complete without it
        logger.warning("the report was not written; retry with fmoe report %s; reason: %s", folder, one_line(error))


def _say(lines: list[str]) -> None:
    try:
        sys.stdout.write("\n".join(map(printable, lines)) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader is gone; the run continues
        drop_output()


def _describe(trainer, folder: Path, processes: Processes) -> None:
    """Write ``run.json``, and print the number of parameters and the experts of each rank. Collective."""
    layers = trainer.engine.moe_layers
    mine = torch.tensor(
        [layers[0].first_expert, layers[0].num_local_experts] if layers else [0, 0], dtype=torch.int64, device="cpu"
    )
    everyone = [torch.empty_like(mine, device=processes.device) for _ in range(processes.world_size)]
    dist.all_gather(everyone, mine.to(processes.device))
    if not processes.is_main:
        return
    held = [list(range(first, first + count)) for first, count in (x.tolist() for x in everyone)]
    recipe = trainer.recipe
    text = {
        "world_size": processes.world_size,
        "device": processes.device.type,
        "experts_of_rank": held,
        "params": recipe.num_params(),
        "active_params": recipe.num_active_params(),
        "flops_per_token": recipe.flops_per_token(),
        "data": {
            "tokenizer": trainer.inputs.tokenizer_fingerprint,
            "train": trainer.inputs.fingerprints,
            "validation": trainer.inputs.validation_fingerprints,
        },
        "imports": digests(recipe),
        "versions": {
            "fmoe": fmoe.__version__,
            "torch": version("torch"),
            "megatron-core": version("megatron-core"),
            "python": platform.python_version(),
        },
    }
    write_atomically(folder / RUN_INFO, (json.dumps(text, indent=1) + "\n").encode())  # `fmoe compare` may read it now
    lines = [f"{recipe.num_params():,} parameters, {recipe.num_active_params():,} active per token"]
    lines += [f"  rank {rank} holds experts {ids[0]}-{ids[-1]} of each layer" for rank, ids in enumerate(held) if ids]
    _say(lines)
