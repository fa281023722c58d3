"""wandb, online with an API key and offline without one.

An offline run is in ``RUN/wandb/offline-run-*/run-ID.wandb``: ``wandb leet RUN/wandb`` shows it, ``wandb leet inspect
--summary RUN/wandb`` prints it, ``wandb sync`` uploads it later.
"""

import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from fmoe.errors import require
from pretrain.tracking.loads import LoadMatrix, bars
from pretrain.tracking.tracker import Metrics, kept_id

ID_FILE = "wandb_id.txt"

logger = logging.getLogger(__name__)


class WandbTracker:
    """Logs to wandb. The id of the first run is kept in the run folder.

    Online, a resumed run continues the wandb run of that id: wandb's server keeps the steps that it has. Offline, where
    no logged step can be taken back, it is a new wandb run in the group of that id.

    Nothing is printed and nothing is asked. Without an API key, or with ``WANDB_MODE=offline``, nothing leaves the
    machine.

    Args:
        run_folder: an existing folder; gets ``wandb/`` and ``wandb_id.txt``.
        config: the resolved recipe.
        resume_step: step of the checkpoint that the run resumes from; None for a new run, which gets a new id.
        project: wandb's project.
        name: the run's name; a new wandb run of a resumed run has ``-from-STEP`` behind it.

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
        # wandb reports its own crashes to its makers unless told otherwise: a run leaves that to who asks for it.
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
            reinit="create_new",  # never the run that other code of this process may have open
            # console="off": wandb would wrap stdout, under the feet of the console's progress line.
            settings=self._wandb.Settings(silent=True, console="off", save_code=False),
        )
        if mode == "online":
            logger.info("wandb run: %s", self._run.url)

    def log(self, step: int, metrics: Metrics) -> None:
        """Logs a step. Lists become histograms with a bar per element, over time a heatmap in wandb; the load of all
        layers a picture with a slider for the step. wandb joins calls with the same step."""
        self._run.log({key: self._value(value) for key, value in metrics.items() if value is not None}, step=step)

    def close(self, ok: bool = True) -> None:
        """Finishes the run with exit code 0 or 1, after what is left to write or upload."""
        self._run.finish(exit_code=0 if ok else 1)

    def _value(self, value: Any) -> Any:
        if isinstance(value, LoadMatrix):
            return self._wandb.Image(value.pixels_HWC, caption=value.caption)
        return self._wandb.Histogram(np_histogram=bars(value)) if isinstance(value, list | tuple) else value


def _mode(wandb: ModuleType) -> str:
    """Return the mode of WANDB_MODE or `wandb offline`; offline without credentials. Asks neither user nor network."""
    # Settings of the session, not of the run: login would greet on stderr without them.
    mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
    if mode in ("offline", "dryrun", "disabled") or wandb.login(prompt=False, verify=False):
        return mode
    return "offline"
