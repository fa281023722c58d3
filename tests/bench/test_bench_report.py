import json
import platform

import pytest

from bench import report
from bench.frame import Measurement
from bench.options import RESULTS, parser

FACTS = {"cpu": "Some CPU", "cores": 2}


def measurement(label="", **changes):
    values = {
        "label": label,
        "reference": "dense",
        "rounds": 3,
        "warmup": 1,
        "seed": 0,
        "min_seconds": None,
        "unit": "tokens",
        "seconds": {"dense": [0.2, 0.2, 0.2], "moe": [0.1, 0.1, 0.1]},
        "calls": {"dense": 1, "moe": 1},
        "work": {"moe": 1000.0},
    }
    return Measurement(**(values | changes))


def test_json_round_trip(tmp_path):
    rows = [measurement("A"), measurement("B", failures={"peer": "setup: ImportError: no peer"}, min_seconds=0.5)]
    json_path, markdown_path = report.write(rows, tmp_path / "new", "Step: dense & MoE", machine=FACTS)
    assert (json_path.name, markdown_path.name) == ("step-dense-moe.json", "step-dense-moe.md")
    assert report.read(json_path) == rows
    assert json.loads(json_path.read_text())["machine"] == FACTS


def test_markdown_is_what_is_printed(tmp_path, capsys):
    _, path = report.write([measurement()], tmp_path, "step", machine=FACTS)
    assert capsys.readouterr().out.strip() == path.read_text().strip()
    assert path.read_text().splitlines()[2:6] == [
        "| contender | median | quartiles       | ratio [95% interval] | tokens/s |",
        "|-----------|--------|-----------------|----------------------|----------|",
        "| dense     | 200 ms | 200 ms - 200 ms | reference            |          |",
        "| moe       | 100 ms | 100 ms - 100 ms | 2.000 [2.000, 2.000] | 10,000   |",
    ]


def test_markdown_names_rows_means_failures_and_machine():
    rows = [
        measurement("A"),
        measurement("B", seconds={"dense": [0.8] * 3, "moe": [0.1] * 3}, failures={"x|y": "round 2: OSError: gone"}),
    ]
    text = report.markdown(rows, "step", FACTS)
    assert "| B   | moe       |" in text
    assert "* geometric mean over 2 rows: moe 4.000 [4.000, 4.000]" in text
    assert "* failed (B): x|y, round 2: OSError: gone" in text
    assert text.endswith("Machine: cpu Some CPU, cores 2.\n")


def test_markdown_when_the_reference_or_all_have_failed():
    without_reference = measurement(seconds={"moe": [0.1] * 3}, failures={"dense": "setup: RuntimeError"})
    assert "reference failed" in report.markdown([without_reference], "step", FACTS)
    nothing = measurement(seconds={}, work={}, failures={"dense": "setup: RuntimeError"})
    assert "* failed: dense, setup: RuntimeError" in report.markdown([nothing], "step", FACTS)


def test_bars_in_names_are_escaped():
    row = measurement(seconds={"dense": [0.2] * 3, "a|b": [0.1] * 3}, work={})
    assert "| a\\|b " in report.markdown([row], "step", FACTS)


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0123456, "12.35 ms"), (4.2e-5, "42 us"), (3e-9, "3 ns")]
)
def test_duration(seconds, text):
    assert report.duration(seconds) == text


def test_machine_tells_no_host_name_and_no_path():
    facts = report.describe_machine()
    assert {"cpu", "cores", "threads", "torch", "python", "date"} <= facts.keys()
    values = [str(value) for value in facts.values()]
    assert platform.node() not in values
    assert not any(value.startswith("/") for value in values)


def test_options_have_defaults_of_the_benchmark():
    options = parser("step", "Compares steps.", rounds=7).parse_args(["--seed", "3"])
    assert (options.rounds, options.warmup, options.seed, options.out) == (7, 3, 3, RESULTS)
