"""What was measured to be the best, kept in the cache folder beside what is built."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fmoe.errors import BuildError


class Choices:
    """Choices by key, in a JSON file that the processes of a machine share. Where there is no folder to write to, those
    of this process.

    Args:
        name: of the file.
        is_valid: whether a value that was read is one; others are left out.
    """

    def __init__(self, name: str, is_valid: Callable[[object], bool]):
        self._name, self._is_valid = name, is_valid
        self._known: dict[str, object] | None = None

    def get(self, key: str):
        """The value, or None."""
        if self._known is None:
            self._known = {key: value for key, value in self._read().items() if self._is_valid(value)}
        return self._known.get(key)

    def put(self, key: str, value: object) -> None:
        """Keeps a value; what other processes have written since stays."""
        self.get(key)
        self._known[key] = value
        path = self._path()
        if path is None:
            return
        with suppress(OSError, ValueError):
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({**self._read(), **self._known}, indent=1), encoding="utf-8")
            os.replace(part, path)

    def _read(self) -> dict[str, object]:
        path = self._path()
        with suppress(OSError, ValueError):
            if path is not None and isinstance(found := json.loads(path.read_text(encoding="utf-8")), dict):
                return found
        return {}

    def _path(self) -> Path | None:
        from fmoe.kernels import cache

        try:
            return cache.writable() / self._name
        except BuildError:
            return None
