"""Errors with a message of one line, and helpers that word such messages.

Commands print the line of a `UserError` and end with exit code 2; most other errors keep their traceback
(`fmoe.cli.run`).
"""

import difflib
import importlib
import inspect
import unicodedata
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from numbers import Integral, Real
from types import ModuleType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin

EXIT_USAGE = 2


class UserError(ValueError):
    """Invalid input. The message is one line. For an option, it has the full name, the value, and what is valid."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 3, 7`` for a message."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed. The message names the extra that installs it."""


class BuildError(RuntimeError):
    """The native or the CUDA backend cannot be built or loaded here. The message is one line: what failed and why."""


class CompilerError(BuildError):
    """Failure of a compiler: the reason in one line, and its whole output.

    Attributes:
        output: what the compiler printed.
    """

    def __init__(self, reason: str, output: str):
        super().__init__(reason)
        self.output = output


def printable(text: str) -> str:
    """Return the text with control and format characters, line separators and lone surrogates as escape sequences.

    Text read from files may come from anyone, and a terminal must not execute control sequences in it.
    """
    return "".join(
        character.encode("unicode_escape", "surrogatepass").decode("ascii")
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp", "Cf")
        else character
        for character in text
    )


def one_line(error: BaseException, max_chars: int | None = None, *, with_type: bool = False) -> str:
    """Return the message of any exception as one printable line; the name of its type if the message is empty.

    Args:
        with_type: put the name of the type before the message, too.
    """
    name = type(error).__name__
    message = printable(" ".join(str(error).split())[:max_chars])
    return f"{name}: {message}" if with_type and message else message or name


def known_names(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about the unknown ``name``: the valid names, and the most similar one if any."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"valid names: {', '.join(known) or 'none'}" + (f"; did you mean {near[0]!r}?" if near else "")


def option_names(factory: Any) -> list[str] | None:
    """Return the names of the parameters that a function or class accepts; None if it accepts any name.

    For a class that passes on its ``**options``, the result includes the names that its base classes accept. A
    ``functools.partial`` accepts the names of its function.
    """
    parameters, is_complete = parameters_of(factory)
    return sorted(parameters) if is_complete else None


def parameters_of(factory: Any) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters that `option_names` names, and whether the factory accepts no other names."""
    factory = getattr(factory, "func", factory)
    calls = [factory]
    if isinstance(factory, type):
        calls = [vars(base)["__init__"] for base in factory.__mro__ if "__init__" in vars(base)]
    accepted: dict[str, inspect.Parameter] = {}
    for call in calls:
        parameters = inspect.signature(call).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        accepted = {p.name: p for p in named} | accepted
        if all(p.kind != p.VAR_KEYWORD for p in parameters):
            return accepted, True
    return accepted, False


def check_options(table: str, factory: Any, options: Mapping[str, Any], owner: str, own: Iterable[str]) -> None:
    """Check the names and types of options with which a factory (a class or function) will be called.

    Args:
        table: name of the options for the message, e.g. ``"gate_options"``.
        owner: name of the factory for the message, e.g. ``"switch"``.
        own: parameters of the factory that are not options, e.g. ``d_model``.

    Raises:
        UserError: an unknown name, or a value whose type `wrong_type` recognizes as wrong.
    """
    parameters, is_complete = parameters_of(factory)
    for name, value in options.items():
        if name in own or (is_complete and name not in parameters):
            names = known_names(name, sorted({*parameters} - {*own}))
            raise UserError(f"{table}.{name}={value!r} is not an option of {owner}; {names}")
        wrong = wrong_type(parameters[name].annotation, value) if name in parameters else None
        if wrong:
            raise UserError(f"{table}.{name}={value!r} is not {wrong}")


def wrong_type(annotation: Any, value: Any) -> str | None:
    """Return a description of the annotation's types, e.g. "a number or a string", if ``value`` has none of them.

    Otherwise, return None. Only numbers, bools, strings, mappings, callables and None are recognized: an annotation
    with another type accepts every value.
    """
    expected = []
    for kind in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,):
        entry = _KINDS.get(get_origin(kind) or kind)
        if entry is None or entry[1](value):
            return None
        if entry[0]:
            expected.append(entry[0])
    return " or ".join(expected)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


# Type -> its description, and whether a value has it.
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    NoneType: ("", lambda value: value is None),
    int: ("a whole number", lambda value: _is_number(value, Integral)),
    float: ("a number", lambda value: _is_number(value, Real)),
    bool: ("true or false", lambda value: isinstance(value, Integral) and value in (0, 1)),
    str: ("a string", lambda value: isinstance(value, str)),
    dict: ("a mapping", lambda value: isinstance(value, Mapping)),
    Mapping: ("a mapping", lambda value: isinstance(value, Mapping)),
    Callable: ("a function", callable),
}


def add_name(table: MutableMapping[str, Any], kind: str, name: str, entry: Any) -> None:
    """Add ``entry`` to ``table`` as ``name``.

    A class or function that is defined again, as when a notebook cell runs twice, replaces its old definition.

    Args:
        kind: option that takes the names of this table, for the message, e.g. ``"gate"``.

    Raises:
        UserError: the name is not a string, is empty, or belongs to another entry.
    """
    if not isinstance(name, str) or not name:
        raise UserError(f"{kind}={name!r} must be a non-empty string")
    if name in table and table[name] is not entry:
        was = _defined_as(table[name])
        if was != _defined_as(entry) or was[0].startswith("fmoe.") or was[-1].endswith("<lambda>"):
            raise UserError(f"{kind}={name!r} is registered already, as {'.'.join(was)}: use another name")
    table[name] = entry


def build_named(
    table: Mapping[str, Any], key: str, name: str, options_key: str, options: Mapping[str, Any], **arguments: Any
) -> Any:
    """Call the entry ``name`` of a table of factories with the arguments, by position, and the options as keywords.

    Args:
        key, options_key: options or recipe keys that take the name and the options, for messages.

    Raises:
        UserError: the name is not in the table; the factory does not have an option, or raises TypeError or ValueError.
    """
    if name not in table:
        raise UserError(f"{key}={name} is not known; {known_names(name, sorted(table))}")
    accepted = option_names(table[name])
    for option, value in options.items():
        if accepted is not None and option not in accepted:
            others = [other for other in accepted if other not in arguments]
            raise UserError(f"{options_key}.{option}={value} is not an option of {name}; {known_names(option, others)}")
    try:
        return table[name](*arguments.values(), **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}={name} fails with the options {dict(options)}: {one_line(error)}") from error


def _defined_as(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, ModuleType):
        return (entry.__name__,)
    entry = getattr(entry, "func", entry)  # of a functools.partial
    entry = entry if hasattr(entry, "__qualname__") else type(entry)
    return entry.__module__, entry.__qualname__


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import and return an optional dependency, or raise an error that names the extra to install.

    Args:
        module: module to import, e.g. ``"sentencepiece"``.
        extra: the extra of this distribution that installs it, e.g. ``"pretrain"``.
        purpose: the feature that needs the module, for the message, e.g. ``"fmoe data tokenizer"``.

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
