"""Reading and writing recipes: a TOML file and command-line options become dataclasses."""

import difflib
import itertools
import json
import os.path
import re
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from fmoe.errors import UserError, known_names
from fmoe.files import write_atomically
from pretrain.config.checks import check_path
from pretrain.config.recipe import Recipe

RECIPES = Path(__file__).parent.parent / "recipes"


def shipped_recipes() -> list[str]:
    """Return the names of the shipped recipes, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given its path or the name of a shipped one (``quickstart``).

    Raises:
        UserError: there is no such recipe.
    """
    check_path("recipe", name)
    for path in (Path(name), RECIPES / f"{name}.toml"):
        if path.is_file():
            return path
    files = [str(path) for path in sorted(Path(name).parent.glob("*.toml"))]
    near = difflib.get_close_matches(name, [*files, *shipped_recipes()], n=1)
    hint = f"did you mean {near[0]!r}?" if near else known_names(name, [*files, *shipped_recipes()])
    raise UserError(f"recipe {name!r} is neither a file nor a shipped recipe; {hint}")


def is_recipe(name: str) -> bool:
    """Return whether ``name`` is a file or the name of a shipped recipe."""
    return os.path.isfile(name) or name in shipped_recipes()  # unlike Path.is_file, False for a name that is too long


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a TOML recipe, apply ``--section.key value`` options, and check it.

    Raises:
        UserError: there is no such recipe; invalid TOML; an unknown key (the message names the nearest); an invalid
            value or combination of values; or a word that belongs to no option.
    """
    options, rest = split_overrides(overrides)
    if rest:
        raise UserError(f"unexpected argument {' '.join(rest)!r}: options have the form --section.key value")
    recipe = read_recipe(name, options)
    recipe.check()
    return recipe


def read_recipe(name: str, overrides: Iterable[tuple[str, Any]] = ()) -> Recipe:
    """Load a TOML recipe and override some keys. `Recipe.check` is not called.

    Raises:
        UserError: there is no such recipe; invalid TOML; an unknown key; or a value of the wrong type.
    """
    path = find_recipe(name)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # RecursionError: brackets nested thousands deep
        raise UserError(f"recipe {path} cannot be read: {error}") from error
    recipe = build_recipe(values)
    for key, value in overrides:
        section, name, *inner = key.split(".")
        config = getattr(recipe, section)
        value = _with_option(getattr(config, name), inner, value)
        recipe = replace(recipe, **{section: replace(config, **{name: value})})
    return recipe


def _with_option(table: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy of ``table`` in which the entry at ``path`` is ``value``; for an empty path, return ``value``."""
    if not path:
        return value
    table = table if isinstance(table, Mapping) else {}
    return {**table, path[0]: _with_option(table.get(path[0]), path[1:], value)}


def build_recipe(values: Mapping[str, Any]) -> Recipe:
    """Build a recipe from nested mappings, such as the recipe in a checkpoint's state.

    Missing keys take their defaults. Keys and types are checked, but `Recipe.check` is not called.

    Raises:
        UserError: an unknown key, or a value of the wrong type.
    """
    return _build(Recipe, values, "")


def _build(cls: Any, values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = [field.name for field in fields(cls)]
    built = {}
    for key, value in values.items():
        if key not in known:
            raise UserError(_unknown(prefix + key, [prefix + name for name in known]))
        hint = hints[key]
        if is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise UserError(f"{prefix}{key}={value!r} must be a section (a TOML table)")
            built[key] = _build(hint, value, f"{prefix}{key}.")
        else:
            built[key] = _convert(value, hint, prefix + key)
    return cls(**built)


def _convert(value: Any, hint: Any, key: str, or_none: str = "") -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        # TOML has no null: the string "none" means None.
        if type(None) in arguments and value in (None, "none", "None"):
            return None
        return _convert(value, next(a for a in arguments if a is not type(None)), key, " or none")
    if origin is typing.Literal:
        if value not in arguments:
            raise UserError(f"{key}={value!r} must be one of {', '.join(map(str, arguments))}{or_none}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{key}={value!r} must be a list")
        return tuple(_convert(item, arguments[0], key) for item in value)
    if hint == _TABLE:
        if not isinstance(value, Mapping):
            option = key.replace("_", "-")
            raise UserError(
                f"{key}={value!r} must be a table: in TOML {{name = value}}, as arguments --{option}.name value"
            )
        return {name: _option(item, f"{key}.{name}") for name, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{key}={value!r} must be of type {hint.__name__}{or_none}")
    return value


def _option(value: Any, key: str) -> Any:
    """Return an option's value with "none" as None and tuples as lists, at any depth."""
    if isinstance(value, Mapping):
        return {name: _option(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_option(item, key) for item in value]
    if value in (None, "none", "None"):
        return None
    if not isinstance(value, bool | int | float | str):
        raise UserError(f"{key}={value} must be a number, a bool, a string, a list or a table")
    return value


def recipe_keys(cls: Any = Recipe, prefix: str = "") -> dict[str, Any]:
    """Return the full names of all recipe keys, such as ``train.steps``, with their types."""
    hints = typing.get_type_hints(cls)
    out = {}
    for field in fields(cls):
        name, hint = prefix + field.name, hints[field.name]
        out.update(recipe_keys(hint, f"{name}.") if is_dataclass(hint) else {name: hint})
    return out


_DEVICE = (
    "a run uses the GPUs that torch finds, one for each rank, or else the CPU: set the environment variable "
    "CUDA_VISIBLE_DEVICES, which is empty for the CPU"
)
_NOT_KEYS = dict.fromkeys(("device", "devices", "accelerator", "gpu", "gpus", "num_gpus", "cpu", "cuda"), _DEVICE)
_NOT_KEYS |= dict.fromkeys(
    ("backend", "kernel", "kernels"), f"{_DEVICE}; model.expert_options.backend sets the experts' kernels"
)


def instead_of_key(name: str) -> str | None:
    """Return what to do instead of setting a key that recipes of other programs have, such as ``device``."""
    return _NOT_KEYS.get(name.rpartition(".")[2].lstrip("-").replace("-", "_"))


def _unknown(key: str, known: Collection[str]) -> str:
    if instead := instead_of_key(key):
        return f"unknown key {key}; {instead}"
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.7) or [
        name for name in recipe_keys() if name.split(".")[-1] == key.split(".")[-1]
    ]
    if near:
        others = f" Or {', '.join(near[1:3])}?" if near[1:] else ""
        return f"unknown key {key}; did you mean {near[0]}?{others}"
    sections = ", ".join(section.name for section in fields(Recipe))
    return f"unknown key {key}; the sections are {sections}: fmoe train RECIPE --help lists their keys"


_OPTION = re.compile(r"--([\w-]+\.[\w.-]+)(?:=(.*))?", re.DOTALL)
_BOOLS = {"true": True, "false": False}


def split_overrides(argv: Sequence[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Split a command line into ``--section.key value`` options, as (key, value) in order, and the remaining words.

    ``_`` and ``-`` in keys are equivalent. ``--section.key=value`` is accepted too. ``--section.key`` alone sets a bool
    to true, ``--section.no-key`` to false. A list takes all words up to the next option. ``--section.table.option``
    sets an option within a table.

    Raises:
        UserError: an unknown key, a missing or invalid value.
    """
    known, words = recipe_keys(), list(argv)
    overrides: list[tuple[str, Any]] = []
    rest: list[str] = []
    while words:
        word = words.pop(0)
        if not (found := _OPTION.fullmatch(word)):
            rest.append(word)
            continue
        key, text = found[1].replace("-", "_"), found[2]
        is_in_table = known.get(".".join(key.split(".")[:2])) == _TABLE and key not in known
        is_negated = key not in known and ".no_" in key and not is_in_table
        key = key.replace(".no_", ".", 1) if is_negated else key
        if key not in known and not is_in_table:
            raise UserError(_unknown(key, known))
        hint = Any if is_in_table else known[key]
        is_bool = hint is bool or bool in typing.get_args(hint)
        if is_negated and (not is_bool or text is not None):
            raise UserError(f"{word}: {'a negated bool takes no value' if is_bool else f'{key} is not a bool'}")
        if is_bool and text is None:
            follows = words[0].lower() if words and not is_negated else ""
            is_value = follows in _BOOLS or (follows == "none" and hint is not bool)
            text = words.pop(0) if is_value else str(not is_negated)
        if text is not None:
            values = [text]
        else:
            most = len(words) if typing.get_origin(hint) is tuple else 1
            values = list(itertools.takewhile(lambda word: not word.startswith("--"), words[:most]))
            del words[: len(values)]
        overrides.append((key, _from_words(values, hint, key)))
    return overrides, rest


_TABLE = Mapping[str, Any]  # type of a key that is a table of options


def _from_words(words: Sequence[str], hint: Any, key: str) -> Any:
    if typing.get_origin(hint) is tuple:
        return tuple(_from_words([word], typing.get_args(hint)[0], key) for word in words)
    if not words:
        raise UserError(f"--{key.replace('_', '-')} needs a value")
    (word,) = words
    if hint in (Any, _TABLE):
        try:
            value = tomllib.loads(f"value = {word}")["value"]
        except tomllib.TOMLDecodeError:
            value = word  # a text without quotes
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
            raise UserError(f"{key}={word[:40]}... cannot be read: {error}") from error
        return _option(value, key) if hint is Any else _convert(value, hint, key)
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if type(None) in kinds and word in ("none", "None"):
        return None
    kind = next(kind for kind in kinds if kind is not type(None))
    or_none = " or none" if type(None) in kinds else ""
    if kind is bool:
        if word.lower() not in _BOOLS:
            raise UserError(f"{key}={word} must be {'true, false or none' if or_none else 'true or false'}")
        return _BOOLS[word.lower()]
    if kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            number = "an integer" if kind is int else "a number"
            raise UserError(f"{key}={word} must be {number}{or_none}") from None
    return _convert(word, hint, key)


def recipe_text(recipe: Recipe) -> str:
    """Return the resolved recipe as TOML, with every key."""
    lines = []
    for section, values in asdict(recipe).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {to_toml(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe as TOML, with every key. `load_recipe` reads an equal recipe from it."""
    write_atomically(path, recipe_text(recipe).encode())


def to_toml(value: Any) -> str:
    """Return a recipe's value as TOML."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A JSON string is a TOML basic string, except for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(name)} = {to_toml(item)}" for name, item in value.items()) + "}"
    return repr(value)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else to_toml(name)
