"""Train one rank of a run: ``python -m pretrain RECIPE.toml [--section.key value] [--resume [WHERE]]``.

A run with several ranks needs torchrun, which starts this command once per rank. The ranks that ``fmoe train`` starts
read their job from a file instead of a command line.
"""

from pretrain import leave_working_folder

if __name__ == "__main__":
    leave_working_folder()  # before anything else is imported

import os
import sys
import time
import traceback
from collections.abc import Sequence

import torch.distributed as dist

from fmoe.cli import refusal, run
from fmoe.errors import EXIT_USAGE, UserError
from fmoe.runtime import launcher
from pretrain.config.imports import import_plugins
from pretrain.start import process, ranks
from pretrain.start.job import Job, check, parse

_SECONDS_FOR_THE_FIRST = 30  # time for another rank to print the error and end


def main(argv: Sequence[str], job: Job | None = None) -> int:
    """Train one rank of a run, and return its exit code. `pretrain.start.codes` lists the codes.

    Args:
        job: the job, if the caller has parsed and checked it already.

    Raises:
        UserError: an error that the user can fix.
    """
    try:
        job = job or ranks.launched_job()
        if job is None:
            job = parse(argv, "python -m pretrain")
            job.announce()
            job = check(job)
        import_plugins(job.recipe)
        job.recipe.check_world_size(launcher.world_size())
        from pretrain.start.run import train  # imports megatron-core

        return train(job)
    except Exception as error:
        message = refusal(error) if isinstance(error, OSError) else None
        if message is None and not isinstance(error, UserError | ModuleNotFoundError):
            if not ranks.keep_error(traceback.format_exc()):
                raise
            return 1
        # Before the ranks have met, all ranks of a machine find the same error: only one of them prints it.
        is_printed_elsewhere = isinstance(error, process.RefusedElsewhere)
        if not is_printed_elsewhere and (launcher.local_rank() == 0 or dist.is_initialized()):
            raise
        if "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(_SECONDS_FOR_THE_FIRST)  # torchrun ends all ranks when the first one ends
        return EXIT_USAGE
    finally:
        process.stop()


if __name__ == "__main__":
    sys.exit(run("pretrain", lambda: main(sys.argv[1:])))
