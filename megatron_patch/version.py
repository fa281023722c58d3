"""Which megatron-core this adapter knows."""

import itertools
from importlib.metadata import PackageNotFoundError, version

from fmoe.errors import MissingPackageError, UserError

LOWEST, BELOW = (0, 16, 1), (0, 17)
REQUIREMENT = "megatron-core>=0.16.1,<0.17"


def check_version() -> str:
    """The installed version of megatron-core.

    Raises:
        UserError: it is absent or outside the supported range.
    """
    try:
        installed = version("megatron-core")
    except PackageNotFoundError as error:
        raise MissingPackageError("megatron-core is not installed: pip install 'fmoe[pretrain]'") from error
    numbers = []
    for part in installed.split("."):
        digits = "".join(itertools.takewhile(str.isdigit, part))  # of 0rc2 the 0
        if not digits:
            break
        numbers.append(int(digits))
    if not LOWEST <= tuple(numbers) < BELOW:
        raise UserError(f"megatron-core {installed} is not supported: pip install '{REQUIREMENT}'")
    return installed
