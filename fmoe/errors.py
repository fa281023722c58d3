"""Errors for invalid input, whose message is one line that names the key, the value and the limit.

Commands end with that line and exit code 2. All other errors keep their traceback, because they are our mistakes.
"""

import difflib
import importlib
import unicodedata
from collections.abc import Iterable
from types import ModuleType

EXIT_USAGE = 2


class UserError(ValueError):
    """Invalid input. The message is one line: the full name of the key, the value, and the limit it violates."""


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed. The message names the extra that installs it."""


class BuildError(RuntimeError):
    """The native backend cannot be built or loaded on this machine. The message is one line: what failed and why."""


def printable(text: str) -> str:
    """Return the text with control and format characters, line separators and lone surrogates as escape sequences.

    Names in files may come from anyone, and a terminal must not execute control sequences in them.
    """
    return "".join(
        character.encode("unicode_escape", "surrogatepass").decode("ascii")
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp", "Cf")
        else character
        for character in text
    )


def known_names(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the known names and the most similar of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"there are {', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else "")


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or raise an error that names the extra to install.

    Args:
        module: module to import, e.g. ``"sentencepiece"``.
        extra: the extra of this distribution that installs it, e.g. ``"pretrain"``.
        purpose: subject of the message, the feature that needs the module, e.g. ``"fmoe data tokenizer"``.

    Raises:
        MissingPackageError: the package itself is absent. An error inside the package propagates unchanged.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingPackageError(
            f"{purpose} needs the package {module.split('.')[0]}, which is not installed: pip install 'fmoe[{extra}]'"
        ) from error
