"""The benchmark of context parallelism: its table, and a small run on two ranks."""

from bench.studies import context


def test_a_table_compares_what_is_kept_at_equal_length():
    rows = [context.Row("data", 8, 4e6, [0.2, 0.1, 0.3]), context.Row("context", 8, 1e6, [0.1, 0.1])]
    assert context.table([*rows, context.Row("data", 4, 2e6, [1.0, 2.0])])[2:] == [
        "| 4 | data | 1500.0 | 2.00 | 100.0% |",
        "| 8 | data | 200.0 | 4.00 | 100.0% |",
        "| 8 | context | 100.0 | 1.00 | 25.0% |",
    ]
