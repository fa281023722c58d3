"""Timing of contenders against each other in one process.

Every round runs every contender once, in a new random order, so that changes during the measurement (clock frequency,
temperature, other load on the machine) affect all of them equally. Two contenders are compared by their paired ratios,
round by round, in which most of these changes cancel.

A ratio is always **time of the reference / time of the contender**: above 1 the contender is faster.
"""

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from bench.intervals import Interval, quartiles, trimmed_mean_interval
from fmoe.errors import UserError

Step = Callable[[], Any]
LEAST_ROUNDS = 3  # rounds that are run however long they take


@dataclass(frozen=True)
class Contender:
    """A contender to time.

    Args:
        name: unique within a measurement.
        setup: builds everything and returns the step, whose calls are timed.
        work: work of one call, in the measurement's unit (e.g. tokens), which adds a throughput to the report. Ratios
            compare times and ignore it.
    """

    name: str
    setup: Callable[[], Step]
    work: float | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Result of `measure`: every single time. Statistics are computed on request.

    Attributes:
        label: the row of the report, e.g. a shape and a dtype.
        reference: the contender that the others are compared with.
        rounds: number of rounds that were run.
        warmup, seed, min_seconds: as given to `measure`.
        unit: unit of the contenders' work.
        seconds: per contender, the seconds of one call in each round.
        calls: per contender, the number of calls over which a round's time is averaged.
        work: per contender with a throughput, the work of one call.
        failures: per contender that raised, when and why. Such a contender has no entry in the other fields.
        facts: per contender, further facts by name: columns of the report.
    """

    label: str
    reference: str
    rounds: int
    warmup: int
    seed: int
    min_seconds: float | None
    unit: str
    seconds: dict[str, list[float]]
    calls: dict[str, int]
    work: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, str]] = field(default_factory=dict)

    def quartiles(self, name: str) -> tuple[float, float, float]:
        """Return first quartile, median and third quartile of the seconds of a call."""
        return quartiles(self.seconds[name])

    def median(self, name: str) -> float:
        """Return the median seconds of a call."""
        return self.quartiles(name)[1]

    def throughput(self, name: str) -> float | None:
        """Return the work per second at the median time; None for a contender without work."""
        return self.work[name] / self.median(name) if name in self.work else None

    def log_ratios(self, name: str) -> list[float] | None:
        """Return the logarithms of the paired ratios, one per round; None if the contender or the reference failed."""
        if name not in self.seconds or self.reference not in self.seconds:
            return None
        pairs = zip(self.seconds[self.reference], self.seconds[name], strict=True)
        return [math.log(reference / contender) for reference, contender in pairs]

    def ratio(self, name: str, confidence: float = 0.95) -> Interval | None:
        """Return the trimmed geometric mean of the paired ratios with its interval (`bench.intervals`)."""
        logs = self.log_ratios(name)
        return None if logs is None else trimmed_mean_interval([logs], confidence).exp()

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Build from the output of `to_json`."""
        return cls(**values)


def measure(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    warmup: int,
    reference: str,
    seed: int = 0,
    min_seconds: float | None = None,
    max_seconds: float | None = None,
    label: str = "",
    unit: str = "tokens",
    clock: Callable[[], float] = time.perf_counter,
    sync: Callable[[], Any] | None = None,
    line_up: Callable[[], Any] | None = None,
    agree: Callable[[float], float] | None = None,
) -> Measurement:
    """Time contenders against each other; all of them are set up, and held in memory, at the same time.

    Args:
        contenders: at least one.
        rounds: timed runs of every contender, at least 2 (an interval needs a spread).
        warmup: untimed runs of every contender before the first round.
        reference: the contender with which ratios compare the others.
        seed: seed of the order within the rounds.
        min_seconds: a run repeats a call until it takes about this long. The number of calls follows from the warm-up,
            which must have at least one run, and is the same in all rounds. None: a run is one call.
        max_seconds: total of the timed runs after which no further round begins, except for the first `LEAST_ROUNDS`.
            Not for ranks that measure together, because they would not stop together.
        label, unit: see `Measurement`.
        clock: returns seconds.
        sync: waits for the device, e.g. ``torch.cuda.synchronize``; called before every reading of the clock.
        line_up: called before every run, e.g. a barrier, so that ranks that measure together begin every run together.
            Each rank calls this function with the same arguments.
        agree: maps the seconds of a run on this rank to those that count, e.g. the slowest rank's.

    Returns:
        The times. A contender that raises is left out from then on, and its reason is in ``failures``.

    Raises:
        UserError: a number is out of range, names repeat, or the reference is not a contender.
    """
    assert max_seconds is None or agree is None
    _check(contenders, rounds=rounds, warmup=warmup, reference=reference, min_seconds=min_seconds)
    order = random.Random(seed)
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    calls = dict.fromkeys(seconds, 1)
    failures: dict[str, str] = {}
    steps: dict[str, Step] = {}

    def run(step: Step, count: int) -> float:
        if line_up is not None:
            line_up()
        if sync is not None:
            sync()
        start = clock()
        for _ in range(count):
            step()
        if sync is not None:
            sync()
        elapsed = clock() - start
        if agree is not None:
            elapsed = agree(elapsed)
        if elapsed <= 0:
            raise ValueError("took no time that this clock can measure")
        return elapsed / count

    @contextlib.contextmanager
    def reported(name: str, moment: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Only the first line: a CUDA error fills a page. The error object would keep the contender's tensors alive.
            reason = (str(error).strip().splitlines() or [""])[0]
            failures[name] = f"{moment}: {type(error).__name__}{': ' if reason else ''}{reason}"
            steps.pop(name, None)
            del seconds[name], calls[name]

    for contender in contenders:
        with reported(contender.name, "setup"):
            steps[contender.name] = contender.setup()
    with _collector_off():
        for name in list(steps):
            with reported(name, "warm-up"):
                warm = [run(steps[name], 1) for _ in range(warmup)]
                if min_seconds is not None:
                    # The fastest: the first call compiles, allocates and tunes.
                    calls[name] = max(1, math.ceil(min_seconds / min(warm)))
        number = 0
        while number < rounds:
            taken = math.fsum(calls[name] * second for name, of_one in seconds.items() for second in of_one)
            if max_seconds is not None and number >= LEAST_ROUNDS and taken >= max_seconds:
                break
            number += 1
            gc.collect()
            for name in order.sample(list(steps), len(steps)):
                with reported(name, f"round {number}"):
                    seconds[name].append(run(steps[name], calls[name]))

    return Measurement(
        label=label,
        reference=reference,
        rounds=number,
        warmup=warmup,
        seed=seed,
        min_seconds=min_seconds,
        unit=unit,
        seconds=seconds,
        calls=calls,
        work={c.name: c.work for c in contenders if c.work is not None and c.name in seconds},
        failures=failures,
    )


def geometric_mean_of_ratios(rows: Sequence[Measurement], name: str, confidence: float = 0.95) -> Interval | None:
    """Return the geometric mean over rows of a contender's ratios (`Measurement.ratio`), with its interval.

    The interval covers the noise of the measurement of these rows, not the variation between rows.

    Returns:
        None if the contender or the reference failed in a row: a mean over the other rows would be too favorable.
    """
    logs = [row.log_ratios(name) for row in rows]
    if not logs or any(row is None for row in logs):
        return None
    return trimmed_mean_interval(logs, confidence).exp()


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Collect garbage between the rounds, instead of at any moment within one.

    Freezing hides live objects from the collector, so that a collection costs only as much as the round's garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _check(
    contenders: Sequence[Contender], *, rounds: int, warmup: int, reference: str, min_seconds: float | None
) -> None:
    names = [contender.name for contender in contenders]
    if len(set(names)) != len(names):
        raise UserError(f"contenders={', '.join(names)}: names must differ")
    if reference not in names:
        raise UserError(f"reference={reference!r} must be one of {', '.join(names) or 'no contenders'}")
    if rounds < 2:
        raise UserError(f"rounds={rounds} must be at least 2")
    if warmup < 0:
        raise UserError(f"warmup={warmup} must be at least 0")
    if min_seconds is not None and min_seconds <= 0:
        raise UserError(f"min_seconds={min_seconds} must be above 0")
    if min_seconds is not None and warmup < 1:
        raise UserError(f"warmup={warmup} must be at least 1 with min_seconds={min_seconds}")
