"""The benchmark of ZeRO: its verdict, and all stages on two ranks."""

import pytest
from forks import values

from bench.studies import zero


@pytest.mark.parametrize(("formula", "value"), [("16", 16), ("16 / N", 4), ("6 + 12 / N", 9), ("4 + 12 / N", 7)])
def test_values_of_formulas(formula, value):
    assert zero._value(formula, 4) == value


@pytest.mark.parametrize(
    ("changed", "is_met"), [({}, True), ({"sent": 605}, False), ({"held": 820}, False), ({"gathered": 999}, True)]
)
def test_figures_must_be_those_of_the_formulas(changed, is_met):
    row = {"ranks": 2, "precision": "fp32", "stage": 3, "parameters": 100, "held": 800, "gathered": 30, "sent": 600}
    text, found = zero.table([row], tolerance=0.001)
    assert found and "| 8.00" in text and "12 x f" in text
    assert zero.table([row | changed], tolerance=0.001)[1] is is_met


@pytest.mark.slow
def test_two_ranks_hold_and_send_what_the_formulas_say(forks):
    rows, other = values(forks.run(2, zero.count_all, ["fp32", "bf16"], 64, 2))
    assert [row["sent"] for row in rows] == [row["sent"] for row in other]
    text, is_met = zero.table(rows, tolerance=0.02)
    assert is_met, text
    gathered = {(row["precision"], row["stage"]): row["gathered"] / row["parameters"] for row in rows}
    assert 0 < gathered["fp32", 3] < 0.6 * gathered["fp32", 2]
