"""The pipeline benchmark: its arithmetic."""

import pytest

from bench.studies import pipeline


def ideal(stages, t=0.25, rounds=5):
    return [[float(m)] + [(m + stages - 1) * t] * rounds for m in (2, 4, 8, pipeline.LONGEST)]


@pytest.mark.parametrize("stages", [2, 4])
def test_equal_stages_that_send_for_nothing_give_the_formula(stages):
    rows = ideal(stages)
    for index, m in enumerate((2, 4, 8)):
        assert pipeline.bubbles(rows, index) == pytest.approx([(stages - 1) / (m + stages - 1)] * 5)
    lines = pipeline.table({"1f1b": rows}, stages)
    assert lines[-1].endswith("geometric mean of 3: 1.00")
    assert all(line.endswith("| 1.00 |") for line in lines[2:5])


def zero_bubble_time(stages, count):
    """Time of a step of ZB-H1, in forward passes, from the order of passes on each stage and what each waits for."""
    orders = []
    for stage in range(stages):
        ahead = stages - stage - 1
        order = []
        for number in range(count + ahead):
            order += [("F", number)] if number < count else []
            order += [("B", number - ahead)] if number >= ahead else []
            order += [("W", number - ahead - stage)] if number >= ahead + stage else []
        orders.append(order + [("W", number) for number in range(max(count - stage, 0), count)])
    ends = {}
    clocks = [0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            if order:
                kind, number = order[0]
                needs = {"F": ("F", number, stage - 1), "B": ("B", number, stage + 1), "W": None}[kind]
                if needs is None or not 0 <= needs[2] < stages or needs in ends:
                    clocks[stage] = max(clocks[stage], ends.get(needs, 0)) + 1
                    ends[*order.pop(0), stage] = clocks[stage]
    return max(clocks)


@pytest.mark.parametrize("stages", [2, 4])
def test_the_zero_bubble_formula_is_the_time_of_its_order_of_passes(stages):
    for count in (4, 8):
        share = 1 - 3 * count / zero_bubble_time(stages, count)
        assert pipeline.theory("zero_bubble", stages, count) == pytest.approx(share)
