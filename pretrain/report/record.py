"""Aggregates of a metrics.jsonl in bounded memory: curves keep their extremes, loads their means."""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fmoe.errors import UserError

_LAYER = re.compile(r"moe/layer_(\d+)/(\w+)")
_NONFINITE = "_nonfinite"

# Upper bound on the spans of steps of a curve; a span has two points.
CURVE_SPANS = 1024
LAYER_SPANS = 256
# Upper bound on the points of a page's curves of whole models, and on those of its curves of layers: many series have
# longer spans, but at least 16.
CURVE_POINTS = 1 << 17
# Upper bound on spans x layers x experts: a byte each in the page before compression.
LOAD_CELLS = 1 << 19
_MOST_FRAMES = 512


class Curves:
    """Series of numbers by step, in bounded memory.

    Steps are divided into at most ``spans`` spans of equal length, with minimum, maximum and mean of each. While a span
    is one step, the curve is exact. When the next step does not fit, the length of the spans doubles. The extremes,
    with their steps, remain. The last value and the last finite value are kept too.

    Attributes:
        stride: steps per span.
        names: names of the series, each with the number of its column in the internal arrays.
    """

    def __init__(self, spans: int):
        self.stride, self.names = 1, dict[str, int]()
        self._spans = spans
        self._first: int | None = None
        self._columns: dict[tuple[str, ...], np.ndarray] = {}
        self._low, self._high = np.full((spans, 0), math.inf), np.full((spans, 0), -math.inf)
        self._low_at, self._high_at = np.zeros((spans, 0), np.int64), np.zeros((spans, 0), np.int64)
        self._sum, self._sum_at = np.zeros((spans, 0)), np.zeros((spans, 0))
        self._count, self._gap = np.zeros((spans, 0), np.int64), np.zeros((spans, 0), bool)
        # Rows: the last value of each series, and the last that is finite.
        self._last, self._last_at = np.zeros((2, 0)), np.zeros((2, 0), np.int64)

    def add(self, step: int, names: tuple[str, ...], values: Sequence[float]) -> None:
        """Add the values of a step; call it in ascending order of steps.

        NaN and infinite values become a gap in the curve if they are the last of their series, or if their span has no
        finite value.
        """
        if self._first is None:
            self._first = step
        while (span := (step - self._first) // self.stride) >= self._spans:
            self._double()
        columns, numbers = self._columns_of(names), np.asarray(values, np.float64)
        is_finite = np.isfinite(numbers)
        self._last[0, columns], self._last_at[0, columns] = np.where(is_finite, numbers, math.nan), step
        self._gap[span, columns[~is_finite]] = True
        columns, numbers = columns[is_finite], numbers[is_finite]
        self._last[1, columns], self._last_at[1, columns] = numbers, step
        for extreme, at, is_new in (
            (self._low, self._low_at, numbers < self._low[span, columns]),
            (self._high, self._high_at, numbers > self._high[span, columns]),
        ):
            extreme[span, columns[is_new]] = numbers[is_new]
            at[span, columns[is_new]] = step
        self._sum[span, columns] += numbers
        self._sum_at[span, columns] += step
        self._count[span, columns] += 1

    def points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values of a series, in order of steps.

        The points are the extremes of every span, the last value and the last finite value. A span whose values
        are all NaN or infinite is one point, NaN.
        """
        column = self.names[name]
        has = self._count[:, column] > 0
        low, high = self._low[has, column], self._high[has, column]
        low_at, high_at = self._low_at[has, column], self._high_at[has, column]
        gaps = np.flatnonzero(~has & self._gap[:, column])
        rows = slice(2 if has.any() else 1)
        last, last_at = self._last[rows, column], self._last_at[rows, column]
        steps = np.concatenate([low_at, high_at, self._first_step + gaps * self.stride, last_at])
        values = np.concatenate([low, high, np.full(len(gaps), math.nan), last])
        steps, kept = np.unique(steps, return_index=True)
        return steps, values[kept]

    def means(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean step and the mean value of each span in which the series has a finite value."""
        column = self.names[name]
        count = self._count[:, column]
        has = count > 0
        return self._sum_at[has, column] / count[has], self._sum[has, column] / count[has]

    def mean(self, name: str) -> float | None:
        """Return the mean of a series' finite values; None without any."""
        if name not in self.names or not (count := self._count[:, self.names[name]].sum()):
            return None
        return float(self._sum[:, self.names[name]].sum() / count)

    def thinned(self, points: int) -> "Curves":
        """Return the curves with at most ``points`` points in all series together.

        If they have more, the result is a copy with longer spans. Curves in which 16 or fewer spans have values are not
        thinned further, even if they have more points.
        """
        curves = self
        while 2 * curves._used * len(curves.names) > points and curves._used > 16:
            curves = copy.deepcopy(curves) if curves is self else curves
            curves._double()
        return curves

    @property
    def _used(self) -> int:
        """Number of spans up to the last one with a finite value."""
        return int(np.flatnonzero((self._count > 0).any(1)).max(initial=-1)) + 1

    @property
    def _first_step(self) -> int:
        return self._first or 0

    def _columns_of(self, names: tuple[str, ...]) -> np.ndarray:
        if names not in self._columns:
            for name in names:
                self.names.setdefault(name, len(self.names))
            if (lacking := len(self.names) - self._low.shape[1]) > 0:
                for attribute, fill in _EMPTY.items():
                    array = getattr(self, attribute)
                    more = np.full((self._spans, lacking), fill, array.dtype)
                    setattr(self, attribute, np.concatenate([array, more], 1))
                self._last = np.concatenate([self._last, np.full((2, lacking), math.nan)], 1)
                self._last_at = np.concatenate([self._last_at, np.zeros((2, lacking), np.int64)], 1)
            self._columns[names] = np.array([self.names[name] for name in names], np.int64)
        return self._columns[names]

    def _double(self) -> None:
        def pairs(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return array[::2], array[1::2]

        (low, next_low), (high, next_high) = pairs(self._low), pairs(self._high)
        halves = {
            "_low_at": np.where(next_low < low, *pairs(self._low_at)[::-1]),
            "_high_at": np.where(next_high > high, *pairs(self._high_at)[::-1]),
            "_low": np.minimum(low, next_low),
            "_high": np.maximum(high, next_high),
            "_gap": np.logical_or(*pairs(self._gap)),
        }
        halves |= {name: np.add(*pairs(getattr(self, name))) for name in ("_sum", "_sum_at", "_count")}
        for name, half in halves.items():
            setattr(self, name, np.concatenate([half, np.full_like(half, _EMPTY[name])]))
        self.stride *= 2


_EMPTY = {
    "_low": math.inf,
    "_high": -math.inf,
    "_low_at": 0,
    "_high_at": 0,
    "_sum": 0.0,
    "_sum_at": 0.0,
    "_count": 0,
    "_gap": False,
}


class Loads:
    """Mean load of every expert in equal spans of steps, which double like the spans of `Curves`.

    Args:
        sizes: number of experts by layer number, for layers with experts.
        cells: upper bound on the number of spans times the number of experts in all layers. There are at least 4 spans,
            even if they exceed this bound.
    """

    def __init__(self, sizes: Mapping[int, int], cells: int = LOAD_CELLS):
        self.sizes, self.stride = dict(sizes), 1
        ends = np.cumsum([0, *self.sizes.values()])
        self._slices = {n: slice(a, b) for n, a, b in zip(self.sizes, ends[:-1], ends[1:], strict=True)}
        self._spans = 2 * max(2, min(_MOST_FRAMES, cells // int(ends[-1])) // 2)
        self._sum = np.zeros((self._spans, ends[-1]), np.float32)
        self._count = np.zeros((self._spans, len(self.sizes)), np.int64)
        self._range = np.zeros((self._spans, 2), np.int64)
        self._first: int | None = None

    def add(self, step: int, loads: Mapping[int, Sequence[float | None]]) -> None:
        """Add the loads of one step by layer; steps must ascend.

        A layer with a load of None or NaN counts as not logged.
        """
        if self._first is None:
            self._first = step
        while (span := (step - self._first) // self.stride) >= self._spans:
            self._double()
        if not self._count[span].any():
            self._range[span, 0] = step
        self._range[span, 1] = step
        if len(loads) == len(self.sizes):  # the usual case: all layers at once
            values = np.array([share for layer in self.sizes for share in loads[layer]], np.float32)  # None is NaN
            if not np.isnan(values.sum()):
                self._sum[span] += values
                self._count[span] += 1
                return
        for index, (layer, columns) in enumerate(self._slices.items()):
            load = np.array(loads.get(layer, (None,)), np.float32)
            if not np.isnan(load.sum()):
                self._sum[span, columns] += load
                self._count[span, index] += 1

    def frames(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the range of steps and the mean loads of every span with a load.

        Returns:
            First and last step of each span [frames, 2], and mean loads [frames, experts of all layers]. Loads are
            multiplied by the layer's number of experts: 1 is an even share, NaN means not logged.
        """
        has = self._count.any(1)
        count = np.repeat(self._count[has], list(self.sizes.values()), axis=1)
        experts = np.repeat(list(self.sizes.values()), list(self.sizes.values()))
        with np.errstate(invalid="ignore"):
            return self._range[has], np.where(count > 0, self._sum[has] * experts / count, math.nan)

    def _double(self) -> None:
        rows, half = self._range.reshape(-1, 2, 2), self._spans // 2
        had = self._count.any(1).reshape(-1, 2)
        first = np.where(had[:, 0], rows[:, 0, 0], rows[:, 1, 0])
        last = np.where(had[:, 1], rows[:, 1, 1], rows[:, 0, 1])
        for name, pairs in (
            ("_range", np.stack([first, last], 1)),
            ("_sum", self._sum[::2] + self._sum[1::2]),
            ("_count", self._count[::2] + self._count[1::2]),
        ):
            setattr(self, name, np.concatenate([pairs, np.zeros((half, pairs.shape[1]), pairs.dtype)]))
        self.stride *= 2


class Record:
    """Aggregate of the rows of a metrics.jsonl.

    Attributes:
        step: last logged step; None before the first row.
        curves: series of the whole model, and ``seconds``, the running sum of ``step_seconds``.
        layers: series of single layers, with the layer number in the name (``3/entropy``).
        loads: expert loads; None without any.
        last: latest value of each series of the whole model, finite or not.
        last_finite: (step, value) of the latest finite value of each of these series.
        best: (step, loss) of the lowest validation loss.
        events: events derived from metrics: skipped steps, collapsed routers, and losses that are no longer finite.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.curves, self.layers = Curves(CURVE_SPANS), Curves(LAYER_SPANS)
        self.loads: Loads | None = None
        self.last: dict[str, float] = {}
        self.last_finite: dict[str, tuple[int, float]] = {}
        self._lost: set[str] = set()
        self.best: tuple[int, float] | None = None
        self.events: list[dict[str, Any]] = []
        self._seconds = self._overflows = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row, in order of steps.

        Raises:
            UserError: a layer's number of experts differs from that in the first row with loads.
        """
        step = self.step = row["step"]
        whole: dict[str, float] = {}
        layers: dict[str, float] = {}
        loads: dict[int, Sequence[float | None]] = {}
        for key, value in row.items():
            if (found := _series_by_key.get(key)) is None:
                found = _series_by_key[key] = _series_of(key)
            layer, name = found
            if isinstance(value, list):
                if layer and name.endswith("/load") and value:
                    loads[layer] = value
            elif name and (number := _number(value, row, key)) is not None:
                (layers if layer else whole)[name] = number
        if "step_seconds" in whole and math.isfinite(whole["step_seconds"]):
            self._seconds += whole["step_seconds"]
            whole["seconds"] = self._seconds
        for curves, values in ((self.curves, whole), (self.layers, layers)):
            if values:
                curves.add(step, tuple(values), list(values.values()))
        self.last |= whole
        self.last_finite |= {name: (step, value) for name, value in whole.items() if math.isfinite(value)}
        loss = whole.get("val/loss", math.nan)
        if math.isfinite(loss) and (self.best is None or loss < self.best[1]):
            self.best = (step, loss)
        self._add_events(step, whole)
        if loads:
            self._add_loads(step, loads)

    def _add_events(self, step: int, whole: Mapping[str, float]) -> None:
        found = {}
        overflows = whole.get("skipped_steps", 0.0)
        if whole.get("guard/skipped"):
            found["skip"] = "the step was skipped by a guard"
        elif overflows > self._overflows:
            found["skip"] = "the step was skipped for an overflow"
        self._overflows = overflows if "skipped_steps" in whole else self._overflows
        if whole.get("guard/collapsed_layers"):
            found["warning"] = f"the routers of {whole['guard/collapsed_layers']:g} layers have collapsed"
        losses = {key: math.isfinite(whole[key]) for key in ("loss", "val/loss") if key in whole}
        lost = [key for key, is_finite in losses.items() if not is_finite]
        if not (found or self._lost.issuperset(lost)):
            found["warning"] = f"{' and '.join(lost)} {'are' if lost[1:] else 'is'} not finite"
        self._lost = self._lost.difference(losses).union(lost)
        self.events += [{"step": step, "kind": kind, "text": text} for kind, text in found.items()]

    def _add_loads(self, step: int, loads: Mapping[int, Sequence[float | None]]) -> None:
        if self.loads is None:
            self.loads = Loads({layer: len(loads[layer]) for layer in sorted(loads)})
        for layer, load in loads.items():
            if len(load) != self.loads.sizes.get(layer):
                was = self.loads.sizes.get(layer, "none")
                raise UserError(
                    f"step {step} has {len(load)} experts in layer {layer}; the first step with loads has {was}"
                )
        self.loads.add(step, loads)


# Cache over rows: metric name -> layer (0 for the whole model) and name of the series.
_series_by_key: dict[str, tuple[int, str]] = {}


def _series_of(key: str) -> tuple[int, str]:
    if key == "step" or key.endswith(_NONFINITE):
        return 0, ""
    found = _LAYER.fullmatch(key)
    return (0, key) if found is None else (int(found[1]), f"{int(found[1])}/{found[2]}")


def _number(value: Any, row: Mapping[str, Any], key: str) -> float | None:
    """Return a metric as a float, which may be NaN or infinite; None for text and lists."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if value is None:
        try:
            return float(row.get(key + _NONFINITE, math.nan))
        except (TypeError, ValueError):
            return math.nan
    return None
