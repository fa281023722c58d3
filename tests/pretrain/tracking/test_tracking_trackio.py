"""In processes of their own: trackio takes its folder from the environment, once."""

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec

import pytest

if find_spec("trackio") is None:
    pytest.skip("trackio is not installed", allow_module_level=True)

PARTS = """
import json, sys
from pathlib import Path
from pretrain.tracking.trackio import TrackioTracker
for folder, steps, resume_step in json.loads(sys.argv[1]):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model": {"num_experts": 2}}
    tracker = TrackioTracker(folder, config=config, resume_step=resume_step, project="tiny", name=folder.name)
    for step in steps:
        tracker.log(step, {"loss": 10.0 - step, "mfu": None, "bad": float("nan"), "moe/layer_1/load": [0.25, 0.75]})
    tracker.close()
from trackio.fragments import import_inbox_dir
from trackio.sqlite_storage import SQLiteStorage
import_inbox_dir()
runs = [
    [run["name"], [row["step"] for row in SQLiteStorage.get_logs("tiny", run["name"], run_id=run["id"])],
     SQLiteStorage.get_run_config("tiny", run["name"], run_id=run["id"])]
    for run in SQLiteStorage.get_run_records("tiny")
]
(last,) = SQLiteStorage.get_logs("tiny", runs[-1][0])[-1:]
print(json.dumps([runs, last]))
"""


def run(parts, **environment):
    """Runs of parts (folder, steps, resume_step), then name, steps and config of every run, and the last row."""
    with socket.create_server(("127.0.0.1", 0)) as hub:  # where trackio would ask who the user is: nobody may
        hub.settimeout(0)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRACKIO_", "HF_"))} | {
            "HF_TOKEN": "hf_nobody",
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            **environment,
        }
        child = subprocess.run(
            [sys.executable, "-c", PARTS, json.dumps([[str(folder), list(steps), at] for folder, steps, at in parts])],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            stdin=subprocess.DEVNULL,
        )
        with pytest.raises(BlockingIOError), closing(hub.accept()[0]):
            pass
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)  # and so nothing else was printed


@pytest.mark.slow
def test_runs_of_one_name_in_one_database_stay_apart(tmp_path):
    first, second = tmp_path / "a" / "run", tmp_path / "b" / "run"
    parts = [(first, range(1, 4), None), (second, range(1, 3), None), (first, range(3, 5), 2), (second, [3], 2)]
    runs, _ = run(parts, TRACKIO_DIR=str(tmp_path / "all"))
    of_first, of_second = ((folder / "trackio_id.txt").read_text().strip() for folder in (first, second))
    assert of_first != of_second
    assert not (first / "trackio").exists()
    found = sorted((config["_Group"] == of_first, name, steps) for name, steps, config in runs)
    assert found == [
        (False, "run", [1, 2]),
        (False, "run-from-2", [3]),
        (True, "run", [1, 2, 3]),
        (True, "run-from-2", [3, 4]),
    ]
