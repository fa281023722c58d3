"""Names of the files in a run folder, and a reader of ``run.json``, the description of the run."""

from pathlib import Path
from typing import Any

from pretrain.files import read_object

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
RUN_INFO = "run.json"
CHECKPOINTS = "checkpoints"
STACKS = "stacks"
PROFILES = "profiles"


def read_run_info(folder: Path) -> dict[str, Any]:
    """Return ``run.json`` of a run folder; empty if it does not exist yet.

    Raises:
        UserError: the file is damaged.
    """
    return read_object(folder / RUN_INFO) or {}
