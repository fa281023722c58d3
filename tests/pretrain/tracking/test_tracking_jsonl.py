import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fmoe.errors import UserError
from pretrain.tracking import JsonlTracker, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, steps, resume_step=None):
    tracker = JsonlTracker(path, resume_step)
    for step in steps:
        tracker.log(step, {"loss": step / 2})
    tracker.close()


def steps_in(path):
    return [row["step"] for row in read_metrics(path)]


def test_one_object_a_line_in_order(path):
    tracker = JsonlTracker(path, None)
    tracker.log(1, {"loss": 2.5, "tokens": 4096, "note": "x", "mfu": None, "moe/layer_0/load": [0.25, 0.75]})
    tracker.log(1, {"val/loss": 3.0})
    tracker.close()
    assert read_metrics(path) == [
        {"step": 1, "loss": 2.5, "tokens": 4096, "note": "x", "mfu": None, "moe/layer_0/load": [0.25, 0.75]},
        {"step": 1, "val/loss": 3.0},
    ]


@pytest.mark.parametrize(("value", "name"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_nonfinite_numbers_are_strict_json(path, value, name):
    tracker = JsonlTracker(path, None)
    tracker.log(1, {"loss": value, "load": [0.5, value]})
    tracker.close()

    row = json.loads(path.read_text(), parse_constant=pytest.fail)
    expected = {"loss": None, "loss_nonfinite": name, "load": [0.5, None], "load_nonfinite": [None, name]}
    assert row == {"step": 1, **expected}


def test_resuming_removes_later_steps_and_the_torn_line(path):
    write(path, [1, 2, 2, 3, 4])
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    assert steps_in(path) == [1, 2, 2, 3, 4]
    write(path, [3, 4], resume_step=2)
    assert steps_in(path) == [1, 2, 2, 3, 4]
    assert path.read_bytes().endswith(b"\n")
    assert os.listdir(path.parent) == [path.name]


def test_resuming_keeps_the_old_file_until_the_new_one_is_whole(path, monkeypatch):
    write(path, [1, 2, 3])

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        JsonlTracker(path, resume_step=1)
    assert steps_in(path) == [1, 2, 3]


def test_resuming_without_a_record_begins_one(path):
    write(path, [5], resume_step=4)
    assert steps_in(path) == [5]


def test_a_new_record_keeps_the_one_before(path):
    write(path, [1, 2])
    write(path, [])
    write(path, [1])
    assert steps_in(path) == [1]
    assert steps_in(path.with_name("metrics.jsonl.old")) == [1, 2], "an empty record took the place of a full one"


def test_kill_leaves_at_most_one_torn_line(path):
    code = (
        "import sys; from pathlib import Path; from pretrain.tracking.jsonl import JsonlTracker\n"
        "tracker = JsonlTracker(Path(sys.argv[1]), None)\n"
        "for step in range(10**9): tracker.log(step, {'load': [step / 7] * 200})\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
    while child.poll() is None and not (path.exists() and path.stat().st_size > 100_000):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    steps = steps_in(path)
    assert len(steps) > 10
    assert steps == list(range(len(steps)))
    write(path, [steps[-1] + 1], resume_step=steps[-1])
    assert steps_in(path) == list(range(len(steps) + 1))


@pytest.mark.parametrize("line", ["not json", "[1]", '{"loss": 1}', '{"step": "1"}'])
def test_a_damaged_line_is_named(path, line):
    write(path, [1])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: not a JSON object"):
        read_metrics(path)
    with pytest.raises(UserError, match="line 2"):
        JsonlTracker(path, resume_step=1)


def test_a_missing_file_is_a_user_error(path):
    with pytest.raises(UserError, match="does not exist"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("loss", object(), TypeError),
        ("loss", [1, "a"], TypeError),
        ("loss", {"a": 1}, TypeError),
        ("step", 2, ValueError),
    ],
)
def test_other_values_are_refused_by_name_and_leave_no_trace(path, key, value, error):
    tracker = JsonlTracker(path, None)
    with pytest.raises(error, match=f"'{key}'"):
        tracker.log(1, {key: value})
    tracker.close()
    assert path.read_bytes() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_a_user_error_that_names_the_file():
    tracker = JsonlTracker(Path("/dev/full"), None)
    with pytest.raises(UserError, match=r"/dev/full .*No space left on device"):
        tracker.log(1, {"loss": 1.0})


def test_a_removed_file_is_a_user_error(path):
    tracker = JsonlTracker(path, None)
    path.unlink()
    with pytest.raises(UserError, match=re.escape(str(path))):
        tracker.log(1, {"loss": 1.0})
    tracker.close()


def test_a_line_of_which_the_disk_took_a_part_is_completed(path, monkeypatch):
    tracker = JsonlTracker(path, None)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:7]))
    tracker.log(1, {"loss": 1.0, "lr": 0.5})
    assert read_metrics(path) == [{"step": 1, "loss": 1.0, "lr": 0.5}]
