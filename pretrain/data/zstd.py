"""Files compressed with Zstandard."""

import io
from pathlib import Path
from typing import BinaryIO

from fmoe.errors import UserError, one_line, require


class _Stream(io.RawIOBase):
    """Stream of a zstd file's decompressed bytes."""

    def __init__(self, path: Path):
        arrow = require("pyarrow", "pretrain", "reading files compressed with zstd")
        self._path = path
        self._file = path.open("rb")
        self._error = arrow.ArrowException
        self._stream = arrow.CompressedInputStream(self._file, "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            data = self._stream.read(len(buffer))
        except (OSError, ValueError, self._error) as error:
            what = one_line(error, 200)
            raise UserError(f"{self._path} is truncated, damaged or not a zstd file: {what}") from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()


def open_zstd(path: Path) -> BinaryIO:
    """Open a file of one or several zstd frames, to read its decompressed content.

    Raises:
        UserError: during reading, if the file is damaged or not a zstd file.
        OSError: the file cannot be opened.
    """
    return io.BufferedReader(_Stream(path), buffer_size=1 << 16)
