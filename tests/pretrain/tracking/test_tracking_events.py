"""events.jsonl: appended, never lost, read whatever became of its last line; and what the trainer writes there."""

import logging
import threading
from pathlib import Path
from types import SimpleNamespace

from pretrain.callbacks import Events
from pretrain.tracking.events import EventLog, read_events


def told(path):
    return [(event["step"], event["kind"], event["text"]) for event in read_events(path)]


def test_what_was_added_is_read(tmp_path):
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    log = EventLog(path)
    log.add(0, "start", "of 3 steps")
    log.add(2, "warning", 'lines\nand "quotes" </script>\udcff NaN')
    EventLog(path).add(3, "end", "")
    assert told(path) == [
        (0, "start", "of 3 steps"),
        (2, "warning", 'lines\nand "quotes" </script>\udcff NaN'),
        (3, "end", ""),
    ]
    assert path.read_text().count("\n") == 3
    assert all(event["time"] > 1.7e9 for event in read_events(path))


def test_a_torn_line_costs_itself_alone(tmp_path):
    path = tmp_path / "events.jsonl"
    EventLog(path).add(1, "save", "a")
    with path.open("ab") as file:
        file.write(b'{"step": 2, "kind": "sa')
    assert told(path) == [(1, "save", "a")]
    EventLog(path).add(3, "save", "c")
    assert told(path) == [(1, "save", "a"), (3, "save", "c")]
    with path.open("a") as file:
        file.write('[]\n{"step": "x", "kind": "save"}\n{"step": 4, "kind": "party"}\n\n')
    EventLog(path).add(5, "save", "e")
    assert [event["step"] for event in read_events(path)] == [1, 3, 5]


def test_threads_write_whole_lines(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    threads = [
        threading.Thread(target=lambda n=n: [log.add(n, "save", "x" * 500) for _ in range(20)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_events(log.path)) == 80


def trainer(step=0, **values):
    recipe = SimpleNamespace(train=SimpleNamespace(steps=10))
    return SimpleNamespace(
        **{"step": step, "is_done": False, "recipe": recipe, "processes": SimpleNamespace(is_main=True), **values}
    )


def test_warnings_become_events_and_are_printed_as_before(tmp_path, capsys):
    path = tmp_path / "events.jsonl"
    events, now = Events(path, None), trainer()
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []  # as in a process that nobody configured; pytest has its own
    try:
        events.on_start(now, {})
        now.step = 4
        logging.getLogger("pretrain.somewhere").warning("odd %d", 5)
        logging.getLogger("fmoe.layer").warning("step 5 is skipped", extra={"event": (5, "skip")})
        logging.getLogger("pretrain").info("nothing")
        logging.getLogger("elsewhere").warning("not ours")
        now.is_done = True
        events.on_end(now, None)
        logging.getLogger("pretrain").warning("after the end")
    finally:
        root.handlers = handlers
    expected = [(0, "start", "of 10 steps"), (4, "warning", "odd 5"), (5, "skip", "step 5 is skipped")]
    assert told(path) == [*expected, (4, "end", "the last step is completed")]
    assert capsys.readouterr().err == "odd 5\nstep 5 is skipped\nnot ours\nafter the end\n"


def test_a_configured_process_prints_a_warning_once(tmp_path, capsys, caplog):
    events = Events(tmp_path / "events.jsonl", None)
    events.on_start(trainer(), {})
    logging.getLogger("pretrain").warning("odd")
    events.on_end(trainer(is_done=True), None)
    assert [record.message for record in caplog.records] == ["odd"]
    assert capsys.readouterr().err == ""


def test_a_new_run_begins_anew_and_one_that_goes_on_appends(tmp_path):
    path = tmp_path / "events.jsonl"
    first = Events(path, None)
    first.on_start(trainer(), {})
    first.saved(2, Path("checkpoints/step-00000002"))
    first.on_end(trainer(3), RuntimeError("lost"))
    second = Events(path, Path("checkpoints/step-00000002"), ["train.steps=10 (was 5)", "optimizer.lr=1.0 (was 2.0)"])
    second.on_start(trainer(2), {})
    second.on_end(trainer(5), None)
    assert told(path) == [
        (0, "start", "of 10 steps"),
        (2, "save", "checkpoints/step-00000002"),
        (3, "error", "RuntimeError: lost"),
        (2, "resume", "from checkpoints/step-00000002 with train.steps=10 (was 5), optimizer.lr=1.0 (was 2.0)"),
        (5, "stop", "by a signal"),
    ]
    third = Events(path, None)
    third.on_start(trainer(), {})
    third.on_end(trainer(10, is_done=True), None)
    assert len(read_events(path)) == 2 and len(read_events(tmp_path / "events.jsonl.old")) == 5


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    events = Events(tmp_path / "events.jsonl", None)
    events.on_start(trainer(), {})
    monkeypatch.setattr(EventLog, "add", full)
    events.saved(1, Path("checkpoints/step-00000001"))
    events.saved(2, Path("checkpoints/step-00000002"))
    events.on_end(trainer(), None)
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text
    assert told(tmp_path / "events.jsonl") == [(0, "start", "of 10 steps")]


def test_other_ranks_write_nothing(tmp_path):
    events = Events(tmp_path / "events.jsonl", None)
    one = trainer(processes=SimpleNamespace(is_main=False))
    events.on_start(one, {})
    events.saved(1, Path("x"))
    events.on_end(one, None)
    assert not list(tmp_path.iterdir())
