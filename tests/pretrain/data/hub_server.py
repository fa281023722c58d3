"""A Hugging Face Hub on this machine, with the datasets of folders ``owner/name``."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(root: Path, gated: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield the server's address, and the list of requests that it gets."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            requests.append(f"{self.command} {path}")
            parts = path.strip("/").split("/")
            is_api = parts[0] == "api"
            name, rest = "/".join(parts[is_api + 1 : is_api + 3]), parts[is_api + 3 :]
            folder = root / name
            if not folder.is_dir():
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif rest[:1] in (["auth-check"], ["resolve"]) and name in gated and "Authorization" not in self.headers:
                self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            elif rest[:1] in (["revision"], ["tree"], ["resolve"]) and rest[1] not in (COMMIT, "main"):
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif rest[:1] == ["resolve"]:
                self._file(folder.joinpath(*rest[2:]))
            elif rest[:1] == ["tree"]:
                self._json([self._entry(file, folder) for file in self._files(folder.joinpath(*rest[2:]))])
            elif rest[:1] == ["paths-info"]:
                self._json([self._entry(file, folder) for file in self._files(folder)])
            else:
                siblings = [{"rfilename": str(file.relative_to(folder))} for file in self._files(folder)]
                gates = "auto" if name in gated else False
                self._json({"id": name, "sha": COMMIT, "siblings": siblings, "gated": gates, "private": False})

        def _files(self, folder: Path) -> list[Path]:
            return sorted(file for file in folder.rglob("*") if file.is_file())

        def _entry(self, file: Path, folder: Path) -> dict:
            return {
                "type": "file",
                "path": str(file.relative_to(folder)),
                "size": file.stat().st_size,
                "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
            }

        def _file(self, file: Path) -> None:
            if not file.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            data = file.read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if (wanted := self.headers.get("Range")) is not None:
                begin, _, end = wanted.removeprefix("bytes=").partition("-")
                last = min(int(end), len(data) - 1) if end else len(data) - 1
                headers["Content-Range"] = f"bytes {begin}-{last}/{len(data)}"
                self._send(206, data[int(begin) : last + 1], headers)
            else:
                self._send(200, data, headers)

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
