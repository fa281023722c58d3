"""Upload of an export, by the real client to a stand-in for the Hub on this machine."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from huggingface_hub import constants

from fmoe.errors import UserError
from pretrain.interchange import cli
from pretrain.interchange.families import FAMILIES
from pretrain.interchange.outgoing import Exported

OLD = "model-00001-of-00002.safetensors"


class Hub(BaseHTTPRequestHandler):
    """A repository with weights of an earlier export and a picture."""

    def do_GET(self):
        commit = {"id": "me/mine", "sha": "0" * 40, "private": self.server.is_private, "siblings": [], "tags": []}
        files = [{"type": "file", "path": path, "size": 1, "oid": "0" * 40} for path in (OLD, "picture.png")]
        self._answer(files if "/tree/" in self.path else commit)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path.partition("?")[0], body, self.headers.get("Authorization")))
        if "/commit/" in self.path:
            self._answer({"commitUrl": f"{self.server.address}/me/mine/commit/1", "commitOid": "1" * 40})
        elif "/preupload/" in self.path:
            how = {"uploadMode": "regular", "shouldIgnore": False}
            self._answer(
                {"files": [how | {"path": file["path"]} for file in json.loads(body)["files"]]}, self.server.status
            )
        elif self.path == "/api/repos/create":
            self._answer({"url": f"{self.server.address}/me/mine"})
        else:
            self._answer({"errors": [], "warnings": []})

    def _answer(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    server.status = 200
    server.is_private = True
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def exports(monkeypatch):
    """The names under which `export_checkpoint` was called; it writes two small files."""
    names = []

    def export(source, out, form, *, repo, **_):
        names.append(repo)
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"weights")
        (out / "README.md").write_text("---\nlicense: mit\n---\n")
        return Exported(FAMILIES["mixtral"], 7, ("model.safetensors", "README.md"))

    monkeypatch.setattr(cli, "export_checkpoint", export)
    return names


def test_an_export_is_uploaded_in_one_commit(hub, exports, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.export_main(["run", str(out), "--push", "me/mine", "--private"]) == 0
    assert f"uploaded to {hub.address}/me/mine" in capsys.readouterr().out
    assert exports == ["me/mine"]
    created = [json.loads(body) for path, body, _ in hub.asked if path == "/api/repos/create"]
    assert len(created) == 1 and created[0]["name"] == "mine" and "private" in json.dumps(created[0])
    assert {token for *_, token in hub.asked} == {"Bearer hf_secret"}
    (commit,) = [body for path, body, _ in hub.asked if path == "/api/models/me/mine/commit/main"]
    entries = [json.loads(line) for line in commit.splitlines()]
    files = {entry["value"]["path"]: entry["value"]["content"] for entry in entries if entry["key"] == "file"}
    assert files.keys() == {"model.safetensors", "README.md"}
    assert base64.b64decode(files["model.safetensors"]) == b"weights"
    assert [entry["value"]["path"] for entry in entries if entry["key"] == "deletedFile"] == [OLD]


@pytest.mark.parametrize("broken", ["status", "is_private"])
def test_a_failed_upload_keeps_the_folder_and_says_how_to_retry(hub, exports, tmp_path, broken):
    out = tmp_path / "out"
    setattr(hub, broken, {"status": 403, "is_private": False}[broken])
    with pytest.raises(UserError) as refused:
        cli.export_main(["run", str(out), "--push", "me/mine", "--private"])
    assert f"hf upload me/mine {out} --private" in str(refused.value) and "\n" not in str(refused.value)
    assert (out / "model.safetensors").read_bytes() == b"weights"
    assert not any("/commit/" in path for path, *_ in hub.asked)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--push", "mine"], "OWNER/NAME"),
        (["--push", "me/../mine"], "me/../mine"),
        (["--push", "me/mine"], "HF_TOKEN"),
        (["--private"], "--push"),
    ],
)
def test_wrong_options_are_refused_before_the_export(exports, tmp_path, monkeypatch, options, part):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match=part):
        cli.export_main(["run", str(tmp_path / "out"), *options])
    assert not exports and not (tmp_path / "out").exists()
