"""No silent hang: what goes wrong on one rank is an error on every rank, soon, which names that rank."""

import signal

import faults
import pytest
from forks import values
from rank_pool import DIED

EXCHANGES = ["all_to_all", "padded", "all_gather", "hierarchical"]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_another_width_on_one_rank_is_named(forks, exchange):
    for kind, message, seconds in values(forks.run(2, faults.differing_width, exchange)):
        assert kind == "UserError" and seconds < 5
        assert "rank 1 has d_model=20, the others of moe_group have 16" in message


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_killed_rank_is_named(forks, exchange, victim):
    results = forks.run(4 if exchange == "all_to_all" else 2, faults.signalled, exchange, signal.SIGKILL, 5, victim)
    assert results.pop(victim) == DIED
    for kind, message, seconds in values(results):
        assert kind == "PeerError" and seconds < 10, (kind, message, seconds)
        assert f"rank {victim} did not answer" in message and "the layer, forward pass 3" in message


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_stopped_rank_is_named_after_the_timeout(forks, exchange):
    timeout = 3
    results = forks.run(2, faults.signalled, exchange, signal.SIGSTOP, timeout, 1)
    assert results.pop(1) == DIED
    for kind, message, seconds in values(results):
        assert kind == "PeerError" and seconds < timeout + 2, (kind, message, seconds)
        assert "rank 1 did not answer" in message and "the layer, forward pass 3" in message


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_error_in_one_gate_is_everyones(forks, exchange):
    (first, usable), (second, _) = values(forks.run(2, faults.broken_gate, exchange))
    assert first[0] == "PeerError" and "rank 1 failed" in first[1] and "the gate of rank 1 is broken" in first[1]
    assert second[:2] == ("ValueError", "the gate of rank 1 is broken")
    assert first[2] < 5 and usable in (True, None)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_error_in_an_expert_is_everyones(forks, exchange):
    first, second = values(forks.run(2, faults.broken_expert, exchange))
    assert second[:2] == ("ValueError", "an expert of rank 1 is broken")
    assert first[0] == "PeerError" and "rank 1 failed in the layer, forward pass 1" in first[1]
    assert "an expert of rank 1 is broken" in first[1] and first[2] < 5


def test_an_error_before_a_gates_own_exchange_is_everyones(forks):
    first, second = values(forks.run(2, faults.broken_before_the_gates_exchange))
    assert second[0] == "ValueError"
    assert first[0] == "PeerError" and "rank 1 fails before the gate's own exchange" in first[1] and first[2] < 5


@pytest.mark.parametrize(
    ("exchange", "options"),
    [
        ("all_to_all", {}),
        ("all_to_all", {"chunks": 3}),
        ("all_to_all", {"max_rows": 8, "shadow": 1}),
        ("padded", {"slots": 12}),
        ("all_gather", {}),
        ("hierarchical", {"node_size": 2}),
    ],
    ids=str,
)
def test_no_pattern_of_token_counts_hangs(four_ranks, exchange, options):
    assert max(values(four_ranks.run(faults.random_counts, exchange, options, 50))) < 1e-5
