"""Binary payload of the report's page: JSON followed by arrays, deflated.

The format is ``[length of the JSON: u32, little endian] [JSON, padded to 4 bytes] [arrays]``. Two measures let it
deflate well. An array of 4-byte numbers is stored as byte planes: all first bytes, then all second bytes, and so on.
Per-layer series and means are rounded to 16 bits of mantissa, except for the last value of a series.
"""

import json
import math
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import fmoe
from pretrain.compare.groups import grouped
from pretrain.compare.runs import OF_NO_EFFECT
from pretrain.report.record import CURVE_POINTS, LOAD_CELLS, Curves, Loads
from pretrain.report.runs import RunFolder
from pretrain.tracking.metrics import DECLARED, Metric

Json = dict[str, Any]

# Bits of mantissa, out of 23: a relative error of at most 2^-(bits + 1). Means are drawn but never shown as text.
_CURVE_BITS = 23
_LAYER_BITS = 16
_MEAN_BITS = 16
# A load is one byte: 0 dead, 255 not logged, else 1 to _CODES, linear in log2(load x experts) from _LOWEST up.
_LOWEST = -8.0
_CODES = 254
# Minimum number of frames (spans of steps with their mean load) of a run when many runs share a page.
_FRAMES_AT_LEAST = 4


class Arrays:
    """Arrays concatenated into one buffer.

    Attributes:
        layout: for each array, its dtype, its number of elements, and its offset in bytes.
    """

    def __init__(self) -> None:
        self.layout: list[tuple[str, int, int]] = []
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, array: np.ndarray, bits: int = 23) -> int:
        """Append an array as uint8, uint32 or float32, and return its index in ``layout``.

        Args:
            bits: number of mantissa bits to keep in floats. The last float of the array keeps all 23.
        """
        if array.dtype == np.uint8:
            kind = "u1"
            data = array.tobytes()
        else:
            kind = "u4" if np.issubdtype(array.dtype, np.integer) else "f4"
            words = array.astype("<u4") if kind == "u4" else _rounded(array, bits)
            data = words.view(np.uint8).reshape(-1, 4).T.tobytes()
        self.layout.append((kind, array.size, self._size))
        self._parts.append(data)
        self._size += len(data)
        return len(self.layout) - 1

    def tobytes(self) -> bytes:
        """Return the arrays as one buffer."""
        return b"".join(self._parts)


def encode(runs: Sequence[RunFolder]) -> bytes:
    """Return the data of the runs' report page: JSON and arrays, deflated. The module docstring has the format."""
    arrays = Arrays()
    header = {
        "fmoe": fmoe.__version__,
        "time": round(time.time()),
        "runs": [_run(run, arrays, len(runs)) for run in runs],
        "groups": _groups(runs),
        "metrics": [_declaration(metric) for metric in DECLARED],
    }
    text = json.dumps(header | {"arrays": arrays.layout}, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    return zlib.compress(len(text).to_bytes(4, "little") + text + arrays.tobytes(), 9)


def _groups(runs: Sequence[RunFolder]) -> list[Json]:
    """Return name and indices of runs that have different seeds, but else differ only in keys in `OF_NO_EFFECT`."""

    def experiment_of(index: int) -> tuple[Json, int | None]:
        recipe = runs[index].recipe
        seed = recipe.get("train.seed")
        keys = {key: value for key, value in recipe.items() if not key.startswith(OF_NO_EFFECT)}
        return keys, seed if type(seed) is int else None

    groups = grouped(range(len(runs)), experiment_of, lambda index: runs[index].name)
    return [{"name": name or runs[indices[0]].name, "runs": indices} for name, indices in groups]


def _run(run: RunFolder, arrays: Arrays, num_runs: int) -> Json:
    record = run.record
    points = CURVE_POINTS // num_runs
    versions = run.run_info.get("versions")
    if not isinstance(versions, dict):
        versions = {}
    sizes = {} if record.loads is None else record.loads.sizes
    layers = sorted({int(name.split("/")[0]) for name in record.layers.names}.union(sizes))
    return {
        "name": run.name,
        "folder": str(run.folder),
        "summary": summary(run),
        # The step of the last finite value of each series whose latest value is not finite.
        "lost": {name: step for name, (step, _) in record.last_finite.items() if not math.isfinite(record.last[name])},
        "recipe": {
            key: value if isinstance(value, str) else json.dumps(value, default=str)
            for key, value in run.recipe.items()
        },
        "versions": {name: str(version) for name, version in versions.items()},
        "events": run.events,
        "layers": [{"number": layer, "label": run.layer_label(layer)} for layer in layers],
        "curves": _curves(record.curves.thinned(points), arrays, _CURVE_BITS),
        "layer_curves": _curves(record.layers.thinned(points), arrays, _LAYER_BITS),
        "loads": None if record.loads is None else _loads(record.loads, arrays, LOAD_CELLS // num_runs),
    }


def summary(run: RunFolder) -> dict[str, float | int | None]:
    """Return a run's key figures by name, such as ``params``, ``loss`` and ``best_val_loss``.

    A metric's figure is its last finite value. For metrics in the section ``speed`` without ``is_exact``, it is the
    mean over the steps. Figures that are unknown or not finite are left out.
    """
    record = run.record
    names = ("params", "active_params", "flops_per_token", "world_size")
    values: Json = {name: run.run_info.get(name) for name in names}
    values |= {"step": record.step, "total_steps": run.total_steps}
    values |= {name: value for name, (_, value) in record.last_finite.items()}
    if record.best is not None:
        values |= {"best_step": record.best[0], "best_val_loss": record.best[1]}
    values |= {metric.key: record.curves.mean(metric.key) for metric in DECLARED if _is_averaged(metric)}
    values["skipped"] = sum(event["kind"] == "skip" and not event["lost"] for event in run.events)
    return {name: value for name, value in values.items() if _is_finite(value)}


def _declaration(metric: Metric) -> Json:
    """Return a metric's declaration as JSON values."""
    section = "routing" if metric.reduce else metric.section
    figure = metric.label + ", mean of the layers" * (section == "routing")
    if not metric.is_exact:
        figure += ", mean" if _is_averaged(metric) else ", last"
    return {
        "name": metric.key,
        "unit": metric.unit,
        "doc": metric.doc.replace("`", ""),
        "title": metric.label,
        "section": section,
        "figure": "" if section in ("events", "more") else figure,
        "log": metric.is_log,
        "exact": metric.is_exact,
    }


def _is_averaged(metric: Metric) -> bool:
    """Return whether the report shows the metric's mean over the steps, not its last value."""
    return metric.section == "speed" and not metric.is_exact


def _curves(curves: Curves, arrays: Arrays, bits: int) -> dict[str, Json]:
    """Append the steps and values of each series to ``arrays``. Return the indices of these arrays by series."""
    # x, y: steps, as differences, and values; mx, my: the same of the means, if points span several steps.
    indices = {}
    for name in curves.names:
        steps, values = curves.points(name)
        curve = {"x": arrays.add(np.diff(steps, prepend=0)), "y": arrays.add(values, bits)}
        if curves.stride > 1:
            mean_steps, means = curves.means(name)
            curve["mx"] = arrays.add(np.diff(np.round(mean_steps).astype(np.int64), prepend=0))
            curve["my"] = arrays.add(means, _MEAN_BITS)
        indices[name] = curve
    return indices


def _loads(loads: Loads, arrays: Arrays, cells: int) -> Json:
    steps, shares = loads.frames()
    max_frames = max(_FRAMES_AT_LEAST, cells // shares.shape[1])
    if len(steps) > max_frames:  # average neighbouring frames
        starts = np.arange(0, len(steps), -(-len(steps) // max_frames))
        ends = np.append(starts[1:], len(steps))
        steps = np.stack([steps[starts, 0], steps[ends - 1, 1]], 1)
        shares = np.stack([shares[a:b].mean(0) for a, b in zip(starts, ends, strict=True)])
    highest = max(1.0, math.ceil(math.log2(max(loads.sizes.values()))))
    with np.errstate(divide="ignore", invalid="ignore"):
        code = 1 + (np.log2(shares) - _LOWEST) / (highest - _LOWEST) * (_CODES - 1)
        code = np.where(shares == 0, 0, np.clip(np.round(code), 1, _CODES))
    code = np.where(np.isnan(shares), 255, code).astype(np.uint8)
    return {
        "layers": list(loads.sizes),
        "experts": list(loads.sizes.values()),
        "frames": steps.tolist(),
        "log2": [_LOWEST, highest],
        "codes": arrays.add(code.T.copy()),  # [experts, frames]: consecutive frames are similar, which deflates better
    }


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


def _rounded(values: np.ndarray, bits: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        number = values.astype("<f4").view("<u4").astype(np.uint64)
    unit = 1 << (23 - bits)
    is_exact = ~np.isfinite(values)
    is_exact[-1:] = True
    return np.where(is_exact, number, (number + unit // 2) & (1 << 32) - unit).astype("<u4")
