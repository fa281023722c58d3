"""One case in n of a parametrized test by default, all of them in `make conformance`. Not a test itself."""

import math
import zlib
from collections import defaultdict

import pytest


def thin(items: list[pytest.Item]) -> None:
    """Marks as ``conformance`` what ``one_in(n)`` leaves out of a test's cases.

    Which ones stay goes by a checksum of their names: every n-th of a grid would meet some values of a parameter alone.
    A test always keeps one, and one without parameters stays.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("one_in") and getattr(item, "callspec", None):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        of_test.sort(key=lambda item: (zlib.crc32(item.nodeid.partition("[")[2].encode()), item.nodeid))
        (n,) = of_test[0].get_closest_marker("one_in").args
        for item in of_test[math.ceil(len(of_test) / n) :]:
            item.add_marker(pytest.mark.conformance)
