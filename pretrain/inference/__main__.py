"""One rank of ``fmoe evaluate`` or ``fmoe generate``, which starts it; or ``python -m pretrain.inference NAME ...``."""

from pretrain import leave_working_folder

if __name__ == "__main__":
    leave_working_folder()  # before anything else is imported

import sys

from fmoe.cli import run
from pretrain.inference import cli
from pretrain.start import ranks

if __name__ == "__main__":
    job = ranks.launched_job()
    name, *argv = sys.argv[1:] if job is None else job.argv
    sys.exit(run(f"fmoe {name}", lambda: getattr(cli, name)(argv)))
