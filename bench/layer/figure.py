"""Picture of a sweep: a row of panels per curve, with times on the left and fractions of the limit on the right."""

import io
from collections.abc import Sequence
from pathlib import Path

from bench.layer import limits
from bench.layer.rows import Row
from bench.layer.sweeps import SWEEPS, curve_label, order, same_curve, seconds_of


def draw(sweep: str, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # without pyplot: no window, no backend to choose, no state

    curves = same_curve(rows)
    whole = Figure(figsize=(10, 3.6 * len(curves)), layout="constrained")
    for (left, right), curve in zip(whole.subplots(len(curves), 2, squeeze=False), curves, strict=True):
        names = {name for row in curve for m in row.measurements() for name in m.seconds}
        for number, name in enumerate(sorted(names, key=lambda name: (order(name), name))):
            points = [(row.point.value, seconds_of(row, name), seconds_of(row, limits.DENSE)) for row in curve]
            points = [point for point in points if None not in point]
            values, seconds, bound = zip(*points, strict=True)
            style = {"label": name, "color": f"C{number % 10}", "marker": "."}
            style["linestyle"] = "--" if name in (limits.DENSE, limits.SPLIT) else "-"
            left.plot(values, [1e3 * second for second in seconds], **style)
            if name != limits.DENSE:
                right.plot(values, [b / s for b, s in zip(bound, seconds, strict=True)], **style)
        left.set(title=curve_label(curve), ylabel="ms per step", yscale="log")
        right.set(ylabel="fraction of the GEMM limit", ylim=(0, None))
        for axes in (left, right):
            ticks = [row.point.value for row in curve]
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_xlabel(SWEEPS[sweep].title)
            axes.grid(alpha=0.3, which="both")
        left.legend(fontsize="x-small")
    buffer = io.BytesIO()
    whole.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    path.write_bytes(buffer.getvalue())
