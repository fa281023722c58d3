"""Figures of operations within steps. No test looks at how long anything took."""

from dataclasses import replace

import pytest
import torch

from pretrain.planner.cluster import load_cluster
from pretrain.planner.in_step import _Figures
from pretrain.planner.prices import steps_seconds
from pretrain.planner.trace import Operation

H100 = load_cluster("h100-1")
ADD = Operation("aten.add.Tensor", ((10,), (10,)), torch.float32, 0, 120)
PRODUCT = Operation("aten.mm.default", ((8, 8), (8, 8)), torch.bfloat16, 2 * 8**3, 3 * 8 * 8 * 2, is_backward=True)


def figures(*calls, forward=0.0, backward=0.0):
    found = _Figures()
    phase_seconds = {"forward": forward, "experts": 0.0, "other": 0.0, "backward": backward}
    found.add(H100, calls, phase_seconds)
    return found


def test_prices_of_the_same_step_are_what_was_measured():
    host = 0.25
    host_backward = 0.125
    found = figures((ADD, 3.0), (PRODUCT, 5.0), forward=3.0 + host, backward=5.0 + host_backward)
    assert found.hosts == {False: [host], True: [host_backward]}
    device = replace(
        H100.device,
        host=host,
        host_backward=host_backward,
        operations=found.points("operations"),
        in_step=found.points("in_step"),
    )
    seconds = steps_seconds(replace(H100, device=device), {ADD: 1, PRODUCT: 1})
    assert seconds == {"memory": 3.0, "gemm": pytest.approx(5.0, rel=1e-3), "host": host + host_backward}


def test_calls_of_about_the_same_size_are_one_point():
    larger = replace(ADD, moved=1000)
    found = figures((ADD, 3.0), (replace(ADD, moved=100), 1.0), (larger, 9.0), (PRODUCT, 5.0), forward=13.0)
    (small, large) = found.points("operations")["aten.add.Tensor"]["fp32"]
    assert small[:2] == (110.0, 2.0)
    assert small[2] > 0
    assert large == (1000.0, 9.0, 0.0)


def test_a_host_that_measurements_leave_no_time_takes_none():
    assert figures((ADD, 3.0), (PRODUCT, 5.0), forward=1.0, backward=6.0).hosts == {False: [0.0], True: [1.0]}


def test_an_operation_without_bytes_has_no_price():
    found = figures((replace(ADD, moved=0), 3.0), (PRODUCT, 5.0), forward=4.0, backward=5.0)
    assert not found.points("operations")
    assert found.hosts[False] == [4.0]
