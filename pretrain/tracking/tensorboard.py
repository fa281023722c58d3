"""TensorBoard event files."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from fmoe.errors import require
from pretrain.tracking.loads import LoadMatrix, bars
from pretrain.tracking.tracker import Metrics


class TensorBoardTracker:
    """Log to TensorBoard: numbers as scalars, lists as histograms of at most 512 bars, the load of all layers as an
    image.

    Text other than the config is not logged.

    Args:
        folder: folder for the event files.
        config: the resolved recipe, shown under Text.
        resume_step: step of the checkpoint that the run resumes from; None for a new run. TensorBoard hides events of
            later steps.

    Raises:
        MissingPackageError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, *, config: dict[str, Any], resume_step: int | None) -> None:
        require("tensorboard", "tensorboard", "tracking with TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)
        # Four spaces: TensorBoard renders Markdown, and this is its code block.
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", "\n".join("    " + line for line in text.splitlines()), resume_step or 0)

    def log(self, step: int, metrics: Metrics) -> None:
        """Add an event for each number, list and picture."""
        for key, value in metrics.items():
            if isinstance(value, list | tuple):
                self._add_bars(key, step, value)
            elif isinstance(value, LoadMatrix):
                self._writer.add_image(key, value.pixels_HWC, step, dataformats="HWC")
            elif isinstance(value, float | int):
                self._writer.add_scalar(key, value, step)

    def close(self, ok: bool = True) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _add_bars(self, key: str, step: int, values: list[float] | tuple[float, ...]) -> None:
        if not values:
            return
        heights, edges = bars(values)
        centres = [(left + right) / 2 for left, right in pairwise(edges)]
        self._writer.add_histogram_raw(
            key,
            min=edges[0],
            max=edges[-1],
            num=sum(heights),
            sum=sum(h * c for h, c in zip(heights, centres, strict=True)),
            sum_squares=sum(h * c * c for h, c in zip(heights, centres, strict=True)),
            bucket_limits=edges[1:],
            bucket_counts=heights,
            global_step=step,
        )
