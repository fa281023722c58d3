"""Choice of how a run starts, and checks that recipe and data allow it.

Resuming (``--resume``) restores everything: weights, optimizer, schedule, random generators, position in the data. A
warm start (``train.init_from``) loads the weights and starts a new run at step 0.
"""

import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmoe.errors import UserError
from pretrain.checkpoint import Checkpoint, latest, open_checkpoint
from pretrain.checkpoint.folders import MANIFEST, set_aside, step_folders, step_of
from pretrain.checkpoint.ranks import Ranks
from pretrain.config import Recipe
from pretrain.config.imports import digests
from pretrain.config.keys import check_path
from pretrain.config.renamed import with_new_names
from pretrain.config.sections import keys
from pretrain.data.inputs import Inputs
from pretrain.start.job import Job
from pretrain.tracking.folder import CHECKPOINTS, METRICS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """The run is at its last step: nothing is left to train."""


@dataclass(frozen=True)
class Resume:
    """The run continues from a checkpoint. ``changes`` are those of the recipe since, for people."""

    checkpoint: Checkpoint
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Warm:
    """A new run begins with the weights of a checkpoint."""

    weights: Checkpoint


@dataclass(frozen=True)
class Fresh:
    """A new run begins with new weights."""


Start = Finished | Resume | Warm | Fresh


def choose_start(job: Job, inputs: Inputs) -> Start:
    """Choose how a run starts. Reads no tensors; `verify_start` verifies the choice.

    With ``--fallback``, the result is never `Finished`: the newest checkpoint may be damaged.

    Raises:
        UserError: as `find_checkpoint`; recipe or data do not fit the checkpoint; or ``train.init_from`` is not a
            checkpoint.
    """
    checkpoint = find_checkpoint(job.folder, job.resume, fallback=job.fallback)
    if checkpoint is not None:
        start = _continue(job, inputs, checkpoint)
        return Resume(checkpoint, ()) if job.fallback else start
    if job.recipe.train.init_from is None:
        return Fresh()
    try:
        return Warm(open_checkpoint(job.recipe.train.init_from))
    except UserError as error:
        raise UserError(f"train.init_from: {error}") from error


def verify_start(start: Start, job: Job, inputs: Inputs) -> Start:
    """Verify the SHA-256 of all files that a run starts from. Collective: each rank verifies some.

    Returns:
        The start. With ``--fallback``, it may be another one, from an older checkpoint.

    Raises:
        UserError: on every rank, if a file is damaged, or only some ranks have found a checkpoint.
    """
    ranks = Ranks()
    seen = ranks.total(isinstance(start, Finished | Resume))  # all ranks have then read the folder: one may write to it
    if seen not in (0, ranks.size):
        raise UserError(
            f"run.folder={job.folder}: {seen} of {ranks.size} ranks see a checkpoint: all ranks must share the folder"
        )
    if isinstance(start, Warm):
        return Warm(verify_together(start.weights.path))
    if isinstance(start, Resume) and job.resume is not None:
        return _continue(job, inputs, agree_on_intact(job.folder, job.resume, fallback=job.fallback))
    return start


def _continue(job: Job, inputs: Inputs, checkpoint: Checkpoint) -> Finished | Resume:
    recipe = job.recipe
    check_resumable(recipe, checkpoint)
    check_data(recipe, inputs, checkpoint)
    if checkpoint.step < recipe.train.steps:
        return Resume(checkpoint, tuple(changes(recipe, checkpoint)))
    if latest(job.folder / CHECKPOINTS) is None:
        raise UserError(f"{checkpoint.path} is already at train.steps={recipe.train.steps}: increase train.steps")
    return Finished()


def check_resumable(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Check that this recipe can continue a checkpoint.

    Raises:
        UserError: the checkpoint has only weights; it is beyond ``train.steps``; or the recipe changes a key that must
            stay the same (docs/recipe-reference.md lists the keys that may change).
    """
    if checkpoint.state.get("weights_only"):
        raise UserError(f"{checkpoint.path} has only weights: start a run from them with --train.init-from")
    for key, (value, was) in differences(recipe, checkpoint).items():
        if not keys()[key].on_resume:
            raise UserError(
                f"{key}={value} differs from {was}, the value in {checkpoint.path}: use the old value to resume"
            )
    if checkpoint.step > recipe.train.steps:
        raise UserError(
            f"train.steps={recipe.train.steps} is less than the {checkpoint.step} steps of {checkpoint.path}: "
            "increase train.steps"
        )


def differences(recipe: Recipe, checkpoint: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ from the checkpoint's, with both values: ``{"train.steps": (300, 40)}``.

    A key that did not exist when the checkpoint was written had, in effect, today's default.
    """
    saved = with_new_names(checkpoint.state["recipe"])
    differing = {}
    for name, key in keys().items():
        was = saved.get(name.partition(".")[0], {}).get(key.name, key.default)
        value = recipe.value(name)
        if was != value:
            differing[name] = (value, was)
    return differing


def changes(recipe: Recipe, checkpoint: Checkpoint) -> list[str]:
    """Return the recipe's changes since the checkpoint, each as ``train.steps=300 (was 40)``.

    Left out are ``train.init_from`` and the sections ``checkpoint`` and ``tracking``. Of the section ``run``, only
    ``callbacks``, ``callback_options``, and new and changed files of ``imports`` are listed.
    """
    unlisted = ("checkpoint.", "tracking.", "run.folder", "run.imports", "train.init_from")
    lines = []
    for key, (value, was) in differences(recipe, checkpoint).items():
        if not key.startswith(unlisted):
            lines.append(f"{key}={value} (was {was})")
    before = checkpoint.state.get("imports", {})
    for file, digest in digests(recipe).items():  # found by path, or by name if the file has moved
        moved = [old for path, old in before.items() if Path(path).name == Path(file).name]
        if file not in before and not moved:
            lines.append(f"{Path(file).name} of run.imports (new)")
        elif before.get(file, moved[0] if len(moved) == 1 else digest) != digest:
            lines.append(f"{Path(file).name} of run.imports (its content has changed)")
    return lines


def data_state(recipe: Recipe, inputs: Inputs, step: int) -> dict:
    """Return the position in the data after ``step`` steps, and the digests that identify the data."""
    return {
        "next_sample": recipe.batches.first(step),
        "samples_per_epoch": inputs.train.samples_per_epoch,
        "corpora": list(inputs.fingerprints),
        "tokenizer": inputs.tokenizer_fingerprint,
    }


def check_data(recipe: Recipe, inputs: Inputs, checkpoint: Checkpoint) -> None:
    """Check that the data are those of the checkpoint, and that training continues with the next sample.

    Corpora and tokenizer are compared by SHA-256, so they may be at another path. A file without a recorded SHA-256
    must be at the same path.

    Raises:
        UserError: the data have changed, or the recipe's batch sizes lead to another next sample.
    """
    was = checkpoint.state["data"]
    now = data_state(recipe, inputs, checkpoint.step)
    if was["next_sample"] != now["next_sample"]:
        raise UserError(
            f"{checkpoint.path} continues with sample {was['next_sample']}, but after step {checkpoint.step} this "
            f"recipe (train.global_batch={recipe.train.global_batch}) continues with sample {now['next_sample']}: "
            "restore the checkpoint's batch sizes"
        )
    old = Recipe().values()["data"] | checkpoint.state["recipe"].get("data", {})
    number = len(recipe.data.train)
    if number != len(old["train"]):
        raise UserError(
            f"data.train has {number} corpora, but had {len(old['train'])} when {checkpoint.path} was written: restore "
            "data.train to resume"
        )
    files = [("data.tokenizer", recipe.data.tokenizer, now["tokenizer"], old["tokenizer"], was.get("tokenizer"))]
    for corpus in itertools.zip_longest(recipe.data.train, now["corpora"], old["train"], was["corpora"]):
        files.append(("data.train", *corpus))
    for key, path, digest, old_path, old_digest in files:
        if digest and old_digest and digest != old_digest:
            raise UserError(
                f"{key} has changed since {checkpoint.path} was written: the SHA-256 of {path} begins with "
                f"{digest[:12]}, that of {old_path} began with {old_digest[:12]}; use the old file to resume"
            )
        is_same_path = os.path.realpath(path) == os.path.realpath(old_path)
        if not (digest and old_digest) and not is_same_path:
            raise UserError(
                f"{key}={path} differs from {old_path}, the value in {checkpoint.path}: use the old value to resume"
            )
    if was["samples_per_epoch"] != now["samples_per_epoch"]:
        raise UserError(
            f"data.train has changed since {checkpoint.path} was written: "
            f"it has {now['samples_per_epoch']} samples per epoch, but had {was['samples_per_epoch']}; restore it to "
            "resume"
        )


def find_checkpoint(folder: Path, resume: str | None, *, fallback: bool = False) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None to start a new run. No tensors are read.

    Args:
        folder: folder of the run.
        resume: None for a new run. "run" for the newest checkpoint in ``folder``. "auto" for the same or, if there is
            none, a new run. Any other value is the path of a checkpoint, of a folder of checkpoints, or of another run.
        fallback: skip damaged checkpoints.

    Raises:
        UserError: ``resume`` is None, but the folder holds a run already; ``resume`` is "run" or a path, but there is
            no checkpoint; the checkpoint is damaged or, with ``fallback``, all are; ``resume`` is a path, but
            ``folder`` has checkpoints and its newest one is not the one at the path.
    """
    newest = next(iter(step_folders(folder / CHECKPOINTS)), None)
    if resume is None:
        if newest is not None:
            raise UserError(
                f"run.folder={folder} holds a run already: continue it with --resume, or name another folder"
            )
        if (folder / METRICS).exists():
            raise UserError(
                f"run.folder={folder} holds a run without a checkpoint: start it again with --resume auto, which "
                f"keeps its {METRICS} as {METRICS}.old, or name another folder"
            )
        return None
    if resume == "auto" and newest is None:
        return None
    if resume == "run" and newest is None and not step_folders(folder) and not (folder / MANIFEST).exists():
        raise UserError(f"run.folder={folder} has no checkpoint yet: start the run with --resume auto")
    candidates = _candidates(folder, resume, fallback)
    # Checkpoints are never overwritten, and metrics have no step twice: resuming from elsewhere needs another folder.
    is_elsewhere = resume not in ("auto", "run")
    if is_elsewhere and newest is not None and os.path.realpath(candidates[0]) != os.path.realpath(newest):
        raise UserError(
            f"run.folder={folder} holds a run whose newest checkpoint is {newest.name}: "
            f"to resume from {candidates[0]}, name another run.folder"
        )
    return _first_intact(candidates, open_checkpoint, fallback)[0]


def agree_on_intact(folder: Path, resume: str, *, fallback: bool = False) -> Checkpoint:
    """Return the checkpoint to resume from, after verifying the SHA-256 of all its files. Collective: each rank
    verifies some of the files.

    With ``fallback``, damaged checkpoints are skipped with a warning. Those in the run's own folder are renamed
    ``step-N.damaged``, because the run will save their steps again.

    Args:
        folder, resume: as in `find_checkpoint`.

    Raises:
        UserError: on every rank, if the checkpoint is damaged or, with ``fallback``, if all are. The message names a
            file.
    """
    candidates = _candidates(folder, resume, fallback)
    checkpoint, damaged = _first_intact(candidates, verify_together, fallback)
    ranks = Ranks()
    with ranks.together():
        for path, error in damaged.items():
            if ranks.rank == 0:
                logger.warning("%s; trying the previous checkpoint", error)
                if os.path.realpath(path.parent) == os.path.realpath(folder / CHECKPOINTS):
                    set_aside(path)
    return checkpoint


def verify_together(path: Path) -> Checkpoint:
    """Open a checkpoint and verify the SHA-256 of all its files. Collective: each rank verifies some.

    Raises:
        UserError: on every rank, if any rank finds damage.
    """
    ranks = Ranks()
    with ranks.together():
        checkpoint = open_checkpoint(path)
        checkpoint.verify(ranks.rank, ranks.size)
    return checkpoint


def _candidates(folder: Path, resume: str, fallback: bool) -> list[Path]:
    """Return the folders of the checkpoints to try, newest first. Without ``fallback``, return only the newest."""
    if resume not in ("auto", "run"):
        check_path("--resume", resume)
    path = folder if resume in ("auto", "run") else Path(resume)
    step = step_of(path.name)
    if step is not None and path.is_dir():
        candidates = [path] + [other for other in step_folders(path.parent) if (step_of(other.name) or 0) < step]
    elif (path / MANIFEST).is_file():
        candidates = [path]
    else:
        candidates = step_folders(path)
    if not candidates:
        open_checkpoint(path)  # raises the error
    return candidates if fallback else candidates[:1]


def _first_intact(
    candidates: list[Path], open_one: Callable[[Path], Checkpoint], fallback: bool
) -> tuple[Checkpoint, dict[Path, UserError]]:
    """Return the first checkpoint that opens, and the errors of those before."""
    errors: dict[Path, UserError] = {}
    for path in candidates:
        try:
            return open_one(path), errors
        except UserError as error:
            errors[path] = error
    remedy = f"no checkpoint is intact (tried {len(errors)})"
    if not fallback:
        remedy = "to use the newest intact checkpoint, add --fallback"
    raise UserError(f"{errors[candidates[0]]}; {remedy}")
