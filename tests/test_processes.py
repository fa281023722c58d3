"""The processes that tests share: a call that its test gave up leaves no result to the next."""

import time

import pytest
from forks import ForkServer, values


class Interrupted(Exception):
    """Stands for the exception by which pytest-timeout ends a test."""


def slept(seconds, value):
    time.sleep(seconds)
    return value


def interrupt(monkeypatch, connection_of):
    """The next poll of the connection raises."""
    connection = connection_of
    poll = type(connection).poll

    def raising(self, timeout=0.0):
        monkeypatch.setattr(type(connection), "poll", poll)
        raise Interrupted

    monkeypatch.setattr(type(connection), "poll", raising)


def test_the_fork_server_after_an_interrupted_call(forks, monkeypatch):
    assert isinstance(forks, ForkServer)
    interrupt(monkeypatch, forks._pipe)
    with pytest.raises(Interrupted):
        forks.run(2, slept, 0.3, "late")
    assert values(forks.run(1, slept, 0.0, "own")) == ["own"]


def test_a_pool_after_an_interrupted_call(two_ranks, monkeypatch):
    interrupt(monkeypatch, two_ranks._pipes[0])
    with pytest.raises(Interrupted):
        two_ranks.run(slept, 0.3, "late")
    assert values(two_ranks.run(slept, 0.0, "own")) == ["own", "own"]
