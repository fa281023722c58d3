"""``fmoe selftest``: says so where a split layer is right, and names what is wrong and where."""

import json

import pytest

ONLY = ("--device", "cpu", "--timeout", 15)


def run(forks, size, *options, before=None):
    return forks.command("fmoe", "selftest", *ONLY, *options, size=size, before=before)


def test_one_process(forks):
    (ended,) = run(forks, 1)
    assert ended.code == 0, ended.err
    assert "ok: 6 cases, split over 1" in ended.out


def test_two_ranks(forks, tmp_path):
    first, second = run(forks, 2, "--megabytes", 0.1, "--json", tmp_path / "result.json")
    assert (first.code, second.code) == (0, 0), first.out + first.err + second.err
    assert "ok: 42 cases, split over 2" in first.out and not second.out
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["cases"]) == 42 and all(not case["failed"] for case in result["cases"])
    assert max(max(case["errors"].values()) for case in result["cases"]) < 1e-5
    names = ["all_to_all", "padded", "all_gather", "hierarchical node_size=1"]
    assert [row["exchange"] for row in result["bandwidth"]] == names
    assert all(row["gigabytes_per_second"] > 0 for row in result["bandwidth"])


def test_ranks_that_share_no_experts(forks):
    first, second = run(forks, 2, "--ep", 1, "--megabytes")
    assert (first.code, second.code) == (0, 0), first.out + first.err
    assert "2 ranks, ep 1, dp 2" in first.out


def mix_up_rows():
    """Rank 1 sends the experts' outputs back one place off."""
    import os

    from fmoe.exchange.hops import AllToAll

    if os.environ["RANK"] == "1":
        apply = AllToAll.apply
        AllToAll.apply = lambda rows, hop, back: apply(rows.roll(1, 0) if back else rows, hop, back)


def test_a_broken_exchange_is_found(forks):
    first, second = run(forks, 2, "--megabytes", before=mix_up_rows)
    assert (first.code, second.code) == (1, 1)
    lines = [line for line in first.out.splitlines() if line.startswith("FAILED")]
    # Both ranks get wrong rows: each has tokens for the experts of rank 1, whose inputs get wrong gradients.
    assert any("all_to_all, naive, ffn: output on ranks 0, 1 differs from one process" in line for line in lines)
    assert any("all_to_all, naive, ffn: experts' gradient on rank 1 differs" in line for line in lines)
    assert not any("all_gather" in line for line in lines)


def fail_late():
    """Rank 1 raises where experts compute, while rank 0 waits for its rows."""
    import os

    import fmoe.experts.call

    def call(*args, **options):
        raise ArithmeticError("one place short")

    if os.environ["RANK"] == "1":
        fmoe.experts.call.ExpertCall.rows = call


def test_a_rank_that_raises_is_named(forks):
    first, second = run(forks, 2, "--megabytes", before=fail_late)
    assert (first.code, second.code) == (1, 1)
    assert "FAILED: all_to_all, naive, ffn: rank 1: ArithmeticError: one place short" in first.out


@pytest.mark.parametrize("option", [("--ep", 2), ("--timeout", 0), ("--timeout", "nan"), ("--timeout", "inf")])
def test_what_cannot_be_is_one_line(forks, option):
    (ended,) = run(forks, 1, *option)
    assert ended.code == 2 and ended.err.count("\n") == 1
