"""`fmoe report` and `fmoe report --live`: files, the server, who may ask it."""

import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
from made_up import write_run
from test_report_payload import Decoded

from fmoe.cli import run
from fmoe.errors import UserError
from pretrain.report import live
from pretrain.report.cli import main
from pretrain.report.live import make_server
from pretrain.report.runs import open_runs


def report(*argv):
    return run("fmoe report", lambda: main([str(part) for part in argv]))


def test_the_file_lies_in_the_run_or_where_it_is_wanted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    a, b = (write_run(tmp_path / name, 5) for name in "ab")
    assert report(a) == 0 and (a / "report.html").stat().st_size > 50_000
    assert str(a / "report.html") in capsys.readouterr().out
    assert report(a, b) == 0 and (tmp_path / "report.html").is_file()
    assert report(a, "--out", tmp_path / "new" / "x.html") == 0 and (tmp_path / "new" / "x.html").is_file()
    assert not list(tmp_path.glob("**/*.tmp"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "nowhere is not a run folder"),
        (["empty"], "empty has no metrics.jsonl"),
        (["run", "run"], "run is given twice"),
        (["run", "--out", "empty"], "empty is a folder: pass a file with --out"),
        (["run", "--port", "80"], "--port 80 requires --live"),
        (["run", "--live", "--out", "x.html"], "--out x.html and --live"),
        (["run", "--live", "--port", "70000"], "--port 70000 must be between 0 and 65535"),
        (["nowhere", "--live"], "nowhere is not a run folder"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", 2)
    (tmp_path / "empty").mkdir()
    assert report(*argv) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not list(tmp_path.glob("**/*.html"))


def test_a_port_that_is_taken(tmp_path):
    runs = open_runs([write_run(tmp_path / "run", 2)])
    with make_server(runs, 0) as server, pytest.raises(UserError, match=f"--port {server.server_port}: cannot listen"):
        make_server(runs, server.server_port)


@contextmanager
def serving(*folders):
    """``ask(path, **headers) -> (status, headers, body)`` of a live report."""
    with make_server(open_runs(folders), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()

        def ask(path, method="GET", **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer.status, answer.headers, body

        ask.port, ask.address = server.server_port, server.server_address[0]
        try:
            yield ask
        finally:
            server.shutdown()
            thread.join()


def test_it_gives_the_page_and_what_is_new(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    with serving(folder) as ask:
        assert ask.address == "127.0.0.1"
        status, headers, body = ask("/")
        assert status == 200 and b'data-mode="live"' in body and b"connect-src 'self'" in body
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        status, headers, body = ask("/data?after=0")
        version = headers["X-Version"]
        assert status == 200 and Decoded(body).header["runs"][0]["summary"]["step"] == 5
        assert ask(f"/data?after={version}")[::2] == (204, b"")
        with (folder / "metrics.jsonl").open("a") as more:
            more.write(json.dumps({"step": 6, "loss": 1.0}) + '\n{"step": 7')
        status, headers, body = ask(f"/data?after={version}")
        assert status == 200 and headers["X-Version"] != version
        assert Decoded(body).header["runs"][0]["summary"]["step"] == 6
        assert ask(f"/data?after={headers['X-Version']}")[0] == 204
        assert ask("/metrics.jsonl")[0] == ask("/../config.toml")[0] == 404
        assert ask("/", method="POST")[0] == 501


def test_a_run_that_has_not_begun_is_waited_for(tmp_path):
    with serving(tmp_path) as ask:
        assert ask("/")[0] == 200
        version = ask("/data")[1]["X-Version"]
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
        assert Decoded(ask(f"/data?after={version}")[2]).header["runs"][0]["summary"]["step"] == 1


HOSTS = ["evil.example", "127.0.0.1.evil.example:80", "169.254.0.1", "", "[::1", "x.localhost"]


@pytest.mark.parametrize("host", HOSTS)
def test_a_page_elsewhere_whose_name_leads_here_gets_nothing(tmp_path, host):
    with serving(write_run(tmp_path / "run", 5)) as ask:
        for path in ("/", "/data"):
            status, _, body = ask(path, Host=host)
            assert status == 403 and b"data" not in body
        assert ask("/", Host="localhost:1")[0] == 200, "a tunnel has a port of its own"


def test_a_file_that_breaks_meanwhile_is_said(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    with serving(folder) as ask:
        with (folder / "metrics.jsonl").open("a") as more:
            more.write("broken\n")
        status, _, body = ask("/data")
        assert status == 500 and b"metrics.jsonl, line 7" in body


@pytest.mark.slow
def test_ctrl_c_ends_it(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    code = "import sys; from fmoe.cli import run; from pretrain.report.cli import main\n"
    code += "sys.exit(run('fmoe report', lambda: main(sys.argv[1:])))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), "--live"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        # Where the tests run in the background of a shell, it has them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    port = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())[1]
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    connection.request("GET", "/data")
    assert connection.getresponse().status == 200  # and the connection stays open
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    connection.close()
    assert process.returncode == 0 and "Traceback" not in err, (out, err)


def test_a_browser_that_leaves_is_not_an_error(tmp_path, monkeypatch, capfd):
    """It closes the connection with a reset, while the answer is being sent."""
    said = threading.Event()
    respond = live._ReportHandler._say

    def say(self, *arguments):
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        try:
            for _ in range(2):  # the first write may only fill a buffer
                respond(self, HTTPStatus.OK, bytes(1 << 22))
        finally:
            said.set()

    with serving(write_run(tmp_path / "a", 5)) as ask:
        monkeypatch.setattr(live._ReportHandler, "_say", say)
        gone = socket.create_connection(("127.0.0.1", ask.port))
        gone.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert said.wait(60)
        monkeypatch.undo()
        assert ask("/")[0] == 200
    assert capfd.readouterr().err == ""
