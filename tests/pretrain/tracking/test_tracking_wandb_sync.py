"""``wandb sync`` of a run that was resumed, to a stand-in for the server."""

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

WANDB = os.path.join(os.path.dirname(sys.executable), "wandb")
PART = """
import sys
from pathlib import Path
from pretrain.tracking.loads import LoadPictures
from pretrain.tracking.wandb import WandbTracker
first, last, resume_step = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) or None
tracker = WandbTracker(Path(sys.argv[1]), config={"a": 1}, resume_step=resume_step, name="tiny")
view = LoadPictures(2, last)
for step in range(first, last + 1):
    tracker.log(step, view(step, {"loss": 10.0 - step, "moe/layer_1/load": [0.1, 0.9]}))
tracker.close()
"""


class Server(BaseHTTPRequestHandler):
    """Answers what wandb-core asks of runs, and keeps steps and group by run, files by name."""

    protocol_version = "HTTP/1.1"
    steps: dict
    groups: dict
    files: list

    def log_message(self, *_):
        pass

    def _body(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self):
        self._body()
        self._answer({})

    def do_POST(self):
        told = json.loads(self._body())
        if "file_stream" in self.path:
            steps = self.steps.setdefault(self.path.split("/")[-2], [])
            for name, part in told.get("files", {}).items():
                if "history" in name:
                    assert part["offset"] == len(steps), "a line is written over, or left out"
                    steps += [json.loads(line)["_step"] for line in part["content"]]
            return self._answer({"exitcode": None, "limits": {}})
        variables = told.get("variables") or {}
        project = {"id": "p", "name": "fmoe", "entity": {"id": "e", "name": "me"}}
        if "mutation UpsertBucket" in told["query"]:
            bucket = {"id": "b", "name": variables["name"], "displayName": "n", "description": None, "project": project}
            bucket |= {"config": variables.get("config"), "sweepName": None}
            bucket["historyLineCount"] = len(self.steps.get(variables["name"], []))
            if group := variables.get("groupName"):  # not in later updates of a run
                self.groups[variables["name"]] = group
            return self._answer({"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}})
        if "mutation CreateRunFiles" in told["query"]:
            address = f"http://127.0.0.1:{self.server.server_address[1]}/upload"
            self.files += variables["files"]
            files = [{"name": name, "uploadUrl": address} for name in variables["files"]]
            return self._answer({"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}})
        return self._answer({"data": {}})


class Quiet(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """wandb closes connections as it likes."""


@contextmanager
def serving():
    handler = type("Handler", (Server,), {"steps": {}, "groups": {}, "files": []})
    with Quiet(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", handler
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False], ids=["all at once", "a part at a time"])
def test_every_process_of_a_run_is_uploaded_as_a_run_of_its_group(tmp_path, together):
    if not os.path.exists(WANDB):
        pytest.skip("the wandb command is not beside this Python")
    run, home = tmp_path / "run", tmp_path / "home"
    run.mkdir()
    home.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment |= {"HOME": str(home), "NETRC": str(home / "none"), "WANDB_ERROR_REPORTING": "false"}
    # Six steps, then on from the fourth, then on from the third: each time some are made again.
    for first, last, resume_step in ((1, 6, 0), (5, 8, 4), (4, 9, 3)):
        argv = [sys.executable, "-c", PART, run, str(first), str(last), str(resume_step)]
        subprocess.run(argv, env=environment, check=True, timeout=240)
    parts = sorted(run.glob("wandb/offline-run-*"))
    assert len(parts) == 3
    with serving() as (address, server):
        environment |= {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0123456789" * 4}
        for paths in [parts] if together else [[part] for part in parts]:
            ended = subprocess.run(
                [WANDB, "sync", *paths], env=environment, capture_output=True, text=True, timeout=240, cwd=tmp_path
            )
            assert ended.returncode == 0, ended.stderr
            assert len(re.findall("Finished syncing", ended.stderr)) == len(paths), ended.stderr
    assert sorted(server.steps.values()) == [list(range(1, 7)), list(range(4, 10)), list(range(5, 9))]
    assert set(server.groups.values()) == {(run / "wandb_id.txt").read_text().strip()}
    assert server.groups.keys() == server.steps.keys()
    assert any(name.startswith("media/images/moe/load_") for name in server.files)
