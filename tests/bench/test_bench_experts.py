"""`python -m bench experts`: the table of families, and timed steps."""

import json

import pytest

from bench.studies import experts


def test_report(tmp_path):
    pytest.importorskip("transformers")
    sizes = ["--width", "16", "--layers", "1", "--experts", "4", "--length", "32"]
    assert experts.main(["--families", "Mixtral", "--rounds", "2", *sizes, "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "experts.json").read_text())["rows"]
    assert row["family"] == "MixtralForCausalLM" and row["weights"] == "shared"
    (measured,) = json.loads((tmp_path / "experts-speed.json").read_text())["measurements"]
    assert measured["seconds"].keys() == {"fmoe", "grouped_mm", "eager"}
    saved = {name: float(facts["saved"].removesuffix(" MiB")) for name, facts in measured["facts"].items()}
    assert saved["fmoe"] < saved["eager"]
