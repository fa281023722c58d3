"""Reading a recipe: TOML file -> dataclasses -> options of the command line over it."""

import contextlib
import difflib
import io
import json
import re
import tomllib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from fmoe.errors import UserError, known_names, require
from pretrain.config.recipe import Recipe

RECIPES = Path(__file__).parent.parent / "recipes"


def shipped_recipes() -> list[str]:
    """Names of the recipes that are shipped."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def find_recipe(name: str) -> Path:
    """The file of a recipe: a path, or the name of one that is shipped (``quickstart``)."""
    for path in (Path(name), RECIPES / f"{name}.toml"):
        if path.is_file():
            return path
    raise UserError(
        f"recipe {name!r} is neither a file nor one of those that are shipped: {known_names(name, shipped_recipes())}"
    )


def load_recipe(name: str, overrides: Sequence[str] = (), program: str = "python -m pretrain RECIPE") -> Recipe:
    """The recipe of a TOML file with ``--section.key value`` options over it, checked.

    Raises:
        UserError: unreadable TOML, an unknown key (names the nearest), a value of the wrong type or out of range.
        SystemExit: for ``--help``, which it prints.
    """
    path = find_recipe(name)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"recipe {path} cannot be read: {error}") from error
    recipe = _build(Recipe, values, "")
    if overrides:  # tyro is slow, and `fmoe compare` reads many recipes
        recipe = _override(recipe, overrides, program)
    recipe.check()
    return recipe


def build_recipe(values: Mapping[str, Any]) -> Recipe:
    """The recipe of its sections as ``asdict`` has them, as in a checkpoint's state; not checked.

    A key that is not there has its default.

    Raises:
        UserError: an unknown key, a value of the wrong type.
    """
    return _build(Recipe, values, "")


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    """A dataclass from a table of TOML, with every key and type checked."""
    hints = typing.get_type_hints(cls)
    known = [field.name for field in fields(cls)]
    built = {}
    for key, value in values.items():
        if key not in known:
            raise UserError(_unknown(prefix + key, [prefix + name for name in known]))
        hint = hints[key]
        if is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise UserError(f"{prefix}{key}={value!r} is not a section")
            built[key] = _build(hint, value, f"{prefix}{key}.")
        else:
            built[key] = _convert(value, hint, prefix + key)
    return cls(**built)


def _convert(value: Any, hint: Any, key: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        # TOML has no null: the word stands for it.
        if type(None) in arguments and value in (None, "none", "None"):
            return None
        return _convert(value, next(a for a in arguments if a is not type(None)), key)
    if origin is typing.Literal:
        if value not in arguments:
            raise UserError(f"{key}={value!r} is none of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{key}={value!r} is not a list")
        return tuple(_convert(item, arguments[0], key) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{key}={value!r} is not of type {hint.__name__}")
    return value


def _keys(cls: type = Recipe, prefix: str = "") -> dict[str, Any]:
    """Full names of all keys, with their types."""
    hints = typing.get_type_hints(cls)
    out = {}
    for field in fields(cls):
        name, hint = prefix + field.name, hints[field.name]
        out.update(_keys(hint, f"{name}.") if is_dataclass(hint) else {name: hint})
    return out


def _unknown(key: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1) or [
        name for name in known if name.split(".")[-1] == key.split(".")[-1]
    ]
    hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
    return f"unknown key {key}{hint}"


def _override(recipe: Recipe, options: Sequence[str], program: str) -> Recipe:
    tyro = require("tyro", "pretrain", "pretrain")
    known = _keys()
    options, hint = list(options), None
    for place, option in enumerate(options):
        if option.startswith("--") and option not in ("--help",):
            key = option[2:].split("=")[0].replace("-", "_").replace(".no_", ".")
            if key not in known:
                raise UserError(_unknown(key, known))
            hint = known[key]
        elif option == "none" and type(None) in typing.get_args(hint):
            options[place] = "None"  # the file's spelling, where tyro has Python's
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(Recipe, default=recipe, args=options, prog=program)
    except SystemExit as end:
        if not end.code:
            raise
        raise UserError(_message_of(errors.getvalue())) from None


def _message_of(text: str) -> str:
    """tyro's message without its frame: what stands between the first two rules, on one line."""
    lines, rules = [], 0
    for line in text.splitlines():
        line = line.strip(" │╭╮╰╯")
        if line.startswith("─") or (line and set(line) == {"-"}):
            rules += 1
        elif rules == 1 and line:
            lines.append(line)
    message = " ".join(lines) or " ".join(text.split())
    for pattern, kind in _NO_NUMBER.items():
        if found := re.search(pattern, message):
            key = found[1].replace("-", "_")
            return f"{key}={found[2]} is not a {kind}"
    return message


# Of Python, of which tyro tells, with the option in front.
_NO_NUMBER = {
    r"--(\S+?): invalid literal for int\(\) with base 10: '(.*?)'": "whole number",
    r"--(\S+?): could not convert string to float: '(.*?)'": "number",
}


def recipe_text(recipe: Recipe) -> str:
    """The resolved recipe as TOML, every key of it."""
    lines = []
    for section, values in asdict(recipe).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {to_toml(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Writes `recipe_text`; `load_recipe` of the file gives the recipe again."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(recipe_text(recipe), encoding="utf-8")
    temporary.replace(path)


def to_toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML basic string
    if isinstance(value, tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    return repr(value)
