"""Generator of docs/recipe-reference.md, the list of all recipe keys, from the docstrings of the sections.

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
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from fmoe.errors import option_names
from fmoe.exchange import EXCHANGES
from fmoe.experts import EXPERTS
from fmoe.gates import GATES
from fmoe.losses import DEFAULT_LOSS_WEIGHTS
from pretrain.config.checks import NOT_NEGATIVE, POSITIVE
from pretrain.config.layer import HOMES, OF_LAYER, is_shipped
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

_OPTIONS = """\
## Options of gates, experts, exchanges and losses

Each option of the library's parts, and the key of a recipe that sets it. A key of a table, such as
`model.gate_options.expert_groups`, is set in the file by

```toml
[model]
gate_options = { expert_groups = 8, kept_groups = 4 }
```

and on the command line by `--model.gate-options.expert-groups 8`. The option's class documents its meaning and default
([gates](gates.md), [experts](experts.md), [exchanges](parallelism.md), [losses](losses.md)). Options of
[registered parts](plugins.md) are set in the same tables.

| part | option | of | key |
|---|---|---|---|"""


def reference() -> str:
    """Return the text of docs/recipe-reference.md."""
    hints = typing.get_type_hints(Recipe)
    sections = [_section(field.name, hints[field.name]) for field in fields(Recipe)]
    return "\n".join([_HEAD, *sections, _OPTIONS, *_options(), ""])


def _options() -> Iterator[str]:
    tables: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
        ("gate", "model.gate_options", GATES),
        ("experts", "model.expert_options", EXPERTS),
        ("exchange", "parallel.exchange_options", EXCHANGES),
    )
    for part, table, registry in tables:
        owners: dict[str, list[str]] = {}
        # A recipe with the gate hash is refused (`pretrain.engine.model.check_parts`).
        shipped = {name: factory for name, factory in registry.items() if is_shipped(factory) and name != "hash"}
        for name, factory in shipped.items():
            for option in option_names(factory) or []:
                if option == "balance_group" and "balance" not in factory.common_losses:
                    continue  # it would be refused
                if option not in OF_LAYER or (option, part) == ("seed", "gate"):
                    owners.setdefault(option, []).append(name)
        for option, names in sorted(owners.items()):
            where = "all" if len(names) == len(shipped) else ", ".join(names)
            yield f"| {part} | `{option}` | {where} | {HOMES[part].get(option, f'`{table}.{option}`')} |"
    for loss in DEFAULT_LOSS_WEIGHTS:
        yield f"| loss | `{loss}` | | {HOMES['loss'].get(loss, f'`model.loss_weights.{loss}`')} |"


def options_help(recipe: Recipe, program: str) -> str:
    """Format every recipe key as an option of the command ``program``, with its value in ``recipe``."""
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
            lines.append(wrap(" ".join(texts[field.name].replace("``", "`").split())))
    return "\n".join(lines)


def _section(name: str, cls: type) -> str:
    hints, texts = typing.get_type_hints(cls), field_docs(cls)
    lines = [f"## [{name}]", "", _text(str(inspect.getdoc(cls))), "", "| key | type | default | |", "|---|---|---|---|"]
    for field in fields(cls):
        kind = ", ".join([_type(hints[field.name]), *_limits(name, field)])
        row = (f"`{field.name}`", kind, f"`{to_toml(_default(field))}`", _text(texts[field.name]))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join([*lines, ""])


def _default(field: Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, with ``"none"`` in place of the word None.

    Raises:
        ValueError: a field has no docstring.
    """
    body: Any
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            target: Any = field.target
            docs[target.id] = re.sub(r"\bNone\b", '"none"', inspect.cleandoc(str(text.value.value)))
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
    if origin is Mapping:
        return "table"
    return hint.__name__


def _limits(section: str, field: Field) -> Iterator[str]:
    if field.name in POSITIVE.get(section, ()):
        yield "positive"
    if field.name in NOT_NEGATIVE.get(section, ()):
        yield "0 or more"


def _text(doc: str) -> str:
    """Format a docstring as a table cell, with pages of docs/ as links."""
    return re.sub(r"docs/([\w-]+\.md)", _link, " ".join(doc.replace("``", "`").split()))


def _link(page: re.Match[str]) -> str:
    """Return a Markdown link to a page of docs/, with the page's title."""
    title = PAGE.with_name(page[1]).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{title}]({page[1]})"


if __name__ == "__main__":
    sys.stdout.write(f"{PAGE}\n")
    PAGE.write_text(reference(), encoding="utf-8")
