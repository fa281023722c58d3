"""The site of the documentation: strict, fetches nothing from elsewhere; the recipe reference is the code's."""

import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pretrain.config import Recipe, load_recipe
from pretrain.config.reference import PAGE, field_docs, reference

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
# What a browser would fetch by itself.
FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}


def build(config, site):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", site],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'fmoe[docs]'")
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", folder)
    assert built.returncode == 0, built.stderr
    return folder


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


def test_every_page_is_there_and_nothing_is_fetched_from_elsewhere(site):
    for page in PAGES:
        assert (site / page.with_suffix(".html").name).is_file()
    fetched = {path.relative_to(site): Tags(path.read_text()).fetched for path in site.rglob("*.html")}
    assert fetched[Path("index.html")], "not even a style sheet: the test sees nothing"
    for page, sources in fetched.items():
        for source in sources:
            assert not re.match(r"\w+:|//", source) or source.startswith("data:"), f"{page} fetches {source}"
            file = (site if source.startswith("/") else site / page.parent) / source.split("?")[0].lstrip("/")
            assert source.startswith("data:") or file.exists(), f"{page}: {source}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()), f"{style} fetches"


def test_what_pages_link_to_outside_of_docs_is_on_the_site(site):
    readme = (site / "repository" / "index.html").read_text()
    assert 'href="../layer.html"' in readme
    own_gate = (site / "gates.html").read_text()
    assert 'href="repository/examples/own_gate.py.html"' in own_gate
    assert "register_gate" in re.sub(r"<[^>]+>", "", (site / "repository/examples/own_gate.py.html").read_text())
    assert "moe-32.toml" in (site / "repository/bench/convergence.html").read_text()


@pytest.mark.by_default("right", "outside", "anchor")
@pytest.mark.parametrize(
    ("link", "says"),
    [
        ("[a](../examples/there.py) `[code](../nowhere.md)`", None),
        ("[a](../examples/nowhere.py)", "nowhere.py"),
        ("[a](nowhere.md)", "nowhere.md"),
        ("[a](other.md#nowhere)", "nowhere"),
        ("[a](/other.md)", "/other.md"),
    ],
    ids=["right", "outside", "page", "anchor", "absolute"],
)
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path, link, says):
    pytest.importorskip("material")
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "there.py").write_text("pass\n")
    shutil.copy(ROOT / "docs" / "hooks.py", tmp_path / "docs")
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[0])
    (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{link}\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert (built.returncode == 0) == (says is None), built.stderr
    assert says is None or says in built.stderr


def test_the_recipe_reference_is_that_of_the_dataclasses():
    assert PAGE.read_text(encoding="utf-8") == reference(), "run python -m pretrain.config.reference"


def test_the_reference_has_every_key_with_what_it_means():
    page = reference()
    for section, values in vars(Recipe()).items():
        rows = page.split(f"## [{section}]\n")[1].split("\n## ")[0]
        for key in vars(values):
            (row,) = re.findall(rf"^\| `{key}` \|.*\|$", rows, re.M)
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
            assert len(cells) == 4
            assert all(cells), f"{section}.{key}: an empty cell"


@dataclass
class Undocumented:
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
        else:
            for section, values in tomllib.loads(text).items():
                assert set(values) <= set(vars(getattr(Recipe(), section)))
