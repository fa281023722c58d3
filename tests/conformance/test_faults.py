"""No silent hang: a failure on one rank soon raises an error on every rank, which names that rank."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faults
import pytest
from forks import values
from patience import within
from rank_pool import DIED

EXCHANGES = ["all_to_all", "padded", "all_gather", "hierarchical", "deepep", "symmetric"]


@pytest.mark.by_default("hierarchical-kill-1")
@pytest.mark.parametrize(
    ("fault", "victim"),
    [(signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGSTOP, 1), ("raise", 1)],
    ids=["kill-0", "kill-1", "stop-1", "raise-1"],
)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_that_fails_is_named(forks, exchange, fault, victim):
    timeout = {signal.SIGSTOP: 2, signal.SIGKILL: 5, "raise": 30}[fault]
    size = 4 if exchange == "all_to_all" and fault == signal.SIGKILL else 2
    results = forks.run(size, faults.struck, exchange, fault, timeout, victim)
    failed = results.pop(victim)
    expected = f"rank {victim} did not answer"
    if fault == "raise":
        kind, expected, _ = failed
        assert (kind, expected) == ("ValueError", f"an expert of rank {victim} is broken")
    else:
        assert failed == DIED
    for kind, message, seconds in values(results):
        assert kind == "PeerError" and seconds < within(10), (kind, message, seconds)
        assert expected in message and "the layer, forward pass 3" in message


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
