"""Declaration of a recipe key.

The annotation of a section's field has the key's type, its bounds and the effect of a change when a run resumes; the
docstring of the field is its help. `declared` returns these as data, of which `pretrain.config.load` makes the checks
and `pretrain.config.reference` the documentation.
"""

import math
import os
import types
import typing
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, astuple, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, GroupedMetadata, Gt, Interval, Le, Lt, MinLen, MultipleOf

from fmoe.errors import UserError

MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class OnResume:
    """Effect of a change of the key when a run resumes; empty if the key must not change.

    A section's attribute ``on_resume`` is the effect for its keys without an annotation.
    """

    effect: str


class AllowInfinity:
    """Accept infinity, which other numbers refuse."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(source) | {"allow_inf_nan": True}


@dataclass(frozen=True)
class Check:
    """A function that returns the valid value, or raises ValueError with a message that continues the key's name."""

    function: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.function, handler(source))


def check_text(text: str) -> str:
    """Return a text; raise ValueError for control characters except tab and line feed, and for invalid UTF-8."""
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in set(text) - {"\t", "\n"}):
        raise ValueError(f"={text!a} has control characters, line separators or invalid UTF-8: remove them")
    return text


def check_path(key: str, path: str) -> None:
    """Raise UserError for a path that is too long for a file system."""
    try:
        _check_path(path)
    except ValueError as error:
        raise UserError(f"{key}{error}") from error


def _check_path(path: str) -> str:
    encoded = os.fsencode(path)
    if len(encoded) >= 4096 or any(len(part) > 255 for part in encoded.split(b"/")):
        raise ValueError(f"={path[:40]}... is too long: a path has at most 4095 bytes, each name in it 255")
    return path


def _check_prefix(path: str) -> str:
    if not Path(path).name:
        raise ValueError(f"={path} must be the prefix of .bin and .idx files")
    return path


def _check_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of options with "none" as None and tuples as lists, at any depth."""
    return {check_text(name): _check_option(value, f".{name}") for name, value in table.items()}


def _check_option(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {check_text(key): _check_option(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_check_option(item, name) for item in value]
    if value in (None, "none", "None"):
        return None
    if isinstance(value, str):
        try:
            return check_text(value)
        except ValueError as error:
            raise ValueError(f"{name}{error}") from error
    if not isinstance(value, bool | int | float):
        raise ValueError(f"{name}={value} must be a number, a bool, a string, a list or a table")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value} must be finite")
    return value


def _check_plan(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a table of what a plan predicts: seconds of a step above 0, and other numbers of at least 0."""
    for name, value in {"seconds": 0, **table}.items() if table else ():
        if not isinstance(value, int | float) or value < 0 or (name == "seconds" and not value):
            raise ValueError(f".{name}={value} must be a number {'above' if name == 'seconds' else 'of at least'} 0")
    return table


Positive = Annotated[int, Interval(ge=1, le=MAX_INT)]
NotNegative = Annotated[int, Interval(ge=0, le=MAX_INT)]
PositiveFloat = Annotated[float, Gt(0)]
NotNegativeFloat = Annotated[float, Ge(0)]
BelowOne = Annotated[float, Interval(ge=0, lt=1)]
Name = Annotated[str, MinLen(1), Check(check_text)]
AnyPath = Annotated[str, Check(check_text), Check(_check_path)]
PathName = Annotated[str, MinLen(1), Check(check_text), Check(_check_path)]
Corpus = Annotated[str, MinLen(1), Check(check_text), Check(_check_path), Check(_check_prefix)]
Table = Annotated[Mapping[str, Any], Check(_check_table)]
Plan = Annotated[Mapping[str, Any], Check(_check_table), Check(_check_plan)]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the sections of a recipe."""

    on_resume: ClassVar[str] = ""


_BOUNDS = {Ge: "at least", Gt: "more than", Le: "at most", Lt: "less than", MultipleOf: "a multiple of"}


def _number(value: float) -> str:
    """Format a bound; large powers of two as such."""
    for number, end in ((value, ""), (value + 1, " - 1")):
        exponent = math.log2(number) if number > 0 else 0.0
        if abs(exponent) > 12 and exponent == int(exponent):
            return f"2^{int(exponent)}{end}"
    return f"{value:g}"


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a section as data.

    Attributes:
        annotation: the annotation of the section's field.
        kind: bool, int, float, str, or Mapping for a table of options; for a list, the type of its items.
        choices: valid values; empty if the type has no such list.
        limits: annotations of `annotated_types` that bound the value or, for a list, its items.
        on_resume: effect of a change when a run resumes; empty if the key must not change.
    """

    name: str
    annotation: Any
    kind: Any
    default: Any
    choices: tuple[Any, ...] = ()
    is_list: bool = False
    is_optional: bool = False
    limits: tuple[Any, ...] = ()
    on_resume: str = ""

    @property
    def bounds(self) -> list[str]:
        """Bounds in words, such as "at least 1"; the largest integer is left out."""
        return [
            f"{_BOUNDS[type(limit)]} {_number(*astuple(limit))}"
            for limit in self.limits
            if type(limit) in _BOUNDS and limit != Le(MAX_INT)
        ]


def declared(section: type[Section]) -> list[Key]:
    """Return the keys of a section. Fields that are sections themselves are left out."""
    hints = typing.get_type_hints(section, include_extras=True)
    return [
        _key(entry, hints[entry.name], section.on_resume)
        for entry in fields(section)
        if not (isinstance(hints[entry.name], type) and issubclass(hints[entry.name], Section))
    ]


def _key(entry: Field[Any], annotation: Any, on_resume: str) -> Key:
    hint, limits = _without_metadata(annotation)
    is_optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if is_optional:
        hint, more_limits = _without_metadata(
            next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
        )
        limits += more_limits
    is_list = typing.get_origin(hint) is tuple
    if is_list:
        hint, item_limits = _without_metadata(typing.get_args(hint)[0])
        limits += item_limits
    effects = [limit.effect for limit in limits if isinstance(limit, OnResume)]
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    return Key(
        name=entry.name,
        annotation=annotation,
        kind=str if choices else typing.get_origin(hint) or hint,
        default=entry.default if entry.default_factory is MISSING else entry.default_factory(),
        choices=choices,
        is_list=is_list,
        is_optional=is_optional,
        limits=tuple(limits),
        on_resume=effects[0] if effects else on_resume,
    )


def _without_metadata(hint: Any) -> tuple[Any, list[Any]]:
    if typing.get_origin(hint) is not Annotated:
        return hint, []
    limits = []
    for limit in hint.__metadata__:
        limits += list(limit) if isinstance(limit, GroupedMetadata) else [limit]
    return hint.__origin__, limits


def shown(value: Any) -> str:
    """Format a value for a message: ``none``, ``true``, ``[1, 3]``."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)
