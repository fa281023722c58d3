"""Expert load for dashboards: one layer as a histogram, all layers as one picture.

Shapes: L layers with experts, E experts; H, W pixels, C = 3 colours.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

LOAD = "moe/load"
_OF_LAYER = re.compile(r"moe/layer_(\d+)/load")
_DOUBLINGS = 3  # the colours span 1/8 to 8 times an even share


@dataclass(frozen=True)
class LoadMatrix:
    """Share of each expert in its layer's assignments, divided by an even share: 1 is balanced, 0 is a dead expert.

    Attributes:
        layers: [L] layer numbers.
        load_LE: loads, one row per layer.
        step: step of the run.
    """

    layers: tuple[int, ...]
    load_LE: tuple[tuple[float, ...], ...]
    step: int

    @property
    def caption(self) -> str:
        """Caption of the picture, with minimum and maximum."""
        values = [value for row in self.load_LE for value in row]
        return f"step {self.step}: experts' load over an even share, {min(values):.2f} to {max(values):.2f}"

    @cached_property
    def pixels_HWC(self) -> Any:
        """Picture, uint8 [H, W, 3], with one cell per layer and expert.

        The colour scale is logarithmic, so that half and twice an even share differ equally from white. Dead experts
        are black. The picture is cached.
        """
        import matplotlib
        import numpy as np
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure  # without pyplot: no window, no backend to choose, no state
        from matplotlib.ticker import MaxNLocator

        load_LE = np.array(self.load_LE)
        colours = matplotlib.colormaps["RdBu_r"].with_extremes(bad="black")  # bad: the logarithm of 0
        width = min(max(4.0, 2 + 0.1 * load_LE.shape[1]), 14.0)
        height = min(max(2.6, 1 + 0.2 * load_LE.shape[0]), 10.0)
        figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots()
        image = axes.imshow(
            np.ma.masked_less_equal(load_LE, 0.0),
            norm=LogNorm(2.0**-_DOUBLINGS, 2.0**_DOUBLINGS),
            cmap=colours,
            aspect="auto",
            interpolation="nearest",
        )
        axes.set(xlabel="expert", ylabel="layer", title=f"step {self.step}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        places = np.unique(np.linspace(0, len(self.layers) - 1, min(len(self.layers), 12)).astype(int))
        axes.set_yticks(places, [str(self.layers[place]) for place in places])
        ticks = [2.0**power for power in range(-_DOUBLINGS, _DOUBLINGS + 1)]
        bar = figure.colorbar(image, ax=axes, extend="both", label="load over an even share")
        bar.set_ticks(ticks, labels=[f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks], minor=False)
        bar.minorticks_off()
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


class LoadPictures:
    """Callable that adds the picture ``moe/load``, a `LoadMatrix`, to the metrics of some steps.

    These are the first step, every ``every``-th step and the last step. ``every=0`` adds none.
    """

    def __init__(self, every: int, last_step: int):
        self._every = every
        self._last_step = last_step
        self._has_drawn = False

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        is_due = self._every and (not self._has_drawn or step % self._every == 0 or step == self._last_step)
        matrix = load_matrix(step, metrics) if is_due else None
        if matrix is None:
            return metrics
        self._has_drawn = True
        return {**metrics, LOAD: matrix}


def load_matrix(step: int, metrics: Mapping[str, Any]) -> LoadMatrix | None:
    """Return the load matrix of a step's metrics; None if they have no loads. A load that is not finite becomes 0."""
    rows: dict[int, tuple[float, ...]] = {}
    for key, shares in metrics.items():
        match = _OF_LAYER.fullmatch(key)
        if match is not None and shares:
            rows[int(match[1])] = tuple(len(shares) * share if math.isfinite(share) else 0.0 for share in shares)
    if not rows:
        return None
    layers = tuple(sorted(rows))
    return LoadMatrix(layers, tuple(rows[layer] for layer in layers), step)


def bars(values: Sequence[float], max_bars: int = 512) -> tuple[list[float], list[float]]:
    """Return a histogram over the index of ``values``: bar ``i`` spans ``[i, i + 1)`` and has height ``values[i]``.

    With more values than ``max_bars`` (512, wandb's limit), neighbours are summed into one bar. A value that is not
    finite has height 0.

    Returns:
        Heights and edges; there is one more edge than heights.
    """
    # Given a list, dashboards would bin its values, which hides the experts.
    heights = [float(value) if math.isfinite(value) else 0.0 for value in values]
    width = math.ceil(len(heights) / max_bars)
    if width > 1:
        heights = [math.fsum(heights[i : i + width]) for i in range(0, len(heights), width)]
    edges = [float(min(i * width, len(values))) for i in range(len(heights) + 1)]
    return heights, edges


def drawn(metrics: Mapping[str, Any], package: ModuleType) -> dict[str, Any]:
    """Return metrics without None for wandb or trackio, with their classes `Histogram` for lists and `Image` for a
    `LoadMatrix`.

    Args:
        package: wandb or trackio.
    """
    values = {}
    for key, value in metrics.items():
        if isinstance(value, LoadMatrix):
            values[key] = package.Image(value.pixels_HWC, caption=value.caption)
        elif isinstance(value, list | tuple):
            values[key] = package.Histogram(np_histogram=bars(value))
        elif value is not None:
            values[key] = value
    return values
