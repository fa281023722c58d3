"""The benchmark of scaling: its figures by hand, and a small run."""

import json
from types import SimpleNamespace

import pytest

from bench.studies import scaling
from fmoe.errors import UserError


def test_figures_by_hand():
    rows = [
        scaling.Row("strong", 1, 1000, wall=[2.0, 9.0, 1.0], cpu=[2.0, 2.0, 2.0]),
        scaling.Row("strong", 4, 1000, wall=[1.0], cpu=[2.5]),
        scaling.Row("weak", 2, 2000, wall=[1.0], cpu=[3.0]),
    ]
    arguments = SimpleNamespace(recipe="quickstart", split="data", precision="fp32", visits=1)
    text = scaling.markdown(rows, arguments, {"cores": 2})
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert cells[1] == ["strong", "1", "1,000", "2 s", "500", "500", "100.0%", "2,000.0", "100.0%"]
    assert cells[2] == ["strong", "4*", "1,000", "1 s", "1,000", "250", "50.0%", "2,500.0", "80.0%"]
    assert cells[3] == ["weak", "2", "2,000", "1 s", "2,000", "1,000", "100.0%", "1,500.0", "100.0%"]
    assert "2 cores" in text
    assert "cores" not in scaling.markdown(rows[2:], arguments, {"cores": 2}).split("Machine:")[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch=6"], "--batch=6 must be a multiple of 4"),
        (["--ranks", "0"], "--ranks=0"),
        (["--visits=0"], "--visits=0"),
        (["--split=tensor", "--ranks", "1", "4"], "num_heads"),
    ],
)
def test_wrong_options(argv, message):
    with pytest.raises(UserError, match=message):
        scaling.main(argv)


@pytest.mark.slow
def test_two_processes(tmp_path):
    sizes = ["--ranks", "1", "2", "--batch=2", "--rounds=2", "--warmup=0", "--visits=1"]
    scaling.main([*sizes, "--split=expert", f"--out={tmp_path}"])
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    tokens = 2 * 256
    assert [(row["mode"], row["processes"], row["tokens"]) for row in rows] == [
        ("strong", 1, tokens), ("strong", 2, tokens), ("weak", 1, tokens), ("weak", 2, 2 * tokens),
    ]  # fmt: skip
    assert all(len(row["wall"]) == len(row["cpu"]) == 2 and min(row["wall"] + row["cpu"]) > 0 for row in rows)
    assert (tmp_path / "scaling.md").read_text().count("| weak") == 2
