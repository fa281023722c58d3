"""Limits in seconds that hold on a machine which has other things to do. Not a test itself."""

import time

SPIN = 0.1  # seconds of CPU


def within(seconds: float) -> float:
    """``seconds`` of a machine with a free core, as this one has them now: longer by what a loop takes over its CPU
    time, which is one where nobody else runs."""
    wall, begin = time.monotonic(), time.process_time()
    while time.process_time() - begin < SPIN:
        pass
    return seconds * max(1.0, (time.monotonic() - wall) / SPIN)
