"""The benchmark of context parallelism: its table, and a small run on two ranks."""

from types import SimpleNamespace

import pytest
from forks import values

from bench.studies import context

SMALL = {"rounds": 2, "warmup": 0, "ranks": 2, "lengths": [32, 64], "layers": 2, "hidden_size": 64}


def test_a_table_compares_what_is_kept_at_equal_length():
    rows = [context.Row("data", 8, 4e6, [0.2, 0.1, 0.3]), context.Row("context", 8, 1e6, [0.1, 0.1])]
    assert context.table([*rows, context.Row("data", 4, 2e6, [1.0, 2.0])])[2:] == [
        "| 4 | data | 1500.0 | 2.00 | 100.0% |",
        "| 8 | data | 200.0 | 4.00 | 100.0% |",
        "| 8 | context | 100.0 | 1.00 | 25.0% |",
    ]


@pytest.mark.slow
def test_a_rank_keeps_a_slice_of_every_sequence(forks):
    arguments = SimpleNamespace(**SMALL)
    kept = {}
    for split in ("data", "context"):
        rows, same = values(forks.run(2, context.measure, arguments, split))
        assert rows == same
        assert [(row["split"], row["length"], len(row["seconds"])) for row in rows] == [(split, 32, 2), (split, 64, 2)]
        kept[split] = [row["kept"] for row in rows]
    for whole, sliced in zip(kept["data"], kept["context"], strict=True):
        assert 0.45 < sliced / whole < 0.7  # half, and the logits that every gate sees
