"""Newest tested versions of packages that have broken fmoe in a minor version."""

import functools
import logging
import re
from importlib.metadata import PackageNotFoundError, version

# The upper bounds of the extras in pyproject.toml. `megatron_patch.versions` has those of megatron-core.
TESTED = {"transformers": (5, 24)}


def installed(package: str) -> tuple[int, ...]:
    """Return major and minor number of the installed version; zeros if the package is not installed."""
    try:
        return tuple(map(int, re.findall(r"\d+", version(package))[:2]))
    except PackageNotFoundError:
        return (0, 0)


@functools.cache
def warn_untested(package: str) -> None:
    """Log a warning, once per process, if the installed version of a package is newer than the one in `TESTED`."""
    tested = TESTED[package]
    if installed(package) > tested:
        newest = ".".join(map(str, tested))
        text = "%s %s is installed, but fmoe was tested up to %s: compare outputs before you rely on them"
        logging.getLogger("fmoe").warning(text, package, version(package), newest)
