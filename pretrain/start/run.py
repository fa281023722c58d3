"""Training of a job on one rank, from the lock of the run's folder to the summary at the end."""

import contextlib
import json
import logging
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

import fmoe
from fmoe.cli import drop_output
from fmoe.errors import UserError, one_line, printable
from fmoe.files import write_atomically
from fmoe.runtime import collectives
from megatron_patch import cpu
from pretrain.callbacks import (
    Callback,
    Checkpointing,
    CollapseWarning,
    Events,
    Phases,
    PlanCheck,
    Profiling,
    StepGuard,
    Stopping,
    TaskEvaluation,
    Tracking,
    TrustRatios,
    Validation,
    Watchdog,
    build_callbacks,
)
from pretrain.checkpoint import latest
from pretrain.config import Recipe, write_recipe
from pretrain.config.imports import digests
from pretrain.data.inputs import Inputs, open_inputs, with_counts
from pretrain.engine import init_parallel
from pretrain.engine.model import check_parts
from pretrain.report import REPORT, write_report
from pretrain.start import lock, process, ranks
from pretrain.start.codes import EXIT_DIVERGED, EXIT_REQUEUE
from pretrain.start.job import Job
from pretrain.start.process import Diverged
from pretrain.start.resume import Finished, Resume, Start, Warm, choose_start, verify_start
from pretrain.tracking import read_metrics
from pretrain.tracking.events import EVENTS
from pretrain.tracking.folder import CHECKPOINTS, CONFIG, METRICS, PROFILES, RUN_INFO, STACKS
from pretrain.trainer import Trainer

logger = logging.getLogger(__name__)


def train(job: Job) -> int:
    """Train a job in this process, which is one of ``job.recipe.parallel.world_size`` ranks.

    Returns:
        0, `EXIT_REQUEUE` if a signal stopped the run, or `EXIT_DIVERGED` if a guard did.

    Raises:
        UserError: the recipe, its inputs or the run's folder are invalid.
    """
    recipe = job.recipe
    folder = job.folder
    cpu.install()
    check_parts(recipe)
    registered = build_callbacks(recipe)
    if recipe.evaluation.tasks:
        registered.insert(0, TaskEvaluation(recipe))  # loads the tasks
    inputs = open_inputs(recipe)

    limit = process.timeout(recipe.guard.hang_minutes)
    meeting = process.meet(limit)
    with contextlib.ExitStack() as stack:
        meeting.first(lambda: stack.enter_context(_locked(job)))
        start = choose_start(job, inputs)
        processes = process.start(limit, meeting)
        start = verify_start(start, job, inputs)
        if isinstance(start, Finished):
            if processes.is_main:
                summarize(recipe)
            return 0
        if not isinstance(start, Resume):  # a resumed run checked its tokens, and recorded their entropy, at its start
            inputs = with_counts(inputs, recipe.model.vocab_size)

        init_parallel(recipe)
        trainer = Trainer(recipe, processes, inputs, callbacks_of(job, start, inputs, registered))
        if isinstance(start, Resume):
            trainer.resume(start.checkpoint)
        elif isinstance(start, Warm):
            trainer.warm_start(start.weights)
        if processes.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            write_recipe(recipe, folder / CONFIG)
        _describe(trainer, folder)
        if isinstance(start, Resume) and processes.is_main:
            changed = f" with {', '.join(start.changes)}" if start.changes else ""
            _print(f"resumes from {start.checkpoint.path}{changed}")

        try:
            trainer.run()
        except Diverged as error:
            if processes.is_main:
                sys.stderr.write(f"pretrain: error: {error}\n")
            return EXIT_DIVERGED
        finally:  # a run that diverged, was stopped or failed gets a report too
            if processes.is_main:
                try:
                    write_report([folder], folder / REPORT, False)
                except Exception as error:  # the run is complete without it
                    text = "the report was not written; retry with fmoe report %s; reason: %s"
                    logger.warning(text, folder, one_line(error))
        if processes.is_main and trainer.is_done:
            summarize(recipe)
        elif processes.is_main:
            newest = latest(folder / CHECKPOINTS)
            _print(f"stopped at step {trainer.step} by a signal; --resume continues from {newest}")
        return 0 if trainer.is_done else EXIT_REQUEUE


@contextlib.contextmanager
def _locked(job: Job) -> Iterator[None]:
    """Lock the run's folder. The launcher of a rank, if there is one, holds the other lock already."""
    if job.refusal:
        raise UserError(job.refusal)
    names = [lock.RUN] if ranks.is_launched() else [lock.LAUNCH, lock.RUN]
    with lock.hold(job.folder, *names):
        yield


def callbacks_of(job: Job, start: Start, inputs: Inputs, registered: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks of a run, in the order in which the trainer calls them.

    Args:
        registered: the callbacks of ``evaluation.tasks`` and ``run.callbacks``.
    """
    recipe = job.recipe
    folder = job.folder
    guard = recipe.guard
    events = Events(folder / EVENTS, None)
    resume_step = None
    if isinstance(start, Resume):
        events = Events(folder / EVENTS, start.checkpoint.path, start.changes)
        resume_step = start.checkpoint.step
    # First, so that a signal during the validation at step 0 is not lost.
    tracking = recipe.tracking
    profiling = Profiling(folder / PROFILES, tracking.profile_step, tracking.profile_steps)
    callbacks: list[Callback] = [profiling, events, StepGuard(guard)]
    if tracking.phases_every:
        callbacks.append(Phases(tracking.phases_every, tracking.slow_rank))
    if tracking.plan:
        callbacks.append(PlanCheck(tracking.plan))
    if guard.collapse_window and recipe.model.layers_with_experts:
        if recipe.model.moe.gate == "random":
            guard = replace(guard, collapse_uniform=0.0)  # its choices are meant to be uniform
        callbacks.append(CollapseWarning(guard, recipe.model.layers_with_experts))
    if inputs.validation is not None:
        callbacks.append(Validation(recipe.train.validation_every, recipe.train.validation_sequences))
    if recipe.optimizer.has_trust_ratios and tracking.trust_every:
        callbacks.append(TrustRatios(tracking.trust_every))
    callbacks += registered  # before tracking, which logs their metrics
    callbacks.append(Tracking(recipe, resume_step))
    if guard.hang_minutes:
        callbacks.append(Watchdog(folder / STACKS, 60 * guard.hang_minutes))
    if recipe.checkpoint.every:  # not watched: a save may take any time
        callbacks.append(Checkpointing(folder / CHECKPOINTS, recipe.checkpoint, events.saved))
        callbacks.append(Stopping())
    return callbacks


def summarize(recipe: Recipe) -> None:
    """Print the final losses of a finished run and the location of its results."""
    folder = Path(recipe.run.folder)
    last: dict = {}
    for record in read_metrics(folder / METRICS):
        last.update(record)
    losses = []
    names = {"loss": "training loss", "val/loss": "validation loss", "corpus/unigram_entropy": "unigram entropy"}
    for key, name in names.items():
        value = last.get(key)
        if isinstance(value, int | float):
            losses.append(f"{name} {value:.4f}")
        elif key in last:
            losses.append(f"{name} {last.get(f'{key}_nonfinite', value)}")
    lines = [
        f"finished at step {last.get('step')}: {', '.join(losses)} (nats per token)",
        f"  metrics      {folder / METRICS}",
    ]
    if (newest := latest(folder / CHECKPOINTS)) is not None:
        lines.append(f"  checkpoint   {newest}")
    hints = {
        REPORT: "open it in a browser",
        "wandb": f"wandb leet {folder / 'wandb'}",
        "tensorboard": f"tensorboard --logdir {folder / 'tensorboard'}",
        "trackio": f"TRACKIO_DIR={folder / 'trackio'} trackio show",
    }
    for name, hint in hints.items():
        if (folder / name).exists():
            lines.append(f"  {Path(name).stem:11}  {folder / name}   ({hint})")
    _print(*lines)


def _print(*lines: str) -> None:
    try:
        sys.stdout.write("\n".join(map(printable, lines)) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader is gone; the run continues
        drop_output()


def _describe(trainer: Trainer, folder: Path) -> None:
    """Write ``run.json``, and print the number of parameters and the experts of each rank. Collective."""
    recipe = trainer.recipe
    processes = trainer.processes
    layers = trainer.engine.moe_layers
    held = [layers[0].first_expert, layers[0].num_local_experts] if layers else [0, 0]
    tensor = torch.tensor(held, dtype=torch.int64, device=processes.device)
    everyone = collectives.gather(tensor)
    if not processes.is_main:
        return
    experts_of_rank = []
    lines = [f"{recipe.num_params():,} parameters, {recipe.num_active_params():,} active per token"]
    for rank, (first, count) in enumerate(each.tolist() for each in everyone):
        experts_of_rank.append(list(range(first, first + count)))
        if count:
            lines.append(f"  rank {rank} holds experts {first}-{first + count - 1} of each layer")
    info = {
        "world_size": processes.world_size,
        "device": processes.device.type,
        "experts_of_rank": experts_of_rank,
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
    write_atomically(folder / RUN_INFO, (json.dumps(info, indent=1) + "\n").encode())  # `fmoe compare` may read it now
    _print(*lines)
