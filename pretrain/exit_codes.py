"""How a run ends that neither finished (0) nor met a wrong input (2, `fmoe.errors.EXIT_USAGE`)."""

EXIT_DIVERGED = 65
"""A guard stopped the run: the next start meets the same data with the same weights. A person looks first.
EX_DATAERR of sysexits.h."""

EXIT_HANG = 70
"""No progress for ``guard.hang_minutes``; the stacks are in the run's folder. EX_SOFTWARE of sysexits.h."""

EXIT_REQUEUE = 75
"""A signal stopped the run between two steps and its checkpoint is written: start it again with ``--resume auto``.
EX_TEMPFAIL of sysexits.h, which schedulers can be told to requeue on."""


class Diverged(RuntimeError):
    """A guard ends the run, on all ranks at the same step. The message is one line."""
