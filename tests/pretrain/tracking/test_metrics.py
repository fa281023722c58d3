"""One declaration and one function make a metric."""

import base64
import json
import zlib

import pytest

from pretrain.tracking import read_metrics
from pretrain.tracking.metrics import DECLARED, PAGE, Metric, table


def busiest(layer):
    return max(layer.load)


BUSIEST = Metric("busiest", "fraction", "load of the busiest expert", busiest, console="busiest {:.2f}")


class Declared:
    """Called in a new process: adds the metric."""

    def __call__(self):
        DECLARED.append(BUSIEST)


def test_the_table_in_the_docs_is_that_of_the_declarations(monkeypatch):
    assert table() in PAGE.read_text("utf-8"), "python -m pretrain.tracking.metrics"
    assert len({metric.key for metric in DECLARED}) == len(DECLARED), "a name is declared twice"
    monkeypatch.setattr("pretrain.tracking.metrics.DECLARED", [BUSIEST])
    row = "| `moe/busiest`, `moe/layer_N/busiest` | fraction | load of the busiest expert | every step |"
    assert table().splitlines()[2:] == [row]


def test_a_declared_metric_is_recorded_printed_reported_and_evaluated(forks, recipe_file, tmp_path):
    recipe, folder = recipe_file(checkpoint={"every": 4}, parallel={"expert": 2}), tmp_path / "run"
    end, _ = forks.command("pretrain", recipe, "--run.folder", folder, size=2, before=Declared())
    assert end.code == 0, end.err
    rows = read_metrics(folder / "metrics.jsonl")[1:]
    for row in rows:
        found = [row[f"moe/layer_{n}/busiest"] for n in (1, 2)]
        assert found == [max(row[f"moe/layer_{n}/load"]) for n in (1, 2)]
        assert row["moe/busiest"] == pytest.approx(sum(found) / 2)
    assert f"  busiest {rows[-1]['moe/busiest']:.2f}" in end.out

    page = (folder / "report.html").read_text().split('type="application/octet-stream">')[1]
    payload = zlib.decompress(base64.b64decode(page.split("<")[0]))
    header = json.loads(payload[4 : 4 + int.from_bytes(payload[:4], "little")])
    (declared,) = (found for found in header["metrics"] if found["name"] == "moe/busiest")
    assert (declared["unit"], declared["doc"], declared["section"]) == (BUSIEST.unit, BUSIEST.doc, "routing")
    assert "1/busiest" in header["runs"][0]["layer_curves"] and "moe/busiest" in header["runs"][0]["curves"]

    (end,) = forks.command("fmoe", "evaluate", folder, "--json", before=Declared())
    for layer in json.loads(end.out)["runs"][0]["layers"]:
        assert layer["busiest"] == max(layer["load"])
    (end,) = forks.command("fmoe", "evaluate", folder, before=Declared())
    assert "| busiest " in end.out
