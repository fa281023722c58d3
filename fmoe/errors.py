"""An invalid input, as one line that names the value, the limit and the key.

Commands end with that line and exit code 2; everything else keeps its traceback, because it is our mistake.
"""

import difflib
import importlib
import unicodedata
from collections.abc import Iterable
from types import ModuleType

EXIT_USAGE = 2


class UserError(ValueError):
    """A wrong input. The message is one line: the value, the limit it breaks, the full name of the key."""


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed. The message names the extra that brings it."""


class BuildError(RuntimeError):
    """The native backend cannot be built or loaded on this machine. The message is one line: what failed and why."""


def printable(text: str) -> str:
    """The text with control characters, escape sequences' among them, and lone surrogates written as escapes.

    Names in files are somebody else's: a terminal must not act on them.
    """
    return "".join(
        character.encode("unicode_escape", "surrogatepass").decode("ascii")
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp", "Cf")
        else character
        for character in text
    )


def known_names(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known ones, and the nearest to it."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"there are {', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else "")


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or raise an error that names the extra to install.

    Args:
        module: what to import, e.g. ``"sentencepiece"``.
        extra: the extra of this distribution that installs it, e.g. ``"pretrain"``.
        purpose: what needs it, the subject of the sentence, e.g. ``"fmoe data tokenizer"``.

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
