import logging
import math
import sys

import pytest

from fmoe.errors import MissingPackageError
from pretrain.tracking import Trackers, build_trackers
from pretrain.tracking.loads import bars


class Recorder:
    def __init__(self, error=None):
        self.rows, self.closed, self.error = [], [], error

    def log(self, step, metrics):
        self.rows.append((step, dict(metrics)))
        if self.error:
            raise self.error

    def close(self, ok=True):
        self.closed.append(ok)
        if self.error:
            raise self.error


def build(tmp_path, **changes):
    settings = {
        "wandb": False,
        "tensorboard": False,
        "console_every": 2,
        "total_steps": 4,
        "config": {"model": {"num_layers": 2}},
        "resume_step": None,
    }
    return build_trackers(tmp_path / "run", **(settings | changes))


def test_all_get_every_metric():
    required, optional = Recorder(), Recorder()
    with Trackers([required], [optional]) as trackers:
        trackers.log(1, {"loss": 2.0})
    assert required.rows == optional.rows == [(1, {"loss": 2.0})]
    assert required.closed == optional.closed == [True]


def test_a_failed_block_closes_as_failed():
    tracker = Recorder()
    with pytest.raises(ZeroDivisionError), Trackers([tracker]):
        raise ZeroDivisionError
    assert tracker.closed == [False]


def test_an_optional_tracker_that_raises_is_dropped_with_one_warning(caplog):
    required, broken, other = Recorder(), Recorder(RuntimeError("gone\naway")), Recorder()
    trackers = Trackers([required], [broken, other])
    for step in range(3):
        trackers.log(step, {})
    trackers.close()
    assert len(required.rows) == len(other.rows) == 3
    assert len(broken.rows) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "Recorder failed and is no longer used; the run is unaffected: gone away"
    ]


def test_errors_of_closing_an_optional_tracker_are_warnings(caplog):
    first, last = Recorder(OSError()), Recorder()
    Trackers([], [first, last]).close(ok=False)
    assert last.closed == [False]
    assert "OSError" in caplog.text


def test_errors_of_the_record_are_raised():
    optional = Recorder()
    trackers = Trackers([Recorder(OSError("disk full"))], [optional])
    with pytest.raises(OSError, match="disk full"):
        trackers.log(1, {})
    with pytest.raises(OSError, match="disk full"):
        trackers.close()
    assert optional.closed == [True]


def test_an_optional_tracker_that_cannot_be_made_is_dropped(caplog):
    def fail():
        raise ConnectionError("no route")

    trackers = Trackers([Recorder()])
    trackers.add_optional(fail)
    assert caplog.record_tuples == [
        (
            "pretrain.tracking.tracker",
            logging.WARNING,
            "fail failed and is no longer used; the run is unaffected: no route",
        )
    ]


@pytest.mark.parametrize(
    ("module", "key", "extra"),
    [
        ("wandb", "wandb", "pretrain"),
        ("tensorboard", "tensorboard", "tensorboard"),
        ("trackio", "trackio", "trackio"),
    ],
)
def test_a_missing_package_names_its_extra_before_a_file_is_touched(tmp_path, monkeypatch, module, key, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=rf"fmoe\[{extra}\]"):
        build(tmp_path, **{key: True})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "heights", "edges"),
    [
        ([0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0, 1, 2, 3]),
        ([math.nan, 1, math.inf], [0, 1, 0], [0, 1, 2, 3]),
        ([], [], [0]),
        ([1.0] * 1025, [3] * 341 + [2], [*range(0, 1024, 3), 1025]),  # many experts share bars
    ],
    ids=["numbers", "not finite", "none", "many"],
)
def test_bars_span_the_index(values, heights, edges):
    assert bars(values) == (heights, edges)
