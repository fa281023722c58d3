"""wandb, online with an API key and offline without one.

An offline run is in ``RUN/wandb/offline-run-*/run-ID.wandb``. ``wandb leet RUN/wandb`` shows it, ``wandb leet inspect
--summary RUN/wandb`` prints it, and ``wandb sync`` uploads it later.
"""

import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from fmoe.errors import require
from pretrain.tracking.loads import drawn
from pretrain.tracking.tracker import Metrics, kept_id

ID_FILE = "wandb_id.txt"

logger = logging.getLogger(__name__)


class WandbTracker:
    """Log to wandb. Without an API key, or with ``WANDB_MODE=offline``, data stays on the machine.

    The run folder keeps the id of its first wandb run. Online, a resumed run continues the wandb run with this id, and
    the server keeps the steps that it already has. Offline, logged steps cannot be removed. A resumed run is then a new
    wandb run in a group, which is named by the id or by ``WANDB_RUN_GROUP``. wandb neither prints nor prompts.

    Args:
        run_folder: existing folder for ``wandb/`` and ``wandb_id.txt``.
        config: the resolved recipe.
        resume_step: step of the checkpoint that the run resumes from; None for a new run, which gets a new id.
        project: wandb's project.
        name: name of the run; ``-from-STEP`` is appended for a new wandb run of a resumed run.

    Raises:
        MissingPackageError: wandb is not installed.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        config: dict[str, Any],
        resume_step: int | None,
        project: str = "fmoe",
        name: str | None = None,
    ) -> None:
        # wandb uploads its own crash reports by default.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = require("wandb", "pretrain", "tracking with wandb")
        mode = _mode(self._wandb)
        group = kept_id(run_folder / ID_FILE, is_new=resume_step is None)
        is_part = resume_step is not None and mode != "online"
        if is_part and name is not None:
            name = f"{name}-from-{resume_step}"
        self._run = self._wandb.init(
            dir=str(run_folder),
            id=None if is_part else group,
            group=os.environ.get("WANDB_RUN_GROUP") or group,
            resume="allow" if mode == "online" else None,
            mode=mode,
            project=project,
            name=name,
            config=config,
            reinit="create_new",  # never reuse a run that other code of this process has open
            # console="off": wandb would wrap stdout and break the progress line.
            settings=self._wandb.Settings(silent=True, console="off", save_code=False),
        )
        if mode == "online":
            logger.info("wandb run: %s", self._run.url)

    def log(self, step: int, metrics: Metrics) -> None:
        """Log a step. Lists become histograms of at most 512 bars, and the load of all layers becomes a picture.

        wandb shows the histograms as a heatmap over time, and merges calls with the same step.
        """
        self._run.log(drawn(metrics, self._wandb), step=step)

    def close(self, ok: bool = True) -> None:
        """Finish the run with exit code 0 or 1, after pending writes and uploads."""
        self._run.finish(exit_code=0 if ok else 1)


def _mode(wandb: ModuleType) -> str:
    """Return the mode set by ``WANDB_MODE`` or ``wandb offline``; "offline" without an API key."""
    # Settings of the session, not of the run: without them, login prints to stderr.
    mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
    if mode in ("offline", "dryrun", "disabled") or wandb.login(prompt=False, verify=False):
        return mode
    return "offline"
