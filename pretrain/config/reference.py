"""Generator of docs/recipe-reference.md, the list of all recipe keys, from the docstrings of the sections.

In a checkout, ``python -m pretrain.config.reference`` writes the page.
"""

import ast
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fmoe.errors import option_names
from fmoe.exchange import EXCHANGES
from fmoe.experts import EXPERTS
from fmoe.gates import GATES
from fmoe.losses import DEFAULT_LOSS_WEIGHTS
from pretrain.config.keys import Key, Section, declared
from pretrain.config.layer import HOMES, OF_LAYER, is_shipped
from pretrain.config.load import to_toml
from pretrain.config.recipe import Recipe
from pretrain.config.rules import RULES
from pretrain.config.sections import SECTIONS, keys

PAGE = Path(__file__).parents[2] / "docs" / "recipe-reference.md"

_HEAD = """\
# Recipe reference

Every key of a recipe. In the file, a key belongs to a section; on the command line it is an option: `num_experts` of
`[moe]` is `--moe.num-experts`. Missing keys take their defaults. `"none"` stands for null, which TOML lacks.
`fmoe train quickstart --help` shows the values of that recipe; a run's `config.toml` has all values of the run.

This page is written by `python -m pretrain.config.reference`.
"""

_RULES = """\
## Rules between keys

A key alone stands for a value other than its default. Further rules concern sizes, such as the number of micro batches;
their errors name the keys.

| key | rule | other key | reason |
|---|---|---|---|"""

_RESUME = """\
## Changes when a run resumes

Only the keys in this table may change when a run [resumes](checkpoints.md#resume). "From here on" means from the step
at which the run resumes.

| key | effect |
|---|---|"""

_OPTIONS = """\
## Options of gates, experts, exchanges and losses

Each option of the library's parts, and the key of a recipe that sets it. A key of a table, such as
`moe.gate_options.expert_groups`, is set in the file by

```toml
[moe]
gate_options = { expert_groups = 8, kept_groups = 4 }
```

and on the command line by `--moe.gate-options.expert-groups 8`. The option's class documents its meaning and default
([gates](gates.md), [experts](experts.md), [exchanges](parallelism.md), [losses](losses.md)). Options of
[registered parts](plugins.md) are set in the same tables.

| part | option | of | key |
|---|---|---|---|"""


def reference() -> str:
    """Return the text of docs/recipe-reference.md."""
    sections = [_section(name, section) for name, section in SECTIONS.items()]
    return "\n".join([_HEAD, *sections, _RULES, *_rules(), "", _RESUME, *_resume(), "", _OPTIONS, *_options(), ""])


def _section(name: str, section: type[Section]) -> str:
    texts = field_docs(section)
    lines = [f"## [{name}]", "", _text(str(inspect.getdoc(section)))]
    lines += ["", "| key | type | default | |", "|---|---|---|---|"]
    for key in declared(section):
        kind = ", ".join([_type(key), *key.bounds])
        row = (f"`{key.name}`", kind, f"`{to_toml(key.default)}`", _text(texts[key.name]))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join([*lines, ""])


def _rules() -> Iterator[str]:
    for rule in RULES:
        when = f", if `{rule.when.replace(' and ', '` and `')}`" if rule.when else ""
        yield f"| `{rule.subject}` | {rule.verb} | `{rule.object}`{when} | {rule.why} |"


def _resume() -> Iterator[str]:
    for name, section in SECTIONS.items():
        if section.on_resume:
            yield f"| `{name}.*` | {section.on_resume} |"
    for name, key in keys().items():
        if key.on_resume != SECTIONS[name.partition(".")[0]].on_resume:
            yield f"| `{name}` | {key.on_resume or 'must not change'} |"


def _options() -> Iterator[str]:
    tables: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
        ("gate", "moe.gate_options", GATES),
        ("experts", "moe.expert_options", EXPERTS),
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
        yield f"| loss | `{loss}` | | {HOMES['loss'].get(loss, f'`moe.loss_weights.{loss}`')} |"


def options_help(recipe: Recipe, program: str) -> str:
    """Format every recipe key as an option of the command ``program``, with its value in ``recipe``."""
    width = max(60, min(shutil.get_terminal_size().columns, 110))
    wrap = textwrap.TextWrapper(width, initial_indent=" " * 8, subsequent_indent=" " * 8).fill
    lines = [f"usage: {program} [--section.key value ...]"]
    for name, section in SECTIONS.items():
        texts = field_docs(section)
        lines += ["", f"[{name}] {' '.join(str(inspect.getdoc(section)).partition(chr(10) * 2)[0].split())}"]
        for key in declared(section):
            option = key.name.replace("_", "-")
            kind = _type(key).replace("`", "").replace('"', "")
            if key.kind is bool and not key.is_optional:
                kind = f"true, false (--{name}.no-{option})"
            value = to_toml(recipe.value(f"{name}.{key.name}"))
            lines.append(f"  --{name}.{option} {kind}   (default: {value})")
            lines.append(wrap(" ".join(texts[key.name].replace("``", "`").split())))
    return "\n".join(lines)


def _type(key: Key) -> str:
    kind = "table" if key.kind is Mapping else key.kind.__name__
    kind = ", ".join(f"`{to_toml(value)}`" for value in key.choices) or kind
    kind = f"list of {kind}" if key.is_list else kind
    return f"{kind} or none" if key.is_optional else kind


def field_docs(cls: type[Section]) -> dict[str, str]:
    """Return the docstring of each field of a section, with ``"none"`` in place of the word None.

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
    for key in declared(cls):
        if key.name not in docs:
            raise ValueError(f"{cls.__name__}.{key.name} has no docstring")
    return docs


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
