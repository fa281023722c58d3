"""torchrun as ``fmoe train`` runs it: its own messages go to a file, and which ranks failed to another.

Both files are in the folder that launcher and workers share. Workers inherit the descriptor of the real stderr.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = "FMOE_LAUNCHER"  # environment variable: the folder that launcher and workers share
LOG, FAILED = "torchrun.log", "failed.json"


def error_name(rank: int | str) -> str:
    """File of a rank's traceback."""
    return f"error-{rank}"


def command(arguments: Sequence[str]) -> list[str]:
    """The command that runs torchrun with these arguments."""
    return [sys.executable, "-m", "pretrain.agent", *arguments]


def main(arguments: Sequence[str]) -> None:
    """torchrun in this process."""
    folder = Path(os.environ[FOLDER])
    sys.stderr = (folder / LOG).open("a", buffering=1)  # before torch makes the handlers of its loggers
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        failed = []
        for rank, failure in error.failures.items():
            path = folder / error_name(rank)  # when it failed; its process may have taken long to end
            time = path.stat().st_mtime if path.exists() else failure.timestamp
            failed.append({"rank": rank, "pid": failure.pid, "code": failure.exitcode, "time": time})
        (folder / FAILED).write_text(json.dumps(failed))
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
