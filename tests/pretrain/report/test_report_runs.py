"""Folders of runs: growing, resumed, damaged, without this or that."""

import json

import pytest
from made_up import event, rows, write_run

from fmoe.errors import UserError
from pretrain.report.runs import MetricsFile, RunFolder, open_runs


def line(step, **values):
    return json.dumps({"step": step, **values}) + "\n"


def steps(file, name="loss"):
    return file.record.curves.points(name)[0].tolist()


def test_a_file_that_grows_is_read_on_and_a_torn_line_waits(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert not file.refresh(), "not there yet"
    file.path.write_text(line(1, loss=3.0) + line(2, loss=2.0)[:-8])
    assert file.refresh() and steps(file) == [1]
    assert not file.refresh()
    with file.path.open("a") as more:
        more.write(line(2, loss=2.0)[-8:] + line(3, loss=1.0))
    assert file.refresh() and steps(file) == [1, 2, 3]


def test_a_run_that_goes_back_begins_another_file(tmp_path):
    """As `JsonlTracker` does on resume: a temporary, renamed."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.path.write_text("".join(line(step, loss=9.0) for step in range(1, 9)))
    file.refresh()
    other = tmp_path / "metrics.jsonl.tmp"
    other.write_text(line(1, loss=9.0) + line(2, loss=5.0))
    other.replace(file.path)
    assert file.refresh() and steps(file) == [1, 2] and file.record.last["loss"] == 5.0
    file.path.write_text("")
    assert file.record.step == 2
    file.refresh()
    assert file.record.step is None


def test_where_the_record_goes_back_the_later_rows_count(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    parts = [line(1, loss=1.0), line(2, loss=1.0), line(3, loss=1.0), line(2, loss=7.0), line(3, loss=8.0)]
    file.path.write_text("".join(parts))
    file.refresh()
    curve = file.record.curves.points("loss")
    assert (curve[0].tolist(), curve[1].tolist()) == ([1, 2, 3], [1.0, 7.0, 8.0])
    with file.path.open("a") as more:
        more.write(json.dumps({"loss": 4.0, "step": 3}) + "\n" + line(4, loss=4.0) + line(2, loss=6.0))
    file.refresh()
    assert file.record.curves.points("loss")[1].tolist() == [1.0, 6.0]
    file.path.write_text("".join(parts[:4]) + '{"step": 3}}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 5: "):
        MetricsFile(file.path).refresh()


@pytest.mark.parametrize(
    "bad",
    [
        "not JSON\n",
        "[1]\n",
        '{"loss": 1}\n',
        '{"step": true}\n',
        '{"step": -1}\n',
        "\n",
        "\x00\x00\n",
        "[" * 99_999 + "\n",
    ],
    ids=range(8),
)
def test_a_line_that_no_tracker_wrote_is_named(tmp_path, bad):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.path.write_text(line(1) + bad + line(2))
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: not a JSON object with a step from 0"):
        file.refresh()


def test_without_config_and_run_json(tmp_path):
    folder = write_run(tmp_path / "run", 5, config=False)
    (folder / "run.json").unlink()
    run = RunFolder(folder)
    run.refresh()
    assert (run.recipe, run.run_info, run.total_steps, run.layer_label(3)) == ({}, {}, None, "layer 3")


@pytest.mark.parametrize(("name", "text"), [("config.toml", "[a\n"), ("run.json", "{"), ("run.json", "[]")])
def test_a_damaged_file_is_named(tmp_path, name, text):
    folder = write_run(tmp_path / "run", 5)
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=f"{name} (cannot be read|is invalid)"):
        RunFolder(folder).refresh()


def test_nothing_to_show_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        RunFolder(tmp_path / "nowhere")
    run = RunFolder(tmp_path)
    run.refresh()
    with pytest.raises(UserError, match=r"has no metrics\.jsonl: pass"):
        run.require_steps()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    run.refresh()
    with pytest.raises(UserError, match=r"metrics\.jsonl has no step yet"):
        run.require_steps()


def test_layers_of_a_t5_are_numbered_through_both_stacks(tmp_path):
    run = RunFolder(write_run(tmp_path / "run", 5, layers=4, kind="t5"))
    (run.folder / "config.toml").write_text('[model]\nkind = "t5"\nnum_layers = 2\n')
    run.refresh()
    assert [run.layer_label(n) for n in (1, 2, 3, 4)] == ["encoder 1", "encoder 2", "decoder 1", "decoder 2"]


def test_names_are_as_long_as_it_takes(tmp_path):
    folders = [write_run(tmp_path / name, 2) for name in ("a/one/run", "b/one/run", "b/two")]
    assert [run.name for run in open_runs(folders)] == ["a/one/run", "b/one/run", "two"]
    with pytest.raises(UserError, match="is given twice"):
        open_runs([folders[0], folders[0] / ".." / "run"])


def test_events_of_steps_that_a_run_went_back_over_are_lost(tmp_path):
    events = [event(0, "start"), event(4, "save"), event(6, "skip"), event(4, "resume"), event(7, "warning")]
    skip = {3: {"guard/skipped": 1}, 6: {"guard/skipped": 1}}
    folder = write_run(tmp_path / "run", 8, events=events, change=lambda row: row | skip.get(row["step"], {}))
    with (folder / "events.jsonl").open("a") as more:
        more.write('{"step": 8, "ki')
    run = RunFolder(folder)
    run.refresh()
    found = [(e["step"], e["kind"], e["lost"]) for e in run.events]
    assert found == [
        (0, "start", False),
        (3, "skip", False),  # from the metrics alone
        (4, "save", False),
        (4, "resume", False),
        (6, "skip", True),
        (7, "warning", False),
    ]


def test_dense_runs_have_no_loads(tmp_path):
    run = RunFolder(write_run(tmp_path / "run", 5, layers=0))
    run.refresh()
    assert run.record.loads is None and not run.record.layers.names
    assert sum(1 for _ in rows(5, 0)) == 6
