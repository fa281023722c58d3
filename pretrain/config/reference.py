"""Generator of docs/recipe-reference.md, which lists every recipe key, from the dataclasses.

In a checkout, ``python -m pretrain.config.reference`` writes the page.
"""

import ast
import inspect
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from pretrain.config.checks import NOT_NEGATIVE, POSITIVE
from pretrain.config.load import to_toml
from pretrain.config.recipe import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "recipe-reference.md"

_HEAD = """\
# Recipe reference

Every key of a recipe. In the file, a key belongs to a section; on the command line it is an option: `num_experts` of
`[model]` is `--model.num-experts`. Missing keys take their defaults. `"none"` stands for null, which TOML lacks.
`fmoe train quickstart --help` shows the values of that recipe; a run's `config.toml` has all values of the run.

This page is written by `python -m pretrain.config.reference`.
"""


def reference() -> str:
    """Return the text of docs/recipe-reference.md."""
    hints = typing.get_type_hints(Recipe)
    return "\n".join([_HEAD, *(_section(field.name, hints[field.name]) for field in fields(Recipe))])


def options_help(recipe: Recipe, program: str) -> str:
    """Format every key as an option of a command, with its value in ``recipe``."""
    hints = typing.get_type_hints(Recipe)
    width = max(60, min(shutil.get_terminal_size().columns, 110))
    wrap = textwrap.TextWrapper(width, initial_indent=" " * 8, subsequent_indent=" " * 8).fill
    lines = [f"usage: {program} [--section.key value ...]"]
    for section in fields(Recipe):
        cls = hints[section.name]
        kinds, texts = typing.get_type_hints(cls), field_docs(cls)
        lines += ["", f"[{section.name}] {' '.join(str(inspect.getdoc(cls)).partition(chr(10) * 2)[0].split())}"]
        for field in fields(cls):
            option = field.name.replace("_", "-")
            kind = _type(kinds[field.name]).replace("`", "").replace('"', "")
            kind = f"true, false (--{section.name}.no-{option})" if kinds[field.name] is bool else kind
            value = to_toml(getattr(getattr(recipe, section.name), field.name))
            lines.append(f"  --{section.name}.{option} {kind}   (default: {value})")
            lines.append(wrap(" ".join(texts[field.name].split())))
    return "\n".join(lines)


def _section(name: str, cls: type) -> str:
    hints, texts = typing.get_type_hints(cls), field_docs(cls)
    lines = [f"## [{name}]", "", _text(str(inspect.getdoc(cls))), "", "| key | type | default | |", "|---|---|---|---|"]
    for field in fields(cls):
        kind = ", ".join([_type(hints[field.name]), *_limits(name, field)])
        row = (f"`{field.name}`", kind, f"`{to_toml(field.default)}`", _text(texts[field.name]))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join([*lines, ""])


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass: the string literal after the field.

    Raises:
        ValueError: a field has no docstring.
    """
    body: Any
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            target: Any = field.target
            docs[target.id] = inspect.cleandoc(str(text.value.value))
    if missing := [field.name for field in fields(cls) if field.name not in docs]:
        raise ValueError(f"{cls.__name__}.{missing[0]} has no docstring")
    return docs


def _type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join([*(_type(a) for a in arguments if a is not type(None)), "none"])
    if origin is typing.Literal:
        return ", ".join(f"`{to_toml(value)}`" for value in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    return hint.__name__


def _limits(section: str, field: Field) -> Iterator[str]:
    if field.name in POSITIVE.get(section, ()):
        yield "positive"
    if field.name in NOT_NEGATIVE.get(section, ()):
        yield "0 or more"


def _text(doc: str) -> str:
    """Format a docstring as a table cell, with pages of docs/ as links."""
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", " ".join(doc.replace("``", "`").split()))


if __name__ == "__main__":
    sys.stdout.write(f"{PAGE}\n")
    PAGE.write_text(reference(), encoding="utf-8")
