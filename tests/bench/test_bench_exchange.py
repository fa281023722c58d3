"""The benchmark of exchanges, tiny: its contenders agree, its counts are those of the formulas."""

import pytest

from bench import exchange, report
from bench.dispatchers import Batch


@pytest.mark.slow
def test_two_ranks(tmp_path, capfd):
    exchange.main(
        ["--ranks=2", "--tokens=64", "--skew=2", "--d-model=128", "--rounds=5", "--seconds=0.1", f"--out={tmp_path}"]
    )
    (row,) = report.read(tmp_path / "exchange.json")
    assert not row.failures and row.reference in row.seconds
    assert all(len(seconds) == 5 for seconds in row.seconds.values())
    facts = row.facts["fmoe all_to_all"]
    assert facts["collectives"] == "7" and facts["host reads"] == "1 (1 tolist)"
    padded = row.facts["fmoe padded"]
    assert padded["host reads"] == "0" and padded["collectives"] == "6"
    # 4 journeys to the 4 experts of the other rank, each with as many rows as the hottest: 2 * (2 / 8) * 64.
    assert padded["MB sent"] == f"{4 * 4 * 32 * 128 * 4 / 1e6:.2f}"
    out = capfd.readouterr().out
    assert "fmoe all_to_all over the faster of them" in out and "MB sent" in out


def share_of_the_hottest(skew):
    batch = Batch.random(48, 4, 8, 2, skew, seed=0)
    assert all(len(set(row)) == 2 for row in batch.expert_TK.tolist())
    return int((batch.expert_TK == 0).sum()), batch.most


def test_the_hottest_expert_gets_its_share(two_ranks):
    for skew in (1, 2, 4):
        for hot, most in two_ranks.run(share_of_the_hottest, skew):
            assert hot == 12 * skew <= most
