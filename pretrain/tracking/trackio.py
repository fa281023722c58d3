"""trackio: a local database with a local server.

The database is in ``TRACKIO_DIR``, which several runs may share, or by default in ``RUN/trackio``.
``TRACKIO_DIR=RUN/trackio trackio show`` shows it. Data stays on the machine unless ``TRACKIO_SPACE_ID`` or
``TRACKIO_SERVER_URL`` is set.
"""

import contextlib
import importlib.util
import io
import os
from pathlib import Path
from typing import Any

from fmoe.errors import require
from pretrain.tracking.loads import drawn
from pretrain.tracking.tracker import Metrics, kept_id

ID_FILE = "trackio_id.txt"


def check_installed(purpose: str) -> None:
    """Raise MissingPackageError unless trackio is installed. trackio is not imported, because that takes seconds."""
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec("trackio") is not None:
            return
    require("trackio", "trackio", purpose)


class TrackioTracker:
    """Log to trackio.

    trackio cannot remove logged steps, so a resumed run is a new trackio run. The id in the run folder puts all trackio
    runs of one run into a group.

    Args:
        run_folder: existing folder for ``trackio_id.txt`` and, unless ``TRACKIO_DIR`` is set, ``trackio/``.
        config: the resolved recipe.
        resume_step: step of the checkpoint that the run resumes from; None for a new run, which gets a new group.
        project: trackio's project.
        name: name of the run; ``-from-STEP`` is appended for a resumed run.

    Raises:
        MissingPackageError: trackio is not installed.
    """

    def __init__(
        self, run_folder: Path, *, config: dict[str, Any], resume_step: int | None, project: str, name: str
    ) -> None:
        # trackio reads the variable once, at import.
        os.environ.setdefault("TRACKIO_DIR", str((run_folder / "trackio").absolute()))
        if "TRACKIO_SPACE_ID" not in os.environ:
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # otherwise trackio asks the hub for the user's name
        self._trackio = require("trackio", "trackio", "tracking with trackio")
        group = kept_id(run_folder / ID_FILE, is_new=resume_step is None)
        with contextlib.redirect_stdout(io.StringIO()):  # init prints a greeting
            self._run = self._trackio.init(
                project=project,
                name=name if resume_step is None else f"{name}-from-{resume_step}",
                group=group,
                config=config,
                embed=False,
                # Other trackers have no system metrics.
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, step: int, metrics: Metrics) -> None:
        """Log a step. Lists become histograms of at most 512 bars, and the load of all layers becomes a picture."""
        self._run.log(drawn(metrics, self._trackio), step=step)

    def close(self, ok: bool = True) -> None:
        """Wait until everything is written."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()
