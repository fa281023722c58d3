"""The pipeline benchmark: its arithmetic, and a small run of it on two ranks."""

import json
from types import SimpleNamespace

import pytest
from forks import values

from bench.studies import pipeline
from fmoe.errors import UserError


def ideal(stages, t=0.25, rounds=5):
    return [[float(m)] + [(m + stages - 1) * t] * rounds for m in (2, 4, 8, pipeline.LONGEST)]


@pytest.mark.parametrize("stages", [2, 4])
def test_equal_stages_that_send_for_nothing_give_the_formula(stages):
    rows = ideal(stages)
    for index, m in enumerate((2, 4, 8)):
        assert pipeline.bubbles(rows, index) == pytest.approx([(stages - 1) / (m + stages - 1)] * 5)
    lines = pipeline.table({"1f1b": rows}, stages)
    assert lines[-1].endswith("geometric mean of 3: 1.00")
    assert all(line.endswith("| 1.00 |") for line in lines[2:5])


@pytest.mark.slow
def test_a_small_run_gives_a_row_for_each(forks):
    sizes = {"layers": 2, "hidden_size": 48, "sequence_length": 16, "stages": 2}
    arguments = SimpleNamespace(rounds=2, warmup=0, micro_batches=[4, 2], **sizes)
    seconds, same = values(forks.run(2, pipeline.measure, arguments))
    assert seconds == same
    lines = pipeline.table(seconds, 2)
    assert [line.split(" | ")[:3] for line in lines[2:6]] == [
        [f"| {schedule}", "2", m] for schedule in ("1f1b", "gpipe") for m in ("2", "4")
    ]


@pytest.mark.parametrize(
    "options", ["--stages 1", "--stages 3", "--micro-batches 16", "--rounds 1", "--hidden-size 64"]
)
def test_what_cannot_be_is_said(options):
    with pytest.raises(UserError, match=options.strip("-").replace(" ", "=").replace("-", ".")):
        pipeline.main(options.split())


def test_the_table_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline.ranks, "run", lambda *_: {"gpipe": ideal(2)})
    pipeline.main(["--out", str(tmp_path)])
    assert "| gpipe | 2 | 4 |" in (tmp_path / "pipeline.md").read_text()
    assert json.loads((tmp_path / "pipeline.json").read_text())["rows"] == {"gpipe": ideal(2)}
