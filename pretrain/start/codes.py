"""Exit codes of a run: 0 for success, 2 for invalid input (`fmoe.errors.EXIT_USAGE`), or one of the constants below.

docs/operations.md also lists the codes of crashes and interrupts.
"""

EXIT_DIVERGED = 65
"""A guard (recipe section ``[guard]``) stopped a run that diverged. A restart would repeat the same steps: find the
cause first. EX_DATAERR of sysexits.h."""

EXIT_HANG = 70
"""The run made no progress for ``guard.hang_minutes`` minutes. The stack traces are in the run's folder. EX_SOFTWARE of
sysexits.h."""

EXIT_REQUEUE = 75
"""A signal stopped the run. Restart it with ``--resume auto``.

The run saved a checkpoint first, unless training had not started or ``checkpoint.every`` is 0. The code is EX_TEMPFAIL
of sysexits.h. Schedulers can be configured to requeue a job that exits with it."""
