"""Lists as histograms: a bar per expert."""

import math
from collections.abc import Sequence


def bars(values: Sequence[float], max_bars: int = 512) -> tuple[list[float], list[float]]:
    """A histogram over the index of ``values``: bar ``i`` spans ``[i, i + 1)`` and is ``values[i]`` high.

    Binning the values themselves, as dashboards do with a list, would hide which expert gets what. With more values
    than ``max_bars`` (512: the limit of wandb), neighbours share a bar that is as high as all of them together. A value
    that is not finite has no height here; ``metrics.jsonl`` tells.

    Returns:
        The heights, and the edges, one more of them.
    """
    heights = [float(value) if math.isfinite(value) else 0.0 for value in values]
    width = math.ceil(len(heights) / max_bars)
    if width > 1:
        heights = [math.fsum(heights[i : i + width]) for i in range(0, len(heights), width)]
    edges = [float(min(i * width, len(values))) for i in range(len(heights) + 1)]
    return heights, edges
