"""Time by phase: each moment counts once, waits apart from work, nothing without a measurement."""

import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from forks import values

from fmoe.runtime import phases

CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch):
    """A clock that the test sets: ``seconds[0]``."""
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])
    yield now
    phases.stop()


def test_each_moment_belongs_to_one_phase(seconds):
    module = types.ModuleType("module")

    def backward():
        seconds[0] += 1
        for inner, length in (("experts", 2), ("exchange", 4)):
            with phases.phase(inner):  # recomputation, whose experts belong to the backward pass
                seconds[0] += length

    module.backward = backward
    phases.start(CPU, (module, "backward"))
    seconds[0] += 0.5
    with phases.phase("forward"):
        seconds[0] += 8
        with phases.phase("experts"):
            seconds[0] += 16
        with phases.phase("exchange"), phases.phase("collectives"):
            seconds[0] += 32
    module.backward()
    with pytest.raises(ZeroDivisionError), phases.phase("optimizer"):
        seconds[0] += 64
        raise ZeroDivisionError
    times = phases.stop()
    assert module.backward is backward
    expected = {
        "other": 500,
        "forward": 8000,
        "experts": 16000,
        "exchange": 36000,
        "backward": 3000,
        "optimizer": 64000,
    }
    assert times == {"reduction": 0, "collectives": 0} | expected
    assert sum(times.values()) == 1e3 * seconds[0]


def test_another_thread_is_not_counted(seconds):
    def work():
        with phases.phase("exchange"):
            seconds[0] += 1

    phases.start(CPU)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert phases.stop()["exchange"] == 0


def test_nothing_is_measured_before_and_after(seconds):
    wait = vars(dist.Work)["wait"]
    phases.start(CPU)
    assert vars(dist.Work)["wait"] is not wait
    phases.stop()
    assert vars(dist.Work)["wait"] is wait
    with phases.phase("forward"):
        seconds[0] += 1
    assert set(phases.stop().values()) == {0.0}


def test_a_phase_that_outlives_the_measurement_begins_no_other(seconds):
    phases.start(CPU)
    with phases.phase("forward"):
        phases.stop()
    seconds[0] += 1
    assert set(phases.stop().values()) == {0.0}


def test_compiled_code_is_the_same_in_a_measurement(seconds):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def double(x):
        with phases.phase("experts"):
            return 2 * x

    one = torch.ones((), dtype=torch.float32, device=CPU)
    for _ in range(2):
        assert double(one) == 2
        phases.start(CPU)
        assert double(one) == 2
        phases.stop()
    assert len(graphs) == 1


def of_rank():
    x = torch.ones(4, dtype=torch.float32, device=CPU)
    dist.all_reduce(x)
    phases.start(CPU)
    if dist.get_rank() == 1:
        time.sleep(0.3)
    dist.all_reduce(x)
    handle = dist.all_reduce(x, async_op=True)
    if dist.get_rank() == 1:
        time.sleep(0.3)
    handle.wait()
    return phases.stop()


def test_waiting_for_a_slow_rank_is_not_work(forks):
    fast, slow = values(forks.run(2, of_rank))
    assert fast["collectives"] > 250 and slow["other"] >= 600 > slow["collectives"] + fast["other"]
