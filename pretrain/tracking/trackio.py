"""trackio: a database of this machine that a local server shows.

The database lies in ``RUN/trackio``, unless ``TRACKIO_DIR`` names a folder for several runs; ``TRACKIO_DIR=RUN/trackio
trackio show`` shows it. Nothing leaves the machine, unless trackio's own variables (``TRACKIO_SPACE_ID``,
``TRACKIO_SERVER_URL``) say where to.
"""

import contextlib
import importlib.util
import io
import os
from pathlib import Path
from typing import Any

from fmoe.errors import require
from pretrain.tracking.loads import LoadMatrix, bars
from pretrain.tracking.tracker import Metrics, kept_id

ID_FILE = "trackio_id.txt"


def check_installed(purpose: str) -> None:
    """Raises MissingPackageError without trackio. It is not imported: that takes seconds, and is for one rank."""
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec("trackio") is not None:
            return
    require("trackio", "trackio", purpose)


class TrackioTracker:
    """Logs to trackio. A resumed run is a new trackio run, because no logged step can be taken back; an id in the run
    folder groups them.

    Args:
        run_folder: an existing folder; gets ``trackio_id.txt`` and ``trackio/``, unless ``TRACKIO_DIR`` is set.
        config: the resolved recipe.
        resume_step: step of the checkpoint that the run resumes from; None for a new run, which gets a new group.
        project: trackio's project.
        name: the run's name; that of a resumed run has ``-from-STEP`` behind it.

    Raises:
        MissingPackageError: trackio is not installed.
    """

    def __init__(
        self, run_folder: Path, *, config: dict[str, Any], resume_step: int | None, project: str, name: str
    ) -> None:
        # trackio looks once, when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str((run_folder / "trackio").absolute()))
        if "TRACKIO_SPACE_ID" not in os.environ:
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # it would ask the hub for the user's name, to store it
        self._trackio = require("trackio", "trackio", "tracking with trackio")
        group = kept_id(run_folder / ID_FILE, is_new=resume_step is None)
        with contextlib.redirect_stdout(io.StringIO()):  # it greets, and the console is the run's
            self._run = self._trackio.init(
                project=project,
                name=name if resume_step is None else f"{name}-from-{resume_step}",
                group=group,
                config=config,
                embed=False,
                # What the machine does is no metric of the run, and other trackers have none of it.
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, step: int, metrics: Metrics) -> None:
        """Logs a step; lists become histograms with a bar per element, the load of all layers a picture."""
        self._run.log({key: self._value(value) for key, value in metrics.items() if value is not None}, step=step)

    def close(self, ok: bool = True) -> None:
        """Waits until all is written."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()

    def _value(self, value: Any) -> Any:
        if isinstance(value, LoadMatrix):
            return self._trackio.Image(value.pixels_HWC, caption=value.caption)
        return self._trackio.Histogram(np_histogram=bars(value)) if isinstance(value, list | tuple) else value
