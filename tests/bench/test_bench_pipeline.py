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
