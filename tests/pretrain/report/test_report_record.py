"""Aggregates of a run's metrics: extremes, means and loads, for runs of any length."""

import math

import numpy as np
import pytest

from fmoe.errors import UserError
from pretrain.report.record import Curves, Loads, Record


def filled(values, spans, first=1):
    curves = Curves(spans)
    for step, value in enumerate(values, start=first):
        curves.add(step, ("loss",), [value])
    return curves


@pytest.mark.parametrize("steps", [1, 2, 63, 64])
def test_while_all_steps_fit_each_is_there_as_it_was(steps):
    values = np.random.default_rng(0).normal(size=steps)
    curves = filled(values, 64, first=501)
    found_steps, found = curves.points("loss")
    assert found_steps.tolist() == list(range(501, 501 + steps)) and found.tolist() == values.tolist()
    assert curves.means("loss")[1].tolist() == values.tolist()


@pytest.mark.parametrize("steps", [65, 128, 129, 1000, 4097])
def test_a_longer_run_keeps_the_extremes_of_every_span_where_they_were(steps):
    values = np.random.default_rng(1).normal(size=steps)
    curves = filled(values, 64)
    found_steps, found = curves.points("loss")
    stride = curves.stride
    assert steps <= 64 * stride < 2 * steps and len(found_steps) <= 129
    assert (np.diff(found_steps) > 0).all()
    assert found.tolist() == values[found_steps - 1].tolist()
    spans = [values[at : at + stride] for at in range(0, steps, stride)]
    expected = {v for span in spans for v in (span.min(), span.max())} | {values[-1]}
    assert set(found.tolist()) == expected and len(found) == len(expected)
    assert curves.means("loss")[1] == pytest.approx([span.mean() for span in spans])
    assert curves.mean("loss") == pytest.approx(values.mean())


def test_a_curve_ends_with_the_last_value_whatever_else_is_in_its_span():
    curves = filled([0.0] * 64 + [1.0, 3.0, 2.0], 16)
    assert curves.stride == 8
    steps, found = curves.points("loss")
    assert (steps[-1], found[-1]) == (67, 2.0) and {1.0, 3.0} <= set(found.tolist())
    assert curves.thinned(1).points("loss")[1][-1] == 2.0
    curves.add(68, ("loss", "val/loss"), [math.inf, 2.5])
    steps, found = curves.points("loss")
    assert steps[-1] == 68 and math.isnan(found[-1])
    assert [part.tolist() for part in curves.points("val/loss")] == [[68], [2.5]]


def test_many_series_have_fewer_spans_and_keep_their_extremes():
    curves = Curves(64)
    values = np.random.default_rng(3).normal(size=(64, 10))
    for step, row in enumerate(values):
        curves.add(step, tuple("abcdefghij"), row)
    assert curves.thinned(2 * 64 * 10) is curves
    thin = curves.thinned(2 * 32 * 10)
    assert thin.stride == 2 and curves.stride == 1
    for column, name in enumerate("abcdefghij"):
        steps, found = thin.points(name)
        assert len(steps) == 64 and found.tolist() == values[steps, column].tolist()
    assert curves.thinned(1).stride == 4, "16 spans are left in any case"
    steps, found = curves.thinned(1).points("c")
    assert {found.min(), found.max()} == {values[:, 2].min(), values[:, 2].max()}


def test_series_that_begin_late_or_come_now_and_then():
    curves = Curves(8)
    for step in range(100):
        names = ("loss", "val/loss") if step % 25 == 0 else ("loss",)
        curves.add(step, names, [float(step)] * len(names))
    assert curves.points("val/loss")[0].tolist() == [0, 25, 50, 75]
    assert curves.means("val/loss")[0].tolist() == [0, 25, 50, 75], "where it was logged, not in a span's middle"


def test_what_is_not_finite_is_a_gap_until_a_neighbour_shares_its_span():
    values = [1.0, math.nan, math.inf, 4.0]
    steps, found = filled(values, 4).points("loss")
    assert steps.tolist() == [1, 2, 3, 4]
    assert np.isnan(found).tolist() == [False, True, True, False]
    steps, found = filled([*values, 5.0], 4).points("loss")
    assert steps.tolist() == [1, 4, 5] and found.tolist() == [1.0, 4.0, 5.0]


@pytest.mark.parametrize("steps", [3, 8, 9, 100])
def test_loads_are_means_over_spans(steps):
    generator = np.random.default_rng(2)
    shares = generator.dirichlet(np.ones(4), (steps, 2))
    loads = Loads({1: 4, 5: 4}, cells=64)
    for step in range(steps):
        loads.add(step + 1, {1: shares[step, 0].tolist(), 5: shares[step, 1].tolist()})
    ranges, found = loads.frames()
    assert len(ranges) <= 8
    assert ranges[0, 0] == 1 and ranges[-1, 1] == steps
    assert (ranges[1:, 0] == ranges[:-1, 1] + 1).all(), "no step is left out"
    for (first, last), row in zip(ranges, found, strict=True):
        expected = 4 * shares[first - 1 : last].mean(0).reshape(-1)
        assert row == pytest.approx(expected, rel=1e-5)


def test_a_layer_that_was_not_logged_or_not_finite_is_not_taken_for_dead():
    loads = Loads({1: 2, 2: 2}, cells=64)
    loads.add(1, {1: [0.0, 1.0], 2: [None, None]})
    loads.add(2, {1: [0.5, 0.5]})
    _, found = loads.frames()
    assert found[0].tolist()[:2] == [0.0, 2.0] and np.isnan(found[0, 2:]).all()
    assert found[1].tolist()[:2] == [1.0, 1.0] and np.isnan(found[1, 2:]).all()


def record_of(*rows):
    record = Record()
    for row in rows:
        record.add(row)
    return record


def test_a_step_may_have_several_rows():
    record = record_of({"step": 5, "loss": 3.0}, {"step": 5, "val/loss": 2.5}, {"step": 6, "loss": 2.0})
    assert record.step == 6 and record.last == {"loss": 2.0, "val/loss": 2.5}
    assert record.curves.points("loss")[0].tolist() == [5, 6]
    assert record.best == (5, 2.5)


def test_nonfinite_values_come_by_their_markers():
    record = record_of(
        {"step": 1, "loss": None, "loss_nonfinite": "inf", "val/loss": 2.0, "note": "text", "lr": True},
        {"step": 2, "loss": None, "loss_nonfinite": "nan", "val/loss": None, "moe/layer_1/load": [None, 0.5]},
    )
    assert math.isnan(record.last["loss"]) and math.isnan(record.last["val/loss"])
    assert record.best == (1, 2.0) and "note" not in record.curves.names
    assert [event["text"] for event in record.events] == ["loss is not finite", "loss and val/loss are not finite"]


def test_skips_that_metrics_tell():
    record = record_of(
        {"step": 1, "guard/skipped": 0, "skipped_steps": 0},
        {"step": 2, "guard/skipped": 1, "skipped_steps": 0},
        {"step": 3, "guard/skipped": 0, "skipped_steps": 1},
        {"step": 4, "guard/skipped": 0, "skipped_steps": 1, "guard/collapsed_layers": 2},
    )
    found = [(event["step"], event["kind"]) for event in record.events]
    assert found == [(2, "skip"), (3, "skip"), (4, "warning")]


def test_another_number_of_experts_is_an_error():
    with pytest.raises(UserError, match="step 2 has 3 experts in layer 1; the first step with loads has 2"):
        record_of({"step": 1, "moe/layer_1/load": [0.5, 0.5]}, {"step": 2, "moe/layer_1/load": [0.5, 0.5, 0.0]})
