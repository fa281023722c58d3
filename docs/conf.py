"""The documentation as a site: `make docs`. It fetches nothing from elsewhere, and opens from a folder.

The source folder is the repository, so that Markdown pages link to each other as they do on a git host. A link to
another file or folder of the repository leads to a page that shows it. The API pages are generated from docstrings.
"""

import contextlib
import pkgutil
import posixpath
import re
import typing
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.util.nodes import get_node_source

import pretrain.config

ROOT = Path(__file__).parents[1]

project = html_title = "fmoe"
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/**", "data/**"]
exclude_patterns = [".*", "build", "runs"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

nitpicky = True
myst_heading_anchors = 6
myst_enable_extensions = ["html_image"]
highlight_language = "none"
default_role = "py:obj"
autodoc_default_options = {"members": True, "show-inheritance": True, "no-value": True}
autodoc_inherit_docstrings = False  # torch's
maximum_signature_line_length = 100
napoleon_attr_annotations = False  # the signature has them
smartquotes = False

html_theme = "furo"
html_show_copyright = html_show_sphinx = html_copy_source = html_show_sourcelink = False
html_show_search_summary = False  # a browser refuses to read them from a folder


def add_navigation(app, docname, source):
    """Append the tables of contents to the first page."""
    if docname == root_doc:
        for caption, pages in NAV.items():
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages.split()) + "\n```\n"


shown: set[str] = set()
_LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".yml": "yaml"}


def lead_to_sources(app, doctree):
    """Replace links to files and folders that are no pages by links to pages that show them."""
    here = posixpath.dirname(app.env.docname)
    links = [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]
    for link in links:
        target = posixpath.normpath(posixpath.join(here, link["reftarget"]))
        is_open = link.get("reftype") == "myst" and not link.get("refdomain")  # MyST found no page
        if is_open and not target.startswith(("/", "..")) and (ROOT / target).exists():
            shown.add(target)
            uri = app.builder.get_relative_uri(app.env.docname, target)
            link.replace_self(nodes.reference("", "", *link.children, refuri=uri, internal=True))


def source_pages(app):
    """Yield the pages of linked sources: a file as it is, a folder as its files."""
    for path in sorted(shown):
        file = ROOT / path
        files = [file] if file.is_file() else sorted(f for f in file.iterdir() if f.suffix in _LANGUAGES)
        body = f"<h1>{escape(path)}</h1>"
        for file in files:
            code = file.read_text(encoding="utf-8")
            body += f"<h2>{escape(file.name)}</h2>" if len(files) > 1 else ""
            body += app.builder.highlighter.highlight_block(code, _LANGUAGES.get(file.suffix, "none"))
        yield path, {"title": escape(path), "body": body}, "page.html"


def resolve_name(app, env, node, content):
    """Look a Python name up from the scopes around its docstring. One without a page, such as torch's, is plain code.

    A name that does not exist stays an error.
    """
    scope = (get_node_source(node) or "").partition(":docstring of ")[2].split(".")
    for depth in range(len(scope), -1, -1) if node.get("refdomain") == "py" else ():
        name = ".".join(filter(None, [*scope[:depth], node["reftarget"]]))
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            pkgutil.resolve_name(name)
            python = env.domains.python_domain
            return python.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content) or content
    return None


def plain_signature(app, what, name, obj, options, signature, returns):
    """Replace default values that are no Python expression, such as functions, by an ellipsis."""
    return signature and re.sub(r"<(?:[^<>]|<[^<>]*>)*>", "...", signature), returns


def plain_attribute(app, what, name, obj, options, lines):
    """Begin with an empty comment: napoleon takes words before a colon in the first line for a type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def plain_types(app):
    """Remove bounds from the types of recipe keys: the recipe reference has them."""
    for name in pretrain.config.__all__:
        section = getattr(pretrain.config, name)
        if isinstance(section, type):
            section.__init__.__annotations__ = section.__annotations__ = typing.get_type_hints(section)


def leave_members_out(app, domain, objtype, content):
    """Leave members of classes out of the contents, of which every page has a copy."""
    if objtype in ("attribute", "method", "property"):
        content.parent["no-contents-entry"] = True


def redirect(app, error):
    """Lead from the site's folder to the first page."""
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>{project}</title>\n'
    (app.outdir / "index.html").write_text(page)


def setup(app):
    """Connect the functions above."""
    app.connect("builder-inited", plain_types)
    app.connect("source-read", add_navigation)
    app.connect("doctree-read", lead_to_sources, priority=400)
    app.connect("missing-reference", resolve_name)
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("autodoc-process-docstring", plain_attribute, priority=400)
    app.connect("object-description-transform", leave_members_out)
    app.connect("html-collect-pages", source_pages)
    app.connect("build-finished", redirect)


NAV = {
    "Start": "quickstart tutorial",
    "The layer": "layer gates experts losses fmoefy interop parallelism tables selftest migration",
    "In Megatron-core": "megatron",
    "Pretraining": """pretraining recipes recipe-reference planner plugins data launch report tracking checkpoints
        operations finetuning tasks inference interchange large-batch communication precision convergence headlines
        /data/README /data/pylib/README /data/docs/README /data/bytes/README""",
    "Speed": "performance native cuda kernels",
    "API": "api/index api/layer api/gates api/experts api/parallel api/convert api/fastmoe api/pretrain api/data",
    "Project": "/README sources /CONTRIBUTING architecture /CODE_OF_CONDUCT /SECURITY /CHANGELOG",
}
