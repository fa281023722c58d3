"""What `one_in` leaves to `make conformance`."""

import pytest
from slices import thin


class Item:
    """What of a test `thin` looks at."""

    def __init__(self, nodeid, n=None):
        self.nodeid, self.n, self.is_left_out = nodeid, n, False
        self.callspec = object() if "[" in nodeid else None

    def get_closest_marker(self, name):
        return pytest.mark.one_in(self.n).mark if name == "one_in" and self.n else None

    def add_marker(self, mark):
        assert mark.name == "conformance"
        self.is_left_out = True


def test_one_in_n_cases_of_each_test_stay_the_same_ones_every_time():
    kept = []
    for turn in range(2):
        items = [Item(f"a.py::of_grid[{x}-{y}]", 3) for x in range(6) for y in "abc"]
        items += [Item("a.py::single[1]", 3), Item("a.py::plain", 3), *(Item(f"a.py::whole[{x}]") for x in range(4))]
        thin(items[::-1] if turn else items)
        kept.append({item.nodeid for item in items if not item.is_left_out})
    assert kept[0] == kept[1]
    of_grid = {name for name in kept[0] if "of_grid" in name}
    assert len(of_grid) == 6 and {name[-2] for name in of_grid} == set("abc"), "no value of a parameter is left out"
    assert len(kept[0]) == 6 + 1 + 1 + 4
