"""Reading and writing recipes: a TOML file and command-line options become dataclasses."""

import contextlib
import difflib
import itertools
import json
import os.path
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fmoe.errors import UserError, known_names
from fmoe.files import write_atomically
from pretrain.config.keys import Key, check_path
from pretrain.config.recipe import Recipe
from pretrain.config.renamed import with_new_names
from pretrain.config.sections import MODEL_SECTIONS, SECTIONS, keys
from pretrain.config.validation import unknown_key, validated

CONFIG = "config.toml"
"""Name of the resolved recipe in a run's folder."""
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
    options, others = split_overrides(overrides)
    if others:
        raise UserError(f"unexpected argument {' '.join(others)!r}: options have the form --section.key value")
    recipe = read_recipe(name, options)
    recipe.check()
    return recipe


def read_recipe(name: str, overrides: Iterable[tuple[str, Any]] = ()) -> Recipe:
    """Load a TOML recipe and override some keys. `Recipe.check` is not called.

    Raises:
        UserError: there is no such recipe; invalid TOML; an unknown key; or a value of the wrong type or out of bounds.
    """
    path = find_recipe(name)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # RecursionError: brackets nested thousands deep
        raise UserError(f"recipe {path} cannot be read: {error}") from error
    if path.name == CONFIG:  # a run's, perhaps of an earlier version
        values = with_new_names(values)
    for key, value in overrides:
        section, *inner = key.split(".")
        values[section] = _with_option(values.get(section, {}), inner, value)
    return _built(values)


def _with_option(table: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy of ``table`` in which the entry at ``path`` is ``value``; for an empty path, return ``value``."""
    if not path:
        return value
    table = table if isinstance(table, Mapping) else {}
    return {**table, path[0]: _with_option(table.get(path[0]), path[1:], value)}


def build_recipe(values: Mapping[str, Any]) -> Recipe:
    """Build a recipe from stored sections, such as the recipe in a checkpoint's state.

    Missing keys take their defaults, and names of earlier versions are accepted. Each key is checked, but
    `Recipe.check` is not called.

    Raises:
        UserError: an unknown key, or a value of the wrong type or out of bounds.
    """
    return _built(with_new_names(values))


def _built(values: Mapping[str, Any]) -> Recipe:
    valid = validated(values)
    sections: dict[str, Any] = {name: kind(**valid.get(name, {})) for name, kind in SECTIONS.items()}
    of_model = {name: sections.pop(name) for name in MODEL_SECTIONS}
    return Recipe(**sections | {"model": replace(sections["model"], **of_model)})


_OPTION = re.compile(r"--([\w-]+\.[\w.-]+)(?:=(.*))?", re.DOTALL)


def split_overrides(argv: Sequence[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Split a command line into ``--section.key value`` options, as (key, value) in order, and the remaining words.

    ``_`` and ``-`` in keys are equivalent. ``--section.key=value`` is accepted too. ``--section.key`` alone sets a bool
    to true, ``--section.no-key`` to false. A list takes all words up to the next option. ``--section.table.option``
    sets an option within a table. A number that cannot be read remains a string, which `read_recipe` refuses.

    Raises:
        UserError: an unknown key, a missing value, or a negated option that is not a bool or has a value.
    """
    words = list(argv)
    overrides: list[tuple[str, Any]] = []
    others: list[str] = []
    while words:
        word = words.pop(0)
        match = _OPTION.fullmatch(word)
        if match is None:
            others.append(word)
            continue
        name = match[1].replace("-", "_")
        text = match[2]
        key, is_negated = _option_key(name)
        name = name.replace(".no_", ".", 1) if is_negated else name
        if is_negated and (key.kind is not bool or text is not None):
            problem = "a negated bool takes no value" if key.kind is bool else f"{name} is not a bool"
            raise UserError(f"{word}: {problem}")
        if text is not None:
            values = [text]
        elif key.kind is bool:
            possible = ("true", "false", "none") if key.is_optional else ("true", "false")
            is_value = bool(words) and not is_negated and words[0].lower() in possible
            values = [words.pop(0) if is_value else str(not is_negated)]
        else:
            count = len(words) if key.is_list else 1
            values = list(itertools.takewhile(lambda word: not word.startswith("--"), words[:count]))
            del words[: len(values)]
        if key.is_list:
            overrides.append((name, tuple(_from_word(key, name, value) for value in values)))
        elif values:
            overrides.append((name, _from_word(key, name, values[0])))
        else:
            raise UserError(f"--{name.replace('_', '-')} needs a value")
    return overrides, others


def _option_key(name: str) -> tuple[Key, bool]:
    """Return the key that an option sets, and whether the option negates it (``section.no_key``)."""
    table = keys().get(".".join(name.split(".")[:2]))
    if name in keys() or (table is not None and table.kind is Mapping):
        assert table is not None
        return table, False
    positive = name.replace(".no_", ".", 1)
    if positive in keys():
        return keys()[positive], True
    raise UserError(unknown_key(name, keys()))


def _from_word(key: Key, name: str, word: str) -> Any:
    """Return the value of an option's word; the word itself if it is not of the key's type."""
    if key.kind is Mapping:
        try:
            return tomllib.loads(f"value = {word}")["value"]
        except tomllib.TOMLDecodeError:
            return word  # a text without quotes
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
            raise UserError(f"{name}={word[:40]}... cannot be read: {error}") from error
    if key.kind is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    if key.kind in (int, float):
        with contextlib.suppress(ValueError):
            return key.kind(word)
    return word


def recipe_text(recipe: Recipe) -> str:
    """Return the resolved recipe as TOML, with every key."""
    lines = []
    for section, values in recipe.values().items():
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
