"""Choice of the checkpoint that a run resumes from, and checks that recipe and data allow it.

Resuming (``--resume``) restores everything: weights, optimizer, schedule, random generators, position in the data. A
warm start (``train.init_from``) loads the weights and starts a new run at step 0.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fmoe.errors import UserError
from pretrain.checkpoint import Checkpoint, open_checkpoint
from pretrain.checkpoint.folders import MANIFEST, set_aside, step_folders, step_of
from pretrain.checkpoint.ranks import Ranks
from pretrain.config import Recipe
from pretrain.config.checks import check_path
from pretrain.config.imports import digests
from pretrain.data.inputs import Inputs
from pretrain.tracking.folder import CHECKPOINTS, METRICS

# Keys that may change when a run resumes, and the effect of a change. Any other key would change the model, the data or
# their order. docs/checkpoints.md has the same table.
MAY_CHANGE = {
    "run.*": "where the run writes; plugins and callbacks, from here on",
    "parallel.*": "the split; losses agree within rounding",
    "optimizer.*": "from here on; the schedule continues at its step. `optimizer.name` may not change",
    "checkpoint.*": "from here on",
    "guard.*": "from here on; the spike guard keeps its window of steps",
    "tracking.*": "from here on",
    "model.eval_capacity_factor": "validation only",
    "model.mtp_loss": "from here on",
    "data.validation": "validation only",
    "data.prefetch": "the time at which batches are built, not their content",
    "train.steps": (
        "the run ends later or earlier; without `optimizer.decay_steps`, the decay also ends at the new last step"
    ),
    "train.micro_batch": "losses agree within rounding",
    "train.validation_every": "validation only",
    "train.validation_sequences": "validation only",
    "train.init_from": "none: only the start of a new run uses it",
}
# Exceptions to `MAY_CHANGE`: another optimizer has another state.
MAY_NOT_CHANGE = ("optimizer.name",)
# Keys of files, which `check_data` compares by content: their paths may change.
_BY_CONTENT = ("data.train", "data.tokenizer")

# Key of a checkpoint's state with the settings of an imported model that only an export uses.
PUBLISHED = "published"
# Further keys of generation_config.json with token ids.
_ID_KEYS = ("suppress_tokens", "begin_suppress_tokens", "sequence_bias", "constraints")

logger = logging.getLogger(__name__)


def check_resumable(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Check that this recipe can continue a checkpoint.

    Raises:
        UserError: the checkpoint has only weights; it is beyond ``train.steps``; or the recipe changes a key that must
            stay the same (docs/checkpoints.md lists the keys that may change).
    """
    if checkpoint.state.get("weights_only"):
        raise UserError(f"{checkpoint.path} has only weights: start a run from them with --train.init-from")
    # A key that did not exist when the checkpoint was written had, in effect, today's default.
    now, then, defaults = asdict(recipe), checkpoint.state["recipe"], asdict(Recipe())
    for section, values in now.items():
        for name, value in values.items():
            key = f"{section}.{name}"
            if key not in MAY_NOT_CHANGE and (key in MAY_CHANGE or f"{section}.*" in MAY_CHANGE):
                continue
            if key in _BY_CONTENT:
                continue
            was = then.get(section, {}).get(name, defaults[section][name])
            if was != value:
                raise UserError(
                    f"{key}={value} differs from {was}, the value in {checkpoint.path}: use the old value to resume"
                )
    if checkpoint.step > recipe.train.steps:
        raise UserError(
            f"train.steps={recipe.train.steps} is less than the {checkpoint.step} steps of {checkpoint.path}: "
            "increase train.steps"
        )


def changes(recipe: Recipe, checkpoint: Checkpoint) -> list[str]:
    """Return the recipe's changes since the checkpoint, each as ``train.steps=300 (was 40)``.

    Left out are ``train.init_from`` and the sections ``checkpoint`` and ``tracking``. Of the section ``run``, only
    ``callbacks``, ``callback_options``, and new and changed files of ``imports`` are listed.
    """
    now, then = asdict(recipe), checkpoint.state["recipe"]
    keys = [
        f"{section}.{name}={value} (was {then[section][name]})"
        for section in ("run", "model", "data", "parallel", "optimizer", "train", "guard")
        for name, value in now[section].items()
        if (section != "run" or name in ("callbacks", "callback_options"))
        and name in then.get(section, {})
        and then[section][name] != value
        and (section, name) != ("train", "init_from")
    ]
    before = checkpoint.state.get("imports", {})
    for file, digest in digests(recipe).items():  # found by path, or by name if the file has moved
        moved = [old for path, old in before.items() if Path(path).name == Path(file).name]
        if file not in before and not moved:
            keys.append(f"{Path(file).name} of run.imports (new)")
        elif before.get(file, moved[0] if len(moved) == 1 else digest) != digest:
            keys.append(f"{Path(file).name} of run.imports (its content has changed)")
    return keys


def without_ids(published: Mapping[str, Any]) -> dict[str, Any]:
    """Return `PUBLISHED` settings without token ids, for a model with another tokenizer."""
    generation = published.get("generation_config", {})
    return {
        "generation_config": {
            key: value
            for key, value in generation.items()
            if not (key.endswith(("_token_id", "_token_ids", "_words_ids")) or key in _ID_KEYS or "forced_" in key)
        }
    }


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
    then = asdict(Recipe())["data"] | checkpoint.state["recipe"].get("data", {})
    was, now = checkpoint.state["data"], data_state(recipe, inputs, checkpoint.step)
    if was["next_sample"] != now["next_sample"]:
        raise UserError(
            f"{checkpoint.path} continues with sample {was['next_sample']}, but after step {checkpoint.step} this "
            f"recipe (train.global_batch={recipe.train.global_batch}) continues with sample {now['next_sample']}: "
            "restore the checkpoint's batch sizes"
        )
    number, old_number = len(recipe.data.train), len(then["train"])
    if number != old_number:
        raise UserError(
            f"data.train has {number} corpora, but had {old_number} when {checkpoint.path} was written: restore "
            "data.train to resume"
        )
    digests = [*was["corpora"], *[None] * (number - len(was["corpora"]))]
    for files in zip(recipe.data.train, then["train"], now["corpora"], digests, strict=True):
        _check_same("data.train", *files, checkpoint)
    files = recipe.data.tokenizer, then["tokenizer"], now["tokenizer"], was.get("tokenizer")
    _check_same("data.tokenizer", *files, checkpoint)
    if was["samples_per_epoch"] != now["samples_per_epoch"]:
        raise UserError(
            f"data.train has changed since {checkpoint.path} was written: "
            f"it has {now['samples_per_epoch']} samples per epoch, but had {was['samples_per_epoch']}; restore it to "
            "resume"
        )


def _check_same(
    key: str, path: str, old_path: str, digest: str | None, old_digest: str | None, checkpoint: Checkpoint
) -> None:
    """Raise UserError unless both files have the same SHA-256 or, if one is unknown, the same path."""
    if digest and old_digest:
        if digest != old_digest:
            raise UserError(
                f"{key} has changed since {checkpoint.path} was written: the SHA-256 of {path} begins with "
                f"{digest[:12]}, that of {old_path} began with {old_digest[:12]}; use the old file to resume"
            )
    elif os.path.realpath(path) != os.path.realpath(old_path):
        raise UserError(
            f"{key}={path} differs from {old_path}, the value in {checkpoint.path}: use the old value to resume"
        )


def check_exists(folder: Path, resume: str | None) -> None:
    """Raise UserError if ``--resume`` has no value (``resume="run"``) and the run's folder does not exist."""
    if resume == "run" and not folder.exists():
        raise UserError(f"run.folder={folder} does not exist: omit --resume to start a new run there")


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
    check_exists(folder, resume)
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
    problem = None
    for path in candidates:
        try:
            return open_checkpoint(path)
        except UserError as error:
            problem = problem or error
    raise _refused(problem, candidates, fallback)


def check_seen_by_all(folder: Path, checkpoint: Checkpoint | None) -> None:
    """Raise on every rank if only some ranks have found a checkpoint. Collective.

    Raises:
        UserError: ``folder`` is not the same on all ranks, such as a local disk of each node.
    """
    ranks = Ranks()
    seen = ranks.total(int(checkpoint is not None))
    if seen not in (0, ranks.size):
        raise UserError(
            f"run.folder={folder}: {seen} of {ranks.size} ranks see a checkpoint: all ranks must share the folder"
        )


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
    damaged: list[Path] = []
    problem = None
    for path in candidates:
        try:
            checkpoint = verify_together(path)
            break
        except UserError as error:
            damaged.append(path)
            problem = problem or error
            if fallback and Ranks().rank == 0:
                logger.warning("%s; trying the previous checkpoint", error)
    else:
        raise _refused(problem, candidates, fallback)
    ranks = Ranks()
    with ranks.together():
        for path in damaged:
            if ranks.rank == 0 and os.path.realpath(path.parent) == os.path.realpath(folder / CHECKPOINTS):
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
    if (step := step_of(path.name)) is not None and path.is_dir():
        found = [path] + [other for other in step_folders(path.parent) if (step_of(other.name) or 0) < step]
    elif (path / MANIFEST).is_file():
        found = [path]
    else:
        found = step_folders(path) or step_folders(path / CHECKPOINTS)
    if not found:
        open_checkpoint(path)  # raises the error
    return found if fallback else found[:1]


def _refused(problem: UserError | None, candidates: list[Path], fallback: bool) -> UserError:
    if not fallback:
        return UserError(f"{problem}; to use the newest intact checkpoint, add --fallback")
    return UserError(f"{problem}; no checkpoint is intact (tried {len(candidates)})")
