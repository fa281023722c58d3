"""Train one rank of a run: ``python -m pretrain RECIPE.toml [--section.key value] [--resume [WHERE]]``.

A run with several ranks needs torchrun, which starts this command once per rank. The ranks that ``fmoe train`` starts
read their job from a file instead of a command line.
"""

from pretrain import leave_working_folder

if __name__ == "__main__":
    leave_working_folder()  # before anything else is imported

import sys
from collections.abc import Sequence

from fmoe.cli import run
from fmoe.runtime import launcher
from pretrain.config.imports import import_plugins
from pretrain.start import process, ranks
from pretrain.start.job import Job, check, parse


def main(argv: Sequence[str], job: Job | None = None) -> int:
    """Train one rank of a run, and return its exit code. `pretrain.start.codes` lists the codes.

    Args:
        job: the job, if the caller has parsed and checked it already.

    Raises:
        UserError: an error that the user can fix.
    """
    return process.run_rank(lambda: _train(argv, job))


def _train(argv: Sequence[str], job: Job | None) -> int:
    job = job or ranks.launched_job()
    if job is None:
        job = parse(argv, "python -m pretrain")
        job.announce()
        job = check(job)
    import_plugins(job.recipe)
    job.recipe.check_world_size(launcher.world_size())
    from pretrain.start.run import train  # imports megatron-core

    return train(job)


if __name__ == "__main__":
    sys.exit(run("pretrain", lambda: main(sys.argv[1:])))
