"""The cases that `cover` and `by_default` leave to `make conformance`."""

import itertools
import math
from types import SimpleNamespace

import pytest
from slices import cover, thin


class Item:
    """Stand-in for a test, with the attributes that `thin` reads."""

    def __init__(self, nodeid, params, **marks):
        self.nodeid = nodeid
        self.is_slow = False
        self.callspec = SimpleNamespace(id=nodeid.partition("[")[2][:-1], params=params)
        self.marks = {name: getattr(pytest.mark, name)(*args).mark for name, args in marks.items()}

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, mark):
        assert mark.name == "slow"
        self.is_slow = True


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("sizes", [(6, 3), (13, 5, 2, 3), (2, 2, 2, 2, 2), (7,)])
def test_every_combination_of_values_is_in_a_chosen_case(sizes, strength):
    cases = [tuple(enumerate(values)) for values in itertools.product(*map(range, sizes))]
    chosen = [cases[index] for index in cover(cases, strength)]
    width = min(strength, len(sizes))
    for part in itertools.combinations(range(len(sizes)), width):
        meant = set(itertools.product(*(range(sizes[i]) for i in part)))
        assert {tuple(case[i][1] for i in part) for case in chosen} == meant
    largest = sorted(sizes)[-width:]
    assert len(chosen) <= 2 * math.prod(largest)


def test_values_of_the_shorter_list_are_used_alike():
    cases = [tuple(enumerate(values)) for values in itertools.product(range(12), range(3))]
    used = [cases[index][1][1] for index in cover(cases, 1)]
    assert len(used) == 12 and all(used.count(value) == 4 for value in range(3))


def items(test, **marks):
    return [Item(f"a.py::{test}[{x}-{y}]", {"x": x, "y": y}, **marks) for x in range(6) for y in "abc"]


def test_names_of_tests_change_nothing_and_other_tests_stay_whole():
    kept = []
    for name in ("one", "another"):
        cases = [*items(name, cover=[1]), *items("whole")]
        thin(cases)
        kept.append([item.callspec.id for item in cases if not item.is_slow])
    assert kept[0] == kept[1] and len(kept[0]) == 6 + 18


def test_cases_chosen_by_id_and_position():
    cases = items("of", by_default=["2-b", 15])
    thin(cases)
    assert [item.callspec.id for item in cases if not item.is_slow] == ["2-b", "5-a"]
    with pytest.raises(pytest.UsageError, match=r"of: of by_default\('7-b', '5-a'\) only 1 are cases"):
        thin(items("of", by_default=["7-b", "5-a"]))
