"""Settings from the environment."""

import os

from fmoe.errors import UserError


def float_from_env(key: str, default: float = -1) -> float:
    """A number.

    Raises:
        UserError: it is none.
    """
    text = os.environ.get(key)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise UserError(f"{key}={text!r} is not a number") from None


def switch_from_env(key: str, default: bool = False) -> bool:
    """On where it is "1" or "ON"."""
    return os.environ[key] in ("1", "ON") if key in os.environ else default
