"""Choice of the cases of a parametrized test that run by default; `make conformance` runs all. Not a test itself.

``@pytest.mark.cover(1)`` keeps cases in which every value of every parameter occurs, ``cover(2)`` those in which every
two values of different parameters meet. ``@pytest.mark.by_default("id", 3, ...)`` lists the cases to keep, by id or
position. The rest is marked ``slow``. The choice depends on the values and their order alone, not on names of tests.
"""

import collections
import itertools
from collections.abc import Sequence

import pytest


def thin(items: list[pytest.Item]) -> None:
    """Mark as ``slow`` what ``cover`` and ``by_default`` leave out of each test's cases."""
    cases = collections.defaultdict(list)
    for item in items:
        if getattr(item, "callspec", None):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, of_test in cases.items():
        if named := of_test[0].get_closest_marker("by_default"):
            kept = [index for index, item in enumerate(of_test) if {index, item.callspec.id} & {*named.args}]
            # A case selected on the command line comes without the others.
            if len(of_test) > 1 and len(kept) != len(named.args):
                raise pytest.UsageError(f"{name}: of by_default{named.args} only {len(kept)} are cases")
        elif strength := of_test[0].get_closest_marker("cover"):
            kept = cover([tuple((n, id(v)) for n, v in i.callspec.params.items()) for i in of_test], *strength.args)
        else:
            continue
        for index, item in enumerate(of_test):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


def cover(cases: Sequence[tuple], strength: int) -> list[int]:
    """Return the indices of cases that contain every ``strength`` values that occur together.

    Greedy: always the case with most combinations that are still missing; of those the one whose values were used
    least, then the first one.
    """
    parts = [set(itertools.combinations(case, min(strength, len(case)))) for case in cases]
    missing = set().union(*parts)
    used = collections.Counter()
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(parts[i] & missing), -sum(used[v] for v in cases[i]), -i))
        missing -= parts[best]
        used.update(cases[best])
        chosen.append(best)
    return chosen
