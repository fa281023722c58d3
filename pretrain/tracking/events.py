"""``events.jsonl``: starts, saves, warnings and other events of a run, one strict JSON object per line.

Each event has ``step`` (steps completed), ``time`` (seconds since 1970), ``kind`` and ``text``. Kinds: ``start``,
``resume``, ``save``, ``skip``, ``warning``, ``profile``, ``stop`` (by a signal), ``error``, ``end``. Events are only
appended. A run resumed from an earlier checkpoint adds a ``resume`` with the checkpoint's step, and keeps the later
events.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"
KINDS = ("start", "resume", "save", "skip", "warning", "profile", "stop", "error", "end")


class EventLog:
    """Append-only event file, safe for concurrent threads. An event is on disk when `add` returns.

    Args:
        path: the file, in an existing folder. An existing file is appended to. If a killed process left a last line
            without a newline, the newline is added.
    """

    def __init__(self, path: Path):
        self.path = path
        if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
            self._append(b"\n")

    def add(self, step: int, kind: str, text: str) -> None:
        """Append an event.

        Raises:
            OSError: the write failed.
        """
        assert kind in KINDS, kind
        event = {"step": step, "time": round(time.time(), 3), "kind": kind, "text": text}
        self._append((json.dumps(event) + "\n").encode())

    def _append(self, line: bytes) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run in the order of the file; [] if there is no file. Invalid lines are skipped."""
    events = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and type(event.get("step")) is int and event.get("kind") in KINDS:
            seconds = event.get("time")
            if not isinstance(seconds, int | float) or not math.isfinite(seconds):
                seconds = None
            text = str(event.get("text", ""))
            events.append({"step": event["step"], "kind": event["kind"], "time": seconds, "text": text})
    return events
