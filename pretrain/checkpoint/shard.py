"""Safetensors files: dtypes, a reader, and a writer that writes and hashes in a single pass.

The writer of the library safetensors returns no digest, so its files would have to be read again. It also raises no
OSError.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fmoe.errors import UserError
from pretrain.checkpoint.files import FileRecord, write_file

# torch dtype -> its code in a safetensors header.
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
RESERVED_KEY = "__metadata__"
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name: ``"bfloat16"`` -> ``torch.bfloat16``.

    Raises:
        ValueError: the name is not that of a dtype in `CODES`.
    """
    if name not in _BY_NAME:
        raise ValueError(f"unknown dtype {name!r}")
    return _BY_NAME[name]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def open_shard(path: Path) -> safe_open:
    """Open a safetensors file. No tensor is read yet.

    Raises:
        UserError: the file is unreadable or damaged.
    """
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write contiguous CPU tensors as a safetensors file and sync it.

    Raises:
        OSError: see `write_file`.
    """
    # Widest elements first, after a header padded to 8 bytes: every tensor is aligned to its own element size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    header = header_of((key, tensor.dtype, tensor.shape) for key, tensor in ordered.items())
    return write_file(path, [header, *map(bytes_of, ordered.values())])


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the beginning of a safetensors file: the length of the header, and the header padded to 8 bytes.

    Args:
        tensors: name, dtype and shape of each tensor, in the order of the data.
    """
    header: dict[str, Any] = {} if metadata is None else {RESERVED_KEY: metadata}
    end = 0
    for name, dtype, shape in tensors:
        begin = end
        end += prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
