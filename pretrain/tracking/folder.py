"""Names of the files in a run folder, and a reader of ``run.json``, the description of the run."""

import json
from pathlib import Path
from typing import Any

from fmoe.errors import UserError

CONFIG, METRICS, RUN_INFO = "config.toml", "metrics.jsonl", "run.json"
CHECKPOINTS, STACKS = "checkpoints", "stacks"


def read_run_info(folder: Path) -> dict[str, Any]:
    """Return ``run.json`` of a run folder; empty if it does not exist yet.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / RUN_INFO
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(info, dict):
        raise UserError(f"{path} cannot be read: it does not hold a JSON object")
    return info
