import gc
import math
import random

import pytest

from bench.frame import Contender, Measurement, geometric_mean_of_ratios, measure


class FakeClock:
    """A clock that moves only when a step says so."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def contender(self, name, seconds, **kwargs):
        """Takes ``seconds()`` a call, or ``seconds`` if it is a number."""

        def step():
            self.calls.append(name)
            self.now += seconds() if callable(seconds) else seconds

        return Contender(name, lambda: step, **kwargs)


def broken_setup():
    raise RuntimeError("no kernel for this device\nand a page of advice")


def test_ratio_is_reference_time_over_contender_time():
    clock = FakeClock()
    contenders = [clock.contender("slow", 2.0), clock.contender("fast", 0.5, work=100)]
    result = measure(contenders, rounds=4, warmup=1, reference="slow", clock=clock)
    assert result.ratio("fast").estimate == pytest.approx(4)
    assert result.ratio("slow").estimate == 1
    assert result.median("slow") == 2
    assert result.throughput("fast") == pytest.approx(200)
    assert result.throughput("slow") is None


def test_every_round_runs_every_contender_once_in_shuffled_order():
    def orders(seed):
        clock = FakeClock()
        contenders = [clock.contender(name, 1.0) for name in "abc"]
        measure(contenders, rounds=20, warmup=2, reference="a", seed=seed, clock=clock)
        assert clock.calls[:6] == list("aabbcc")
        timed = clock.calls[6:]
        return ["".join(timed[i : i + 3]) for i in range(0, len(timed), 3)]

    rounds = orders(seed=0)
    assert len(rounds) == 20
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) == 6, "some order never came"
    assert rounds == orders(seed=0)
    assert rounds != orders(seed=1)


def test_drift_of_the_machine_cancels_in_the_ratio():
    clock = FakeClock()
    contenders = [
        clock.contender("reference", lambda: 2 + clock.now / 100),
        clock.contender("contender", lambda: 1 + clock.now / 200),
    ]
    result = measure(contenders, rounds=20, warmup=0, reference="reference", clock=clock)
    assert max(result.seconds["contender"]) > 1.3
    assert result.ratio("contender").estimate == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("spikes", [0.0, 0.1], ids=["clean", "interrupted"])
def test_interval_covers_the_truth_95_percent_of_the_time(spikes):
    generator = random.Random(1)
    truth, covered, num_measurements = 1.25, 0, 300

    def noisy(seconds):
        interruption = generator.expovariate(1) if generator.random() < spikes else 0.0
        return seconds * math.exp(generator.gauss(0, 0.05) + interruption)

    for seed in range(num_measurements):
        clock = FakeClock()
        contenders = [
            clock.contender("reference", lambda: noisy(truth)),
            clock.contender("contender", lambda: noisy(1.0)),
        ]
        interval = measure(contenders, rounds=12, warmup=0, reference="reference", seed=seed, clock=clock).ratio(
            "contender"
        )
        covered += interval.low <= truth <= interval.high
    # Three standard deviations of 300 draws are 3.8%.
    assert covered / num_measurements == pytest.approx(0.95, abs=0.038)


def test_failing_contenders_are_reported_and_the_others_measured():
    clock = FakeClock()

    def fails_at(call):
        def setup():
            calls = iter(range(1, 100))

            def step():
                clock.now += 1
                if next(calls) == call:
                    raise ValueError("out of range")

            return step

        return setup

    contenders = [
        clock.contender("good", 1.0),
        Contender("setup", broken_setup, work=1),
        Contender("warm", fails_at(1)),
        Contender("timed", fails_at(4)),
    ]
    result = measure(contenders, rounds=5, warmup=2, reference="good", clock=clock)
    assert result.failures == {
        "setup": "setup: RuntimeError: no kernel for this device",
        "warm": "warm-up: ValueError: out of range",
        "timed": "round 2: ValueError: out of range",
    }
    assert result.seconds == {"good": [1.0] * 5}
    assert result.work == {}
    assert result.ratio("timed") is None


def test_min_seconds_repeats_calls_and_reports_one():
    clock = FakeClock()
    contenders = [clock.contender("short", 0.25), clock.contender("long", 3.0)]
    result = measure(contenders, rounds=3, warmup=1, reference="short", min_seconds=1.0, clock=clock)
    assert result.calls == {"short": 4, "long": 1}
    assert result.seconds == {"short": [0.25] * 3, "long": [3.0] * 3}
    assert clock.calls.count("short") == 1 + 3 * 4


def test_sync_comes_before_every_reading_of_the_clock():
    events = []

    def clock():
        events.append("clock")
        return float(len(events))

    measure(
        [Contender("a", lambda: lambda: events.append("step"))],
        rounds=2,
        warmup=0,
        reference="a",
        clock=clock,
        sync=lambda: events.append("sync"),
    )
    assert events == ["sync", "clock", "step", "sync", "clock"] * 2


def test_garbage_collector_is_off_while_timing_and_back_afterwards():
    clock = FakeClock()
    seen = []

    def seconds():
        seen.append(gc.isenabled())
        return 1.0

    assert gc.isenabled()
    measure([clock.contender("a", seconds)], rounds=2, warmup=1, reference="a", clock=clock)
    assert seen == [False] * 3
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        measure([clock.contender("a", lambda: interrupt())], rounds=2, warmup=0, reference="a", clock=clock)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def interrupt():
    raise KeyboardInterrupt


def test_geometric_mean_over_rows():
    def row(reference, contender):
        return Measurement(
            label="",
            reference="r",
            rounds=len(reference),
            warmup=0,
            seed=0,
            min_seconds=None,
            unit="tokens",
            seconds={"r": reference, "c": contender},
            calls={"r": 1, "c": 1},
        )

    rows = [row([2.0, 2.2, 1.9], [1.0, 1.0, 1.0]), row([8.0, 8.1, 8.4], [1.0, 1.0, 1.0])]
    mean = geometric_mean_of_ratios(rows, "c")
    ratios = [r.ratio("c").estimate for r in rows]
    assert mean.estimate == pytest.approx(math.sqrt(ratios[0] * ratios[1]))
    assert mean.low < mean.estimate < mean.high
    assert geometric_mean_of_ratios(rows[:1], "c") == rows[0].ratio("c")
    assert geometric_mean_of_ratios(rows, "gone") is None
    assert geometric_mean_of_ratios([], "c") is None
