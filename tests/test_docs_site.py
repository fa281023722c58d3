"""The site of the documentation: strict, self-contained, with every public name; the recipe reference is the code's."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
import zlib
from collections import defaultdict
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fmoe
import megatron_patch
import pretrain
from pretrain.config import Recipe, load_recipe
from pretrain.config.keys import Section
from pretrain.config.reference import PAGE, field_docs, reference

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
API_PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
# What a browser would fetch by itself.
FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}


def build(root, folder):
    """Build the site of ``root`` in ``folder``, as `make docs` does."""
    options = ["-c", root / "docs", "-d", folder / "doctrees", "-E", "-W", "--keep-going", "--quiet"]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *options, root, folder / "site"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("furo", reason="furo is not installed: pip install 'fmoe[docs]'")
    folder = tmp_path_factory.mktemp("docs")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder / "site"


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.fetched = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "link" and values.get("rel") not in ("stylesheet", "icon", "preload", "modulepreload", "preconnect"):
            return
        self.fetched += [value for name, value in attributes if (tag, name) in FETCHED and value]


@pytest.mark.slow
def test_every_page_is_there_and_nothing_is_fetched_from_elsewhere(site):
    navigation = (site / "docs" / "index.html").read_text()
    for page in PAGES + API_PAGES:
        html = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / "docs" / html).is_file()
        assert f'class="reference internal" href="{html}"' in navigation or page.stem == "index"
    assert "url=docs/index.html" in (site / "index.html").read_text()
    fetched = {path.relative_to(site): Tags(path.read_text()).fetched for path in site.rglob("*.html")}
    assert fetched[Path("docs/index.html")], "not even a style sheet: the test sees nothing"
    for page, sources in fetched.items():
        for source in sources:
            assert not re.match(r"\w+:|//", source) or source.startswith("data:"), f"{page} fetches {source}"
            file = (site if source.startswith("/") else site / page.parent) / source.split("?")[0].lstrip("/")
            assert source.startswith("data:") or file.exists(), f"{page}: {source}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()), f"{style} fetches"


@pytest.mark.slow
def test_what_pages_link_to_outside_of_docs_is_on_the_site(site):
    assert 'href="docs/layer.html"' in (site / "README.html").read_text()
    assert 'href="../examples/own_gate.py.html"' in (site / "docs" / "gates.html").read_text()
    assert "register_gate" in re.sub(r"<[^>]+>", "", (site / "examples" / "own_gate.py.html").read_text())
    assert "moe-32.toml" in (site / "bench" / "convergence.html").read_text()


@pytest.mark.parametrize("page", [*PAGES, *API_PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_have_titles_and_not_file_names(page):
    assert not re.findall(r"\[[\w./-]+\.md\]\(", page.read_text())


def public_modules():
    """All packages, and the modules that pages of the API name."""
    packages = {p.__name__ for p in (fmoe, megatron_patch, pretrain)} | {
        module.name
        for package in (fmoe, megatron_patch, pretrain)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if module.ispkg
    }
    named = {name for page in API_PAGES for name in re.findall(r"automodule:: (\S+)", page.read_text())}
    return sorted(packages | named)


def public_names(module):
    """Names of ``__all__``, or those of classes and functions that the module defines."""
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in getattr(module, "__all__", defined) if not name.startswith("_")]


@pytest.mark.slow
def test_every_public_name_is_on_a_page_of_the_api(site):
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    documented = set(re.findall(r"^(\S+) py:(?!module)\w+ .* docs/api/", inventory, re.M))
    assert len(documented) > 500
    places = defaultdict(set)  # a name may be documented in any module that exports it
    for module in map(importlib.import_module, public_modules()):
        for name in public_names(module):
            value = getattr(module, name)
            full = f"{module.__name__}.{name}"
            places[value if inspect.isroutine(value) or inspect.isclass(value) else full].add(full)
    for value, names in places.items():
        assert names & documented, f"no page of docs/api has {' or '.join(sorted(names))}"
        if not isinstance(value, str):
            doc = value.__doc__ or ""
            assert doc and not doc.startswith(f"{value.__name__}("), f"{min(names)} has no docstring"


def test_the_recipe_reference_is_that_of_the_dataclasses():
    assert PAGE.read_text(encoding="utf-8") == reference(), "run python -m pretrain.config.reference"


@dataclass(frozen=True)
class Undocumented(Section):
    there: int = 1
    """Said."""
    missing: int = 2


def test_a_field_without_a_docstring_is_named():
    with pytest.raises(ValueError, match=r"Undocumented\.missing has no docstring"):
        field_docs(Undocumented)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_of_the_docs_are_recipes(page, tmp_path):
    """A whole recipe, one that names its folder, passes all checks; a part of one has keys that exist."""
    for text in re.findall(r"```toml\n(.*?)```", page.read_text(), re.S):
        file = tmp_path / "recipe.toml"
        file.write_text(text)
        if "run" in tomllib.loads(text):
            load_recipe(str(file))
        elif "project" not in tomllib.loads(text):  # of a pyproject.toml
            for section, values in tomllib.loads(text).items():
                assert set(values) <= set(Recipe().values()[section])
