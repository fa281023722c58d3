"""Local server for the report of runs that are still training."""

import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fmoe.errors import UserError
from pretrain.report.page import page
from pretrain.report.payload import encode
from pretrain.report.runs import RunFolder

ADDRESS = "127.0.0.1"
# Accepted Host headers. Any other name that resolves to this machine may be DNS rebinding. The port is not checked, so
# that tunnels work.
_HOSTS = ("127.0.0.1", "localhost")


class LiveRuns:
    """Runs that may still be training, and the data of their report page. Safe for concurrent threads.

    Args:
        runs: from `open_runs`.
    """

    def __init__(self, runs: Sequence[RunFolder]):
        self._runs = runs
        self._lock = threading.Lock()
        self._version = 0
        self._payload = b""

    def read(self) -> tuple[int, bytes]:
        """Read new data of the runs; return a version number and the page's data from `encode`.

        The version number increases when the data changes.

        Raises:
            UserError: a file is damaged.
        """
        with self._lock:
            if any([run.refresh() for run in self._runs]) or not self._payload:
                self._payload = encode(self._runs)
                self._version += 1
            return self._version, self._payload


def make_server(runs: Sequence[RunFolder], port: int) -> ThreadingHTTPServer:
    """Build a server on 127.0.0.1 for the report of runs.

    ``/`` is the page. ``/data?after=VERSION`` is the page's newest data, or status 204 if VERSION is the newest.

    Args:
        port: port to listen on; 0 for a free one.

    Raises:
        UserError: the port is in use or not permitted, or a file is damaged.
    """
    live = LiveRuns(runs)
    live.read()  # reports a damaged file before serving
    handler = type("Handler", (_ReportHandler,), {"runs": live})
    try:
        return _Server((ADDRESS, port), handler)
    except OSError as error:
        raise UserError(f"--port {port}: cannot listen on {ADDRESS}:{port}: {error.strerror}") from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # raised when a browser leaves before it has the answer
            super().handle_error(request, client_address)


class _ReportHandler(BaseHTTPRequestHandler):
    runs: LiveRuns
    server_version = "fmoe"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds, for idle connections

    def do_GET(self) -> None:
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            host = None
        if host not in _HOSTS:
            self._say(HTTPStatus.FORBIDDEN, b"the Host header must be 127.0.0.1 or localhost\n")
            return
        url = urlsplit(self.path)
        try:
            version, payload = self.runs.read()
        except UserError as error:
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode(errors="replace"))
            return
        if url.path == "/":
            self._say(HTTPStatus.OK, page(payload, live=True).encode(), "text/html; charset=utf-8")
        elif url.path != "/data":
            self._say(HTTPStatus.NOT_FOUND, b"not found: the paths are / and /data\n")
        elif parse_qs(url.query).get("after") == [str(version)]:
            self._say(HTTPStatus.NO_CONTENT)
        else:
            self._say(HTTPStatus.OK, payload, "application/octet-stream", **{"X-Version": str(version)})

    def _say(
        self, status: HTTPStatus, body: bytes = b"", kind: str = "text/plain; charset=utf-8", **headers: str
    ) -> None:
        self.send_response(status)
        fixed = {
            "Cache-Control": "no-store",
            "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself has a stricter policy
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        if status != HTTPStatus.NO_CONTENT:
            fixed |= {"Content-Type": kind, "Content-Length": str(len(body))}
        for name, value in (fixed | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments) -> None:
        pass  # the page polls every two seconds
