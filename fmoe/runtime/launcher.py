"""The environment variables by which a launcher such as torchrun tells a process its rank, and where the ranks meet."""

import contextlib
import os
from collections.abc import Iterator

from fmoe.errors import UserError

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def number(name: str, default: int) -> int:
    """Return the value of an environment variable; ``default`` if it is not set.

    Raises:
        UserError: the value is not an integer of at least 0.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise UserError(f"the environment variable {name}={text!r} must be an integer of at least 0")
    return int(text)


def is_launched() -> bool:
    """Return whether a launcher started this process, as a rank of a job.

    Raises:
        UserError: RANK or WORLD_SIZE is set, but another variable of a launcher is missing or invalid.
    """
    variables = [f"{name}={os.environ[name]}" for name in _NAMES[:2] if name in os.environ]
    if not variables:
        return False
    for name in _NAMES:
        if name not in os.environ:
            raise UserError(
                f"{name} is not set, but other variables of torchrun are ({', '.join(variables)}): set all of "
                f"{', '.join(_NAMES)}, or none of them for a single process"
            )
    if number("RANK", 0) >= number("WORLD_SIZE", 1):
        raise UserError(f"the environment variable {variables[0]} must be less than {variables[1]}")
    if number("MASTER_PORT", 0) >= 1 << 16:
        raise UserError(f"the environment variable MASTER_PORT={os.environ['MASTER_PORT']} must be at most 65535")
    return True


def world_size() -> int:
    """Return the number of ranks that the launcher started; 1 without a launcher.

    Raises:
        UserError: the launcher's environment variables are incomplete or invalid.
    """
    return number("WORLD_SIZE", 1) if is_launched() else 1


def local_rank() -> int:
    """Return the index of this rank on its machine; 0 without a launcher."""
    return number("LOCAL_RANK", 0)


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Convert a failure of the ranks to meet in the ``with`` block to a UserError that names address and port."""
    import torch.distributed as dist  # not above: `fmoe train --help` starts without torch

    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        where = ", ".join(f"{name}={os.environ.get(name)}" for name in _NAMES[2:])
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"the ranks cannot meet at {where}: {reason}. All ranks need the address of rank 0, and a port that is free"
        ) from error
