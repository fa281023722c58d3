"""Trackers of a run's metrics: ``metrics.jsonl`` always, the console, and wandb, TensorBoard, trackio where chosen.

A tracker takes ``log(step, metrics)``, any number of times a step, and ``close(ok)``. Only one rank builds trackers.

Every number is for one optimizer step; names are paths, so that dashboards group them by their first part. They are the
same in every tracker: docs/tracking.md lists them with their units.
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
    """The trackers of a run, all of them writing into its folder.

    Args:
        run_folder: gets ``metrics.jsonl`` and, where chosen, ``wandb/``, ``tensorboard/`` and ``trackio/``.
        wandb: log to wandb, offline where there is no API key.
        tensorboard: log to TensorBoard.
        trackio: log to trackio.
        console_every: steps from one console line to the next.
        total_steps: the run's last step.
        config: the resolved recipe, as values that JSON can hold.
        resume_step: step of the checkpoint that the run resumes from; None for a new run. ``metrics.jsonl`` drops later
            steps, TensorBoard hides them, wandb (offline) and trackio begin another run of the same group.
        picture_every: steps from one picture of the experts' load in all layers to the next; 0 for none.
        project: wandb's and trackio's project.
        name: the run's name there, by default the folder's.

    Raises:
        UserError: ``console_every`` is below 1, or the record to go on with is damaged.
        MissingPackageError: wandb, TensorBoard or trackio is chosen and not installed.
    """
    # What the user can get wrong comes before the first file is touched.
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
    name = name or run_folder.name
    if wandb:
        from pretrain.tracking.wandb import WandbTracker

        trackers.add_optional(
            lambda: WandbTracker(run_folder, config=config, resume_step=resume_step, project=project, name=name),
            label="WandbTracker",
        )
    if tensorboard:
        from pretrain.tracking.tensorboard import TensorBoardTracker

        trackers.add_optional(
            lambda: TensorBoardTracker(run_folder / "tensorboard", config=config, resume_step=resume_step),
            label="TensorBoardTracker",
        )
    if trackio:
        from pretrain.tracking.trackio import TrackioTracker

        trackers.add_optional(
            lambda: TrackioTracker(run_folder, config=config, resume_step=resume_step, project=project, name=name),
            label="TrackioTracker",
        )
    return trackers
