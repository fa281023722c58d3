"""Trackers of a run's metrics: ``metrics.jsonl``, the console, and optionally wandb, TensorBoard and trackio.

A tracker has ``log(step, metrics)``, which may be called any number of times per step, and ``close(ok)``. Only rank 0
builds trackers.

Names of metrics are paths, which dashboards group by the first component. They are the same in every tracker:
`pretrain.tracking.metrics` declares them.
"""

from pathlib import Path
from typing import Any

from fmoe.errors import require
from pretrain.tracking.console import ConsoleTracker
from pretrain.tracking.folder import METRICS
from pretrain.tracking.jsonl import JsonlTracker, read_metrics
from pretrain.tracking.loads import LoadPictures
from pretrain.tracking.tracker import Metrics, Tracker, Trackers
from pretrain.tracking.trackio import check_installed

__all__ = ["JsonlTracker", "Metrics", "Tracker", "Trackers", "build_trackers", "read_metrics"]


def build_trackers(
    run_folder: Path,
    *,
    wandb: bool,
    tensorboard: bool,
    trackio: bool = False,
    console_every: int,
    total_steps: int,
    config: dict[str, Any],
    resume_step: int | None,
    picture_every: int = 0,
    project: str = "fmoe",
    name: str | None = None,
) -> Trackers:
    """Build the trackers of a run, which write into its folder.

    On a resume, ``metrics.jsonl`` drops steps after the checkpoint, and TensorBoard hides them. wandb (offline) and
    trackio begin another run of the same group.

    Args:
        run_folder: folder for ``metrics.jsonl`` and the optional ``wandb/``, ``tensorboard/`` and ``trackio/``.
        wandb: log to wandb, offline without an API key.
        tensorboard: log to TensorBoard.
        trackio: log to trackio.
        console_every: steps between console lines.
        total_steps: the run's last step.
        config: the resolved recipe, as JSON values.
        resume_step: step of the checkpoint that the run resumes from; None for a new run.
        picture_every: steps between pictures of the expert load; 0 for none.
        project: project name in wandb and trackio.
        name: name of the run in wandb and trackio; by default the folder's name.

    Raises:
        UserError: ``console_every`` is below 1, or the ``metrics.jsonl`` to resume is damaged.
        MissingPackageError: a selected tracker is not installed.
    """
    # Validate before the first file is touched.
    console = ConsoleTracker(total_steps=total_steps, every=console_every, first_step=resume_step or 0)
    if wandb:
        require("wandb", "pretrain", "tracking with wandb")
    if tensorboard:
        require("tensorboard", "tensorboard", "tracking with TensorBoard")
    if trackio:
        check_installed("tracking with trackio")

    run_folder.mkdir(parents=True, exist_ok=True)
    trackers = Trackers(
        required=[JsonlTracker(run_folder / METRICS, resume_step)],
        optional=[console],
        view=LoadPictures(picture_every if wandb or tensorboard or trackio else 0, total_steps),
    )
    run: dict[str, Any] = {"config": config, "resume_step": resume_step}
    names = {"project": project, "name": name or run_folder.name}
    if wandb:
        from pretrain.tracking.wandb import WandbTracker

        trackers.add_optional(WandbTracker, run_folder, **run, **names)
    if tensorboard:
        from pretrain.tracking.tensorboard import TensorBoardTracker

        trackers.add_optional(TensorBoardTracker, run_folder / "tensorboard", **run)
    if trackio:
        from pretrain.tracking.trackio import TrackioTracker

        trackers.add_optional(TrackioTracker, run_folder, **run, **names)
    return trackers
