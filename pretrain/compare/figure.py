"""Plot of validation loss against tokens."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fmoe.errors import UserError, require
from pretrain.compare.groups import Group
from pretrain.files import replacing

FORMATS = (".svg", ".png")


def check_path(path: Path) -> None:
    """Raise UserError if the file extension is not supported or matplotlib is not installed."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--out {path} must end in {' or '.join(FORMATS)}")
    require("matplotlib", "pretrain", "fmoe compare --out")


def draw(groups: Sequence[Group], path: Path) -> None:
    """Plot each group's mean validation loss over training tokens, and write the figure to ``path``.

    For a group of several runs, a band spans their lowest and highest loss. The left plot has logarithmic axes and
    shows all of training except step 0. The right plot has linear axes and begins at half the longest run's tokens.

    Raises:
        UserError: see `check_path`; or the file cannot be written.
    """
    check_path(path)
    import matplotlib
    from matplotlib.figure import Figure  # pyplot would choose a backend and keep global state
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    whole = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = whole.subplots(1, 2)
    longest = max(group.last.tokens for group in groups)
    for group in groups:
        points = [point for point in group.curve if point.tokens > 0]
        tokens = [point.tokens for point in points]
        label = group.name if len(group.runs) == 1 else f"{group.name} ({len(group.runs)} seeds)"
        for axes in (left, right):
            (line,) = axes.plot(tokens, [point.mean for point in points], marker=".", label=label)
            if len(group.runs) > 1:
                lows = [point.low for point in points]
                highs = [point.high for point in points]
                axes.fill_between(tokens, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)
    left.set_ylabel("validation loss, nats per token")
    if any(point.tokens > 0 and 0 < point.mean < math.inf for group in groups for point in group.curve):
        left.set(xscale="log", yscale="log")
        left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        left.xaxis.set_minor_formatter(NullFormatter())
        for set_formatter in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
            set_formatter(lambda value, _: f"{value:g}")
    _second_half(right, groups, longest)
    for axes in (left, right):
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.grid(alpha=0.3, which="both")
    right.legend()
    # Write the same bytes every time, and text as text instead of outlines.
    settings: Any = {"svg.hashsalt": "fmoe", "svg.fonttype": "none"}
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
    with matplotlib.rc_context(settings), replacing(path) as (file,):
        whole.savefig(file, format=path.suffix[1:].lower(), dpi=150, metadata=metadata)


def _second_half(axes, groups: Sequence[Group], longest: int) -> None:
    points = [point for group in groups for point in group.curve if point.tokens > 0 and 2 * point.tokens >= longest]
    bounds = [bound for point in points for bound in (point.low, point.high) if math.isfinite(bound)]
    axes.set_xlim(longest / 2 or None, 1.02 * longest or None)
    if bounds:
        margin = 0.05 * (max(bounds) - min(bounds)) or 0.01
        axes.set_ylim(min(bounds) - margin, max(bounds) + margin)
