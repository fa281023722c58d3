"""Waits with stand-ins for collectives: on a GPU they end before nccl's watchdog does; errors name the rank."""

import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fmoe.exchange import monitor as monitors
from fmoe.exchange.monitor import PeerError


class Work:
    """A collective that is complete after some seconds, with an error or without."""

    def __init__(self, seconds, error=None):
        self._end, self._error, self.asked = time.monotonic() + seconds, error, []

    def is_completed(self):
        self.asked.append(time.monotonic())
        return self.asked[-1] >= self._end

    def error(self):
        return self._error


@pytest.fixture
def monitor(monkeypatch):
    """Return the monitor of a group of two ranks with a timeout of 0.4 s; rank 1 never reports."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(monitors, "timeout_of", lambda group: 0.4)
    monkeypatch.setattr(monitors, "PATIENCE", 0.05)
    group = type("Group", (SimpleNamespace,), {})()
    made = monitors.GroupMonitor(group)
    made.group = group  # the monitor itself has a weak reference
    return made


def test_a_short_wait(monitor):
    work = Work(0.0, error=RuntimeError("is not asked for"))
    monitor.wait_on_device(work, "exchange of counts", 1)
    assert len(work.asked) == 1


def test_naps_are_short_against_the_wait(monitor, monkeypatch):
    """The GPU has nothing to do while the host sleeps."""
    naps, now = [], [0.0]

    def sleep(seconds):
        naps.append((now[0], seconds))
        now[0] += seconds + 1e-6

    monkeypatch.setattr(monitors.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(monitors.time, "sleep", sleep)
    work = Work(0.03)
    monitor.wait_on_device(work, "exchange of counts", 1)
    assert all(nap <= max(waited / 20, 0.0) and nap <= 1e-3 for waited, nap in naps)
    assert now[0] < 0.03 * 1.06 and len(naps) > 20


def test_it_gives_up_before_the_watchdog(monitor):
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"exchange of counts: rank 1 did not answer within 90% .* 0\.36 s"):
        monitor.wait_on_device(Work(60), "exchange of counts", 3)
    assert time.monotonic() - begin >= 0.36


def test_ranks_that_all_wait_blame_no_connection(monitor):
    monitor._store.set("fmoe/at/1", '[3, "exchange of counts"]')
    with pytest.raises(PeerError, match=r"exchange of counts: every rank answered, .* within 90% .* 0\.36 s"):
        monitor.wait_on_device(Work(60), "exchange of counts", 3)


def test_the_error_of_a_collective_is_raised(monitor, monkeypatch):
    """A collective that failed is complete too; its result must not be read."""
    monkeypatch.setattr(monitors, "_SHORT", 0.0)
    error = RuntimeError("NCCL error: remote process exited or there was a network error\nand more")
    with pytest.raises(PeerError, match=r"rank 1 did not answer \(NCCL error: remote process exited .* error\)$"):
        monitor.wait_on_device(Work(0.01, error), "exchange of counts", 3)


def test_a_rank_that_failed_is_named(monitor):
    monitor._store.set("fmoe/failed", '[2, 1, "rank 1 failed in layer 3: ValueError: no"]')
    with pytest.raises(PeerError, match="rank 1 failed in layer 3: ValueError: no"):
        monitor.wait_on_device(Work(60), "exchange of counts", 3)


@pytest.mark.parametrize(("seconds", "limit"), [(0.4, " within the group's timeout of 0.4 s"), (0.05, "")])
def test_the_timeout_of_the_backend_is_named_as_ours(monitor, monkeypatch, seconds, limit):
    """On a busy machine the backend gives up first."""
    monkeypatch.setattr(monitors, "_GRACE", 0.0)
    work = Work(seconds)

    def wait(timeout=None):
        time.sleep(max(work._end - time.monotonic(), 0))
        raise RuntimeError("Timed out waiting 400ms for send operation to complete")

    work.wait = wait
    with pytest.raises(PeerError, match=rf"exchange of rows: rank 1 did not answer{limit} \(Timed out waiting"):
        monitor.wait(work, "exchange of rows", 3)
