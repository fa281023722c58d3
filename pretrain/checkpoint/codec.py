"""JSON for the states of a trainer: plain JSON plus an exact form of some Python values.

Bytes, tensors, tuples and non-finite floats each become an object with one key that begins with ``$``. Nothing else is
encoded, in particular no class names: reading a file never runs code.
"""

import base64
import json
import math
from typing import Any

import torch

from pretrain.checkpoint.shard import CODES, bytes_of, dtype_named, name_of


def dumps(value: Any, name: str) -> bytes:
    """Encode a value as JSON.

    Supported types are dict with string keys, list, tuple, str, int, float, bool, None, bytes and tensors.

    Args:
        name: name of the value in errors.

    Raises:
        TypeError: a value has another type; a tensor has a dtype that is not in `pretrain.checkpoint.shard.CODES`; a
            key is not a string; or a key begins with ``$``. The message has the path of the value, such as
            ``state.optimizer.lr``.
    """
    return json.dumps(_encode(value, name), allow_nan=False).encode()


def loads(data: bytes) -> Any:
    """Return the value that `dumps` encoded; tensors are on the CPU.

    Raises:
        ValueError: ``data`` is malformed.
    """
    try:
        return _decode(json.loads(data))
    except (KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"malformed state ({error})") from error


def _encode(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        if value.dtype not in CODES:
            raise TypeError(f"{name}: dtype {value.dtype} is not supported")
        data = base64.b64encode(bytes_of(value.detach().cpu().contiguous())).decode()
        return {"$tensor": {"dtype": name_of(value.dtype), "shape": list(value.shape), "data": data}}
    if isinstance(value, list):
        return [_encode(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, f"{name}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise TypeError(f"{name}: key {key!r} is not supported: keys must be strings that do not begin with $")
        return {key: _encode(item, f"{name}.{key}") for key, item in value.items()}
    kind = type(value)
    raise TypeError(f"{name}: type {kind.__module__}.{kind.__qualname__} is not supported in JSON")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$float": str(text)}:
            return float(text)
        case {"$bytes": str(text)}:
            return base64.b64decode(text, validate=True)
        case {"$tuple": list(items)}:
            return tuple(_decode(item) for item in items)
        case {"$tensor": dict(tensor)}:
            raw = bytearray(base64.b64decode(tensor["data"], validate=True))
            dtype = dtype_named(tensor["dtype"])
            flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
            return flat.reshape(tensor["shape"])
    return {key: _decode(item) for key, item in value.items()}
