"""The trainer's own runs: events, bytes exchanged, and a report at the end."""

import base64
import os
import re
import signal

import pytest
from test_report_payload import Decoded

from pretrain.report.page import read_runs
from pretrain.report.payload import encode
from pretrain.tracking import read_metrics
from pretrain.tracking.events import read_events


class NoReport:
    """A report that cannot be made."""

    def __call__(self):
        from pretrain.start import run

        def fail(*_):
            raise ZeroDivisionError("of the report")

        run.write_report = fail


def kinds(folder):
    return [(event["step"], event["kind"]) for event in read_events(folder / "events.jsonl")]


def test_a_run_that_is_resumed_ends_with_its_report(forks, recipe_file, tmp_path):
    recipe = recipe_file(checkpoint={"every": 2}, train={"steps": 4}, parallel={"expert": 2})
    run = ("pretrain", recipe, "--run.folder", tmp_path / "run")
    ends = forks.command(*run, size=2)
    assert [end.code for end in ends] == [0, 0], ends
    assert str(tmp_path / "run" / "report.html") in ends[0].out and ends[0].err == ""
    text = (tmp_path / "run" / "report.html").read_text()
    assert 50_000 < len(text) < 1_000_000 and re.search("connect-src 'none'", text)
    assert kinds(tmp_path / "run") == [(0, "start"), (2, "save"), (4, "save"), (4, "end")]

    ends = forks.command(*run, "--resume", "--train.steps", "6", size=2)
    assert ends[0].code == 0, ends[0].err
    assert kinds(tmp_path / "run")[4:] == [(4, "resume"), (6, "save"), (6, "end")]
    header = Decoded(encode(read_runs([tmp_path / "run"]))).header["runs"][0]
    assert header["summary"]["step"] == header["summary"]["total_steps"] == 6
    assert [layer["label"] for layer in header["layers"]] == ["layer 1", "layer 2"]
    assert header["loads"]["experts"] == [4, 4] and len(header["loads"]["frames"]) == 6

    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    for row in rows:
        sent = [row[f"moe/layer_{n}/exchange_bytes"] for n in (1, 2)]
        assert row["moe/exchange_bytes"] == pytest.approx(sum(sent) / 2)
        # Of 2 sequences of 16 tokens a rank, with width 32, about half go to the other rank, four times; at most all.
        assert all(0.1 < value / (4 * 32 * 32 * 4) < 1.1 for value in sent)


def test_one_process_sends_nothing_and_a_report_that_fails_is_a_warning(forks, recipe_file, tmp_path):
    (end,) = forks.command("pretrain", recipe_file(), "--run.folder", tmp_path / "run", before=NoReport())
    assert end.code == 0 and "finished at step 4" in end.out and "report.html" not in end.out
    assert end.err.count("the report was not written") == 1 and "of the report" in end.err
    assert "Traceback" not in end.err
    assert {row.get("moe/exchange_bytes", 0.0) for row in read_metrics(tmp_path / "run" / "metrics.jsonl")} == {0.0}


class Ending:
    """Ends the run in step 3: by a signal to itself, or by an exception."""

    def __init__(self, how):
        self.how = how

    def __call__(self):
        from pretrain.trainer import Trainer

        make_step = Trainer._step

        def step(trainer, *args):
            if trainer.step == 2:
                if self.how == "exception":
                    raise RuntimeError("the disk of step 3 is on fire")
                os.kill(os.getpid(), getattr(signal, self.how))
            return make_step(trainer, *args)

        Trainer._step = step


def reported(folder):
    """The report that the run left, as its bytes tell it."""
    text = (folder / "report.html").read_text()
    packed = re.search(r'<script id="data"[^>]*>([^<]*)</script>', text)[1]
    return Decoded(base64.b64decode(packed)).header["runs"][0]


@pytest.mark.parametrize(("how", "kind", "steps"), [("exception", "error", 2), ("SIGTERM", "stop", 3)])
def test_a_run_that_does_not_finish_leaves_its_report(forks, recipe_file, tmp_path, how, kind, steps):
    recipe = recipe_file(checkpoint={"every": 2})
    (end,) = forks.command("pretrain", recipe, "--run.folder", tmp_path / "run", before=Ending(how))
    assert end.code != 0 and "the report was not written" not in end.err
    run = reported(tmp_path / "run")
    assert run["summary"]["step"] == steps
    assert kind in {event["kind"] for event in run["events"]}


def test_a_run_that_diverges_leaves_its_report_even_without_a_step(forks, recipe_file, tmp_path):
    recipe = recipe_file(optimizer={"lr": 1e30, "min_lr": 1e30, "warmup_steps": 0}, data={"validation": []})
    (end,) = forks.command("pretrain", recipe, "--run.folder", tmp_path / "run", "--model.init-std", "1e30")
    assert end.code != 0 and "the report was not written" not in end.err
    run = reported(tmp_path / "run")
    assert ["not finite" in event["text"] for event in run["events"] if event["kind"] == "error"] == [True]
