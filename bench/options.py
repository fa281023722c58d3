"""Options that all benchmarks share."""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

from fmoe.errors import UserError

RESULTS = Path(__file__).parent / "results"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def parser(name: str, description: str, *, rounds=20, warmup: int | None = 3, has_seed=True) -> argparse.ArgumentParser:
    """Return a parser with ``--rounds``, ``--out``, and unless left out ``--warmup`` and ``--seed``."""
    result = bare_parser(name, description)
    result.add_argument("--rounds", type=int, default=rounds, help="timed runs of every contender")
    if warmup is not None:
        result.add_argument(
            "--warmup", type=int, default=warmup, help="untimed runs of every contender before the rounds"
        )
    if has_seed:
        result.add_argument(
            "--seed", type=int, default=0, help="seed of the order in a round, in some also of the data"
        )
    return result


def bare_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with only ``--out``, for benchmarks without rounds."""
    result = argparse.ArgumentParser(
        prog=f"python -m bench {name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and Markdown reports")
    return result


def add_clock(parser: argparse.ArgumentParser) -> None:
    """Add ``--clock``."""
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: processor seconds, for machines that others use too"
    )


def clock(name: str, threads: int | None) -> Callable[[], float]:
    """Return the clock that ``--clock`` names, a function that returns seconds.

    Raises:
        UserError: processor seconds of more than one thread.
    """
    if name == "cpu" and threads != 1:
        raise UserError(f"--clock=cpu adds the times of {threads or 'all'} threads: pass --threads 1")
    return CLOCKS[name]


def at_least(arguments: argparse.Namespace, **least: float) -> None:
    """Raise UserError if an option, or an element of its list, is below its value in ``least`` or not finite."""
    for name, limit in least.items():
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            if not limit <= value < math.inf:
                raise UserError(f"--{name.replace('_', '-')}={value} must be finite and at least {limit}")
