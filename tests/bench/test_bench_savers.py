"""The benchmark of compressed gradients and local SGD."""

from types import SimpleNamespace

import pytest
from forks import values

from bench.studies import savers


@pytest.mark.slow
def test_bytes_and_losses_of_a_small_run(forks):
    options = {"contenders": list(savers.CONTENDERS), "seeds": [0], "steps": 22, "warmup": 4, "period": 6}
    sizes = {"lr": 0.2, "batch": 2, "width": 16, "density": 0.01, "rank": 1}
    outer = {"outer_lr": 0.7, "outer_momentum": 0.9}
    arguments = SimpleNamespace(**options, **sizes, **outer, ranks=2)
    rows, others = values(forks.run(2, savers.train_all, arguments))
    assert [row["loss"] for row in rows] == [row["loss"] for row in others]
    of = {row["contender"]: row for row in rows}
    dense = of["all-reduce"]["dense"]
    assert of["all-reduce"]["sent"] == 18 * 4 * dense
    assert of["fp16"]["sent"] == 18 * 2 * dense
    assert of["localsgd"]["sent"] == of["geosgd"]["sent"] == of["diloco"]["sent"] == 3 * 4 * dense  # steps 4, 10 and 16
    assert of["geosgd"]["loss"] == pytest.approx(of["localsgd"]["loss"], rel=1e-5)
    assert of["powersgd"]["sent"] < of["all-reduce"]["sent"] / 3
    assert of["onebit"]["sent"] < of["all-reduce"]["sent"] / 15  # small tensors fill whole blocks
    assert of["all-reduce, AdamW"]["sent"] == of["all-reduce"]["sent"]
    assert 18 * 8 * 0.01 * dense <= of["dgc"]["sent"] < of["all-reduce"]["sent"] / 20
    assert all(row["exchanged"] > 0 for row in rows)
    lines = savers.table(rows, arguments).splitlines()
    assert sum(line.startswith(f"| {name} ") for name in of for line in lines) == len(savers.CONTENDERS)


def test_a_link_on_which_a_step_takes_a_share_of_the_time():
    reference = {"sent": 4000, "seconds": 1.0}
    row = {"sent": 40, "seconds": 2.0}
    at = savers.bandwidth(reference, row, share=0.5, steps=4)
    assert 2.0 + 10 / at == pytest.approx(0.5 * (1.0 + 1000 / at))
    assert savers.bandwidth(reference, {"sent": 40, "seconds": 0.4}, share=0.5, steps=4) == float("inf")
    assert savers.bandwidth(reference, {"sent": 3000, "seconds": 2.0}, share=0.5, steps=4) == 0.0
