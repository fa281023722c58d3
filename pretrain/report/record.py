"""Aggregates of a metrics.jsonl in bounded memory: curves keep their extremes, loads their means."""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise, starmap
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

# Fields of a span of a series. GAP is 1 if a value of the span is not finite.
LOW, LOW_AT, HIGH, HIGH_AT, SUM, SUM_AT, COUNT, GAP = range(8)
_EMPTY = np.array([math.inf, 0, -math.inf, 0, 0, 0, 0, 0])


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
        self.stride = 1
        self.names: dict[str, int] = {}
        self._num_spans = spans
        self._first = 0  # the first step
        self._columns: dict[tuple[str, ...], np.ndarray] = {}
        self._spans = np.empty((8, spans, 0))  # field, span, series
        self._ends = np.empty((2, 2, 0))  # the last value and the last finite value; value and step; series

    def add(self, step: int, names: tuple[str, ...], values: Sequence[float]) -> None:
        """Add the values of a step; call it in ascending order of steps.

        NaN and infinite values become a gap in the curve if they are the last of their series, or if their span has no
        finite value.
        """
        if not self.names:
            self._first = step
        while step - self._first >= self._num_spans * self.stride:
            self._double()
        span = (step - self._first) // self.stride
        columns = self._columns_of(names)
        numbers = np.asarray(values, np.float64)
        is_finite = np.isfinite(numbers)
        self._ends[0, 0, columns] = np.where(is_finite, numbers, math.nan)
        self._ends[0, 1, columns] = step
        self._spans[GAP, span, columns[~is_finite]] = 1
        columns = columns[is_finite]
        numbers = numbers[is_finite]
        self._ends[1, 0, columns] = numbers
        self._ends[1, 1, columns] = step
        for field, is_new in (
            (LOW, numbers < self._spans[LOW, span, columns]),
            (HIGH, numbers > self._spans[HIGH, span, columns]),
        ):
            self._spans[field, span, columns[is_new]] = numbers[is_new]
            self._spans[field + 1, span, columns[is_new]] = step
        self._spans[SUM, span, columns] += numbers
        self._spans[SUM_AT, span, columns] += step
        self._spans[COUNT, span, columns] += 1

    def points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values of a series, in order of steps.

        The points are the extremes of every span, the last value and the last finite value. A span whose values
        are all NaN or infinite is one point, NaN.
        """
        series = self._spans[:, :, self.names[name]]
        has = series[COUNT] > 0
        gaps = np.flatnonzero(~has & (series[GAP] > 0))
        last, last_at = self._ends[: 2 if has.any() else 1, :, self.names[name]].T
        steps = [series[LOW_AT, has], series[HIGH_AT, has], self._first + gaps * self.stride, last_at]
        values = [series[LOW, has], series[HIGH, has], np.full(len(gaps), math.nan), last]
        unique_steps, indices = np.unique(np.concatenate(steps).astype(np.int64), return_index=True)
        return unique_steps, np.concatenate(values)[indices]

    def means(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean step and the mean value of each span in which the series has a finite value."""
        series = self._spans[:, :, self.names[name]]
        series = series[:, series[COUNT] > 0]
        return series[SUM_AT] / series[COUNT], series[SUM] / series[COUNT]

    def mean(self, name: str) -> float | None:
        """Return the mean of a series' finite values; None without any."""
        if name not in self.names:
            return None
        series = self._spans[:, :, self.names[name]]
        count = series[COUNT].sum()
        return float(series[SUM].sum() / count) if count else None

    def thinned(self, points: int) -> "Curves":
        """Return the curves with at most ``points`` points in all series together.

        If they have more, the result is a copy with longer spans. Curves in which 16 or fewer spans have values are not
        thinned further, even if they have more points.
        """
        curves = self
        while 2 * curves._num_used * len(curves.names) > points and curves._num_used > 16:
            curves = copy.deepcopy(curves) if curves is self else curves
            curves._double()
        return curves

    @property
    def _num_used(self) -> int:
        """Number of spans up to the last one with a finite value."""
        return int(np.flatnonzero((self._spans[COUNT] > 0).any(1)).max(initial=-1)) + 1

    def _columns_of(self, names: tuple[str, ...]) -> np.ndarray:
        if names not in self._columns:
            for name in names:
                self.names.setdefault(name, len(self.names))
            num_new = len(self.names) - self._spans.shape[2]
            empty = np.broadcast_to(_EMPTY[:, None, None], (8, self._num_spans, num_new))
            self._spans = np.concatenate([self._spans, empty], 2)
            self._ends = np.concatenate([self._ends, np.zeros((2, 2, num_new))], 2)
            self._columns[names] = np.array([self.names[name] for name in names], np.int64)
        return self._columns[names]

    def _double(self) -> None:
        first = self._spans[:, ::2]
        second = self._spans[:, 1::2]
        merged = first + second
        merged[GAP] = np.maximum(first[GAP], second[GAP])
        for field, is_second in ((LOW, second[LOW] < first[LOW]), (HIGH, second[HIGH] > first[HIGH])):
            both = slice(field, field + 2)  # the extreme and its step
            merged[both] = np.where(is_second, second[both], first[both])
        empty = np.broadcast_to(_EMPTY[:, None, None], merged.shape)
        self._spans = np.concatenate([merged, empty], 1)
        self.stride *= 2


class Loads:
    """Mean load of every expert in equal spans of steps, which double like the spans of `Curves`.

    Args:
        sizes: number of experts by layer number, for layers with experts.
        cells: upper bound on the number of spans times the number of experts in all layers. There are at least 4 spans,
            even if they exceed this bound.
    """

    def __init__(self, sizes: Mapping[int, int], cells: int = LOAD_CELLS):
        self.sizes = dict(sizes)
        self.stride = 1
        ends = np.cumsum([0, *self.sizes.values()])
        self._slices = dict(zip(self.sizes, starmap(slice, pairwise(ends)), strict=True))
        self._num_spans = 2 * max(2, min(_MOST_FRAMES, cells // int(ends[-1])) // 2)
        self._sum = np.zeros((self._num_spans, ends[-1]), np.float32)
        self._count = np.zeros((self._num_spans, len(self.sizes)), np.int64)
        self._range = np.zeros((self._num_spans, 2), np.int64)
        self._first: int | None = None

    def add(self, step: int, loads: Mapping[int, Sequence[float | None]]) -> None:
        """Add the loads of one step by layer; steps must ascend.

        A layer with a load of None or NaN counts as not logged.
        """
        if self._first is None:
            self._first = step
        while step - self._first >= self._num_spans * self.stride:
            self._double()
        span = (step - self._first) // self.stride
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
        sizes = list(self.sizes.values())
        count = np.repeat(self._count[has], sizes, axis=1)
        with np.errstate(invalid="ignore"):
            return self._range[has], np.where(count > 0, self._sum[has] * np.repeat(sizes, sizes) / count, math.nan)

    def _double(self) -> None:
        ranges = self._range.reshape(-1, 2, 2)  # pair, span of the pair, first or last step
        has = self._count.any(1).reshape(-1, 2)
        first = np.where(has[:, 0], ranges[:, 0, 0], ranges[:, 1, 0])
        last = np.where(has[:, 1], ranges[:, 1, 1], ranges[:, 0, 1])
        self._range = _with_empty_rows(np.stack([first, last], 1))
        self._sum = _with_empty_rows(self._sum[::2] + self._sum[1::2])
        self._count = _with_empty_rows(self._count[::2] + self._count[1::2])
        self.stride *= 2


def _with_empty_rows(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([rows, np.zeros_like(rows)])


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
        self.curves = Curves(CURVE_SPANS)
        self.layers = Curves(LAYER_SPANS)
        self.loads: Loads | None = None
        self.last: dict[str, float] = {}
        self.last_finite: dict[str, tuple[int, float]] = {}
        self.best: tuple[int, float] | None = None
        self.events: list[dict[str, Any]] = []
        self._lost: set[str] = set()
        self._seconds = 0.0
        self._overflows = 0.0

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
            layer, name = _series_of(key)
            if isinstance(value, list):
                if layer and name.endswith("/load") and value:
                    loads[layer] = value
                continue
            number = _number(value, row, key) if name else None
            if number is not None:
                (layers if layer else whole)[name] = number
        if math.isfinite(whole.get("step_seconds", math.nan)):
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
        texts = {}  # by kind of event
        overflows = whole.get("skipped_steps", self._overflows)
        if whole.get("guard/skipped"):
            texts["skip"] = "the step was skipped by a guard"
        elif overflows > self._overflows:
            texts["skip"] = "the step was skipped for an overflow"
        self._overflows = overflows
        if whole.get("guard/collapsed_layers"):
            texts["warning"] = f"the routers of {whole['guard/collapsed_layers']:g} layers have collapsed"
        losses = {key: math.isfinite(whole[key]) for key in ("loss", "val/loss") if key in whole}
        lost = [key for key, is_finite in losses.items() if not is_finite]
        if not texts and not self._lost.issuperset(lost):
            texts["warning"] = f"{' and '.join(lost)} {'are' if lost[1:] else 'is'} not finite"
        self._lost = self._lost.difference(losses).union(lost)
        self.events += [{"step": step, "kind": kind, "text": text} for kind, text in texts.items()]

    def _add_loads(self, step: int, loads: Mapping[int, Sequence[float | None]]) -> None:
        if self.loads is None:
            self.loads = Loads({layer: len(loads[layer]) for layer in sorted(loads)})
        for layer, load in loads.items():
            size = self.loads.sizes.get(layer, "none")
            if len(load) != size:
                raise UserError(
                    f"step {step} has {len(load)} experts in layer {layer}; the first step with loads has {size}"
                )
        self.loads.add(step, loads)


@cache  # over rows
def _series_of(key: str) -> tuple[int, str]:
    """Return the layer of a metric (0 for the whole model) and the name of its series (empty for none)."""
    if key == "step" or key.endswith(_NONFINITE):
        return 0, ""
    match = _LAYER.fullmatch(key)
    return (0, key) if match is None else (int(match[1]), f"{int(match[1])}/{match[2]}")


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
