"""The page: one HTML file that needs nothing else, and may do nothing else.

What runs bring (names, recipes, warnings) is in the deflated data alone, which is no markup; the page's scripts put it
into the document as text. A content security policy allows the scripts and the style of this file, by their SHA-256,
and no request to anywhere; that of a live page allows requests to where it came from.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from pretrain.data.files import replacing
from pretrain.report.payload import encode
from pretrain.report.runs import RunFolder, open_runs

REPORT = "report.html"
# In the order in which they are read; all of them share one scope.
_SCRIPTS = ("format", "palette", "data", "plot", "charts", "heatmap", "tables", "main")


def page(payload: bytes, *, live: bool = False) -> str:
    """The document.

    Args:
        payload: of `encode`.
        live: the page asks for newer data where it came from.
    """
    style = _asset("uplot/uPlot.min.css") + _asset("style.css")
    own = "".join(_asset(f"{name}.js") for name in _SCRIPTS)
    licence = _asset("uplot/LICENSE")
    script = f"/*\n{licence}*/\n{_asset('uplot/uPlot.iife.min.js')}(() => {{\n'use strict';\n{own}}})();\n"
    assert "</script" not in script.lower() and "</style" not in style.lower()
    values = {
        "policy": policy(style, script, live=live),
        "style": style,
        "script": script,
        "mode": "live" if live else "file",
        "data": base64.b64encode(payload).decode(),
    }
    parts = _asset("page.html").split("{{")
    text = parts[0]
    for part in parts[1:]:
        name, _, rest = part.partition("}}")
        text += values[name] + rest
    return text


def policy(style: str, script: str, *, live: bool) -> str:
    """The content security policy of a page with this style and this script."""
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
    """Writes the report of runs; returns its size in bytes.

    Args:
        requires_steps: whether to refuse a run without a step, of which there are events and a recipe at most.

    Raises:
        UserError: a folder holds no run, or none that has made a step; a file of it is damaged; ``path`` cannot be
            written.
    """
    runs = read_runs(folders, requires_steps=requires_steps)
    text = page(encode(runs)).encode()
    with replacing(path) as (file,):
        file.write(text)
    return len(text)


def read_runs(folders: Sequence[Path], *, requires_steps: bool = True) -> list[RunFolder]:
    """Runs that have something to show. Raises UserError: see `write_report`."""
    runs = open_runs(folders)
    for run in runs:
        run.refresh()
        if requires_steps:
            run.require_steps()
    return runs


def _asset(name: str) -> str:
    return (resources.files("pretrain.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
