"""No silent hang: what goes wrong on one rank is an error on every rank, soon, which names that rank."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faults
import pytest
import torch
from exchange_libraries import with_libraries
from forks import values
from patience import within
from rank_pool import DIED

EXCHANGES = ["all_to_all", "padded", "all_gather", "hierarchical"]


@pytest.mark.by_default("all_gather")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_another_width_on_one_rank_is_named(forks, exchange):
    for kind, message, seconds in values(forks.run(2, faults.differing_width, exchange)):
        assert kind == "UserError" and seconds < within(5)
        assert "d_model=20 on rank 1, but 16 on the other ranks of moe_group" in message


@pytest.mark.by_default("hierarchical-1")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_killed_rank_is_named(forks, exchange, victim):
    results = forks.run(4 if exchange == "all_to_all" else 2, faults.signalled, exchange, signal.SIGKILL, 5, victim)
    assert results.pop(victim) == DIED
    for kind, message, seconds in values(results):
        assert kind == "PeerError" and seconds < within(10), (kind, message, seconds)
        assert f"rank {victim} did not answer" in message and "the layer, forward pass 3" in message


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_stopped_rank_is_named_after_the_timeout(forks, exchange):
    timeout = 2
    results = forks.run(2, faults.signalled, exchange, signal.SIGSTOP, timeout, 1)
    assert results.pop(1) == DIED
    for kind, message, seconds in values(results):
        assert kind == "PeerError" and seconds < within(timeout + 2), (kind, message, seconds)
        assert "rank 1 did not answer" in message and "the layer, forward pass 3" in message


@pytest.mark.by_default("all_gather")
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_error_in_one_gate_is_everyones(forks, exchange):
    (first, usable), (second, _) = values(forks.run(2, faults.broken_gate, exchange))
    assert first[0] == "PeerError" and "rank 1 failed" in first[1] and "the gate of rank 1 is broken" in first[1]
    assert second[:2] == ("ValueError", "the gate of rank 1 is broken")
    assert first[2] < within(5) and usable in (True, None)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_error_in_an_expert_is_everyones(forks, exchange):
    first, second = values(forks.run(2, faults.broken_expert, exchange))
    assert second[:2] == ("ValueError", "an expert of rank 1 is broken")
    assert first[0] == "PeerError" and "rank 1 failed in the layer, forward pass 1" in first[1]
    assert "an expert of rank 1 is broken" in first[1] and first[2] < within(5)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["deepep", "symmetric"])
def test_exchanges_over_stand_ins(forks, exchange):
    """As above, with stand-ins for the exchange's library."""
    (first, usable), (second, _) = values(forks.run(2, with_libraries, torch.float32, faults.broken_gate, exchange))
    assert first[0] == "PeerError" and "rank 1 failed" in first[1] and "the gate of rank 1 is broken" in first[1]
    assert second[:2] == ("ValueError", "the gate of rank 1 is broken") and usable is True
    first, second = values(forks.run(2, with_libraries, torch.float32, faults.broken_expert, exchange))
    assert second[:2] == ("ValueError", "an expert of rank 1 is broken")
    assert first[0] == "PeerError" and "rank 1 failed in the layer, forward pass 1" in first[1] and first[2] < within(5)
    results = forks.run(2, with_libraries, torch.float32, faults.signalled, exchange, signal.SIGKILL, 5, 1)
    assert results.pop(1) == DIED
    for kind, message, seconds in values(results):
        assert kind == "PeerError" and seconds < within(10), (kind, message, seconds)
        assert "rank 1 did not answer" in message and "the layer, forward pass 3" in message


@pytest.mark.slow
def test_an_error_before_a_gates_own_exchange_is_everyones(forks):
    first, second = values(forks.run(2, faults.broken_before_the_gates_exchange))
    assert second[0] == "ValueError"
    assert (
        first[0] == "PeerError" and "rank 1 fails before the gate's own exchange" in first[1] and first[2] < within(5)
    )


@pytest.mark.by_default(3)
@pytest.mark.parametrize(
    ("pool", "exchange", "options"),
    [
        ("four_ranks", "all_to_all", {}),
        ("four_ranks", "hierarchical", {"node_size": 2}),
        ("two_ranks", "all_to_all", {"chunks": 3}),
        ("two_ranks", "all_to_all", {"max_rows": 8, "shadow": 1}),
        ("two_ranks", "padded", {"slots": 12}),
        ("two_ranks", "all_gather", {}),
    ],
    ids=str,
)
def test_no_pattern_of_token_counts_hangs(request, pool, exchange, options):
    ranks = request.getfixturevalue(pool)
    assert max(values(ranks.run(faults.random_counts, exchange, options, 50))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "timeout", "limit", "told"),
    [
        ("SIGKILL", 5, 10, "layer 7, forward pass 3, exchange of rows: rank 1 did not answer"),
        (
            "SIGSTOP",
            4,
            10,
            "layer 7, forward pass 3, exchange of rows: rank 1 did not answer within the group's timeout",
        ),
        ("raise", 1800, 10, "rank 1 failed in layer 7, forward pass 3: ValueError: an expert of rank 1 is broken"),
    ],
)
def test_processes_end_with_an_error(tmp_path, fault, timeout, limit, told):
    """Real ones, to the end of the interpreter: exit codes and what is printed, all within ``limit`` seconds."""
    size, job = 3, Path(__file__).with_name("job.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(job), str(rank), str(size), str(tmp_path / "rendezvous"), str(timeout), fault],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    try:
        if fault == "SIGSTOP":
            _, status = os.waitpid(processes[1].pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
        else:
            processes[1].wait(60)
        begin = time.monotonic()
        for rank in (0, 2):
            _, errors = processes[rank].communicate(timeout=240)
            assert processes[rank].returncode == 1, errors
            assert "PeerError" in errors and told in errors, errors
        assert time.monotonic() - begin < within(limit)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stderr.close()
