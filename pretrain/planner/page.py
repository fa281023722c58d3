"""The planner's HTML: one self-contained file in the style of the report, with the same policy on its text."""

import json
import zlib
from pathlib import Path
from typing import Any

from pretrain.files import replacing
from pretrain.report.page import asset, document

_PACKAGE = "pretrain.planner"
_SCRIPTS = ("format", "data", "elements")  # of the report


def page(values: dict[str, Any]) -> str:
    """Return a plan as an HTML document.

    Args:
        values: result of `pretrain.planner.splits.as_json`, the name of the ``recipe``, and ``columns``: the heading of
            each key of a split.
    """
    style = asset("style.css") + asset("plan.css", _PACKAGE)
    scripts = "".join(asset(f"{name}.js") for name in _SCRIPTS) + asset("plan.js", _PACKAGE)
    payload = zlib.compress(json.dumps(values, allow_nan=False).encode(), 9)
    return document(asset("plan.html", _PACKAGE), style, scripts, payload)


def write_page(values: dict[str, Any], path: Path) -> None:
    """Write the page of a plan.

    Raises:
        UserError: ``path`` is not writable.
    """
    with replacing(path) as (file,):
        file.write(page(values).encode())
