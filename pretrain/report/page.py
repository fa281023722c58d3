"""The report's HTML: one self-contained file.

Text from runs (names, recipes, warnings) is only in the deflated payload, never in the markup. The scripts insert it as
text nodes. A content security policy allows this file's scripts and style by their SHA-256, and forbids requests. A
live page may send requests to its own server.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from pretrain.files import replacing
from pretrain.report.payload import encode
from pretrain.report.runs import RunFolder, open_runs

REPORT = "report.html"
# In load order; they share one scope.
_SCRIPTS = ("format", "palette", "data", "elements", "plot", "charts", "heatmap", "tables", "main")


def page(payload: bytes, *, live: bool = False) -> str:
    """Return the report as an HTML document.

    Args:
        payload: result of `encode`.
        live: make the page poll its server for newer data.
    """
    style = asset("uplot/uPlot.min.css") + asset("style.css")
    scripts = "".join(asset(f"{name}.js") for name in _SCRIPTS)
    library = f"/*\n{asset('uplot/LICENSE')}*/\n{asset('uplot/uPlot.iife.min.js')}"
    return document(asset("page.html"), style, scripts, payload, library=library, live=live)


def document(template: str, style: str, scripts: str, payload: bytes, *, library: str = "", live: bool = False) -> str:
    """Return a template with its policy, style, script and data filled in.

    Args:
        scripts: share one scope, which the page's other scripts do not see.
        payload: deflated data.
        library: script that runs before ``scripts``.
        live: allow requests to the page's own server.
    """
    script = f"{library}(() => {{\n'use strict';\n{scripts}}})();\n"
    assert "</script" not in script.lower() and "</style" not in style.lower()
    values = {
        "policy": policy(style, script, live=live),
        "style": style,
        "script": script,
        "mode": "live" if live else "file",
        "data": base64.b64encode(payload).decode(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def policy(style: str, script: str, *, live: bool) -> str:
    """Return the content security policy of a page with this style and this script."""
    rules = {
        "default-src": "'none'",
        "script-src": f"'{_hash(script)}'",
        "style-src": f"'{_hash(style)}'",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def write_report(folders: Sequence[Path], path: Path, requires_steps: bool = True) -> int:
    """Write the report of runs and return its size in bytes.

    Args:
        requires_steps: refuse runs without a step.

    Raises:
        UserError: a folder does not exist, is given twice or, with ``requires_steps``, has no step; a file is damaged;
            ``path`` is not writable.
    """
    runs = read_runs(folders, requires_steps=requires_steps)
    text = page(encode(runs)).encode()
    with replacing(path) as (file,):
        file.write(text)
    return len(text)


def read_runs(folders: Sequence[Path], *, requires_steps: bool = True) -> list[RunFolder]:
    """Return the runs of the folders, with the data written so far.

    Args:
        requires_steps: refuse runs without a step.

    Raises:
        UserError: a folder does not exist, is given twice or, with ``requires_steps``, has no step; or a file is
            damaged.
    """
    runs = open_runs(folders)
    for run in runs:
        run.refresh()
        if requires_steps:
            run.require_steps()
    return runs


def asset(name: str, package: str = "pretrain.report") -> str:
    """Return the text of a file in a package's ``assets``."""
    return (resources.files(package) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
