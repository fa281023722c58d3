"""The documentation is true: Python snippets run, links lead somewhere, commands exist."""

import re
import textwrap
from pathlib import Path
from unittest import mock

import pytest

from fmoe.cli import commands
from fmoe.gates import GATES
from pretrain.tracking import metrics

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("data/**/*.md"))
# Snippets that stand for a line in a larger program: names that the reader brings (not of arguments, attributes).
BROUGHT = re.compile(r"(?<![.\w])(gpt_model|moe_group|data_group)\b(?!=[^=])")


# Libraries of extras that a page needs, which take seconds to import.
LIBRARIES = {"interop.md": ("accelerate", "peft", "transformers")}


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=str(p.relative_to(ROOT)), marks=[pytest.mark.slow] * (p.name in LIBRARIES)) for p in PAGES],
)
def test_snippets(page):
    """The snippets of a page, one after the other, as a reader would type them."""
    for library in LIBRARIES.get(page.name, ()):
        pytest.importorskip(library, reason=f"{library} is not installed")
    names: dict = {}
    # A gate or metric that a page registers is not one of the library's.
    with mock.patch.dict(GATES), mock.patch.object(metrics, "DECLARED", list(metrics.DECLARED)):
        for code in re.findall(r"^ *```python\n(.*?)```", page.read_text(), re.S | re.M):
            program = compile(textwrap.dedent(code), page.name, "exec")
            if not BROUGHT.search(code):
                exec(program, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_commands(page):
    text = page.read_text()
    assert not re.search(r"^(<{7} |={7}$|>{7} )", text, re.M), f"{page.name} has a conflict that was not resolved"
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    known = commands()
    for name in re.findall(r"^(?:\$ )?fmoe ([a-z]+)", text, re.M):
        assert name in known, f"{page.name} mentions fmoe {name}"
