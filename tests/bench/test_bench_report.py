import json
import platform

from bench import report
from bench.frame import Measurement

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


def test_machine_tells_no_host_name_and_no_path():
    facts = report.describe_machine()
    assert {"cpu", "cores", "threads", "torch", "python", "date"} <= facts.keys()
    values = [str(value) for value in facts.values()]
    assert platform.node() not in values
    assert not any(value.startswith("/") for value in values)
