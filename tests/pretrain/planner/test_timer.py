"""Times while the machine is idle, with a machine whose speed the test sets."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forks import values

from pretrain.planner import timer as module
from pretrain.planner.timer import Timer, idle_seconds, rounded


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def results(speeds, patience, repeats=3):
    """The numbers of the measurements that a timer keeps while tiny operations take these seconds in turn."""
    timer = Timer(1.0, torch.device("cpu"), repeats=repeats, min_seconds=0.0, patience=patience)
    numbers = iter(range(100))
    with mock.patch.object(module, "_tiny_operations", side_effect=[*speeds, *[1.0] * 100]):
        kept = timer.while_idle(lambda: next(numbers))
    return kept, timer.patience


@pytest.mark.parametrize(
    ("speeds", "kept"),
    [
        ([], [0, 1, 2]),
        ([1.19] * 4, [0, 1, 2]),  # a little slower is not busy
        ([2.0], [1, 2, 3]),  # busy before the first
        ([1.0, 2.0], [2, 3, 4]),  # busy between the first and the second, which may have been slow
        ([1.0, 1.0, 1.0, 2.0], [0, 1, 4]),
    ],
)
def test_measurements_on_a_busy_machine_are_dropped(alone, speeds, kept):
    found, patience = results(speeds, patience=60.0)
    assert found == kept
    assert (patience == 60.0) == (kept == [0, 1, 2])


def test_patience_ends(alone):
    kept, patience = results([2.0] * 50, patience=1e-9)
    assert kept == [1, 2, 3]  # the first one spent it
    assert patience < 0
    assert results([2.0] * 50, patience=0.0)[0] == [0, 1, 2]


def kept_together():
    """What each of two ranks keeps whose machines have other speeds, and of which one is busy at first."""
    rank = dist.get_rank()
    timer = Timer(1.0 + rank, torch.device("cpu"), repeats=3, min_seconds=0.0, patience=60.0)
    numbers = iter(range(100))

    def measure():
        dist.barrier()
        return next(numbers)

    with mock.patch.object(module, "_tiny_operations", side_effect=[2.0, 2.0, *[1.0] * 100]):
        return timer.while_idle(measure)


def test_all_ranks_drop_the_same_measurements(forks):
    assert values(forks.run(2, kept_together)) == [[2, 3, 4]] * 2


def test_a_call_is_one_of_many(alone):
    timer = Timer(1e9, torch.device("cpu"), repeats=5, min_seconds=0.02, patience=0.0)
    x = torch.ones(1, dtype=torch.float32, device="cpu")
    seconds, spread = timer(lambda: x.add_(1))
    calls = x.item() - 1
    assert calls > 5 * 10  # each of five measurements repeats a call of microseconds
    assert 0 < seconds < 0.02
    assert spread >= 0


def test_idle_seconds_are_those_of_the_fastest_tries():
    with mock.patch.object(module, "_tiny_operations", side_effect=[3.0] * 5 + [1.0] + [2.0] * 1_000_000):
        assert 1.0 <= idle_seconds(0.01) <= 2.0


def test_rounded():
    assert [rounded(figure) for figure in (123456.0, 0.00012345678, 0.0)] == [123500.0, 0.0001235, 0.0]
