"""Kernels between the two maps of an expert, against torch's activations in float64 and their gradients."""

import random

import geometry
import pytest
import torch
from compare import assert_close
from emulator import InOut, Output
from kernel_list import NAMES
from torch.nn import functional as F

from fmoe.kernels.glu import SwiGLUOAI, gate

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
ACTIVATIONS = [F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.relu, F.silu, SwiGLUOAI()]


class Case:
    """Inner rows of some experts; every combination of activation, gating and dtype comes by."""

    def __init__(self, seed):
        self.draw, self.g = random.Random(seed), torch.Generator().manual_seed(seed)
        self.number, self.gated = seed % 5, bool(seed // 5 % 2) or seed % 5 == 4
        self.dtype = list(NAMES)[seed // 10 % 3]
        self.experts, self.hidden = self.draw.choice([1, 3, 8]), self.draw.choice([1, 5, 16, 33, 64, 200, 520, 1048])
        self.counts = torch.randint(0, self.draw.choice([1, 4, 9]), (self.experts,), generator=self.g)
        self.kept = int(self.counts.sum())
        self.rows = self.kept + self.draw.choice([0, 0, 5])
        self.limit = None if self.rows == self.kept and self.draw.random() < 0.5 else torch.tensor([self.kept])
        self.height = self.hidden * (1 + self.gated)
        self.at_once = 16 // self.dtype.itemsize

    def kernel(self, name):
        return f"fmoe::{name}<{NAMES[self.dtype]}, {self.number}, {str(self.gated).lower()}>"

    def normal(self, *shape, scale=1.0):
        return (torch.randn(*shape, generator=self.g) * scale).to(self.dtype)

    def active(self, hidden):
        act = ACTIVATIONS[self.number]
        return gate(act, hidden) if self.gated else act(hidden)

    def geometry(self, shared_a_warp=0):
        return geometry.rows(self.rows, self.hidden, self.at_once, shared_a_warp)


@pytest.mark.parametrize("seed", range(60))
def test_activate(launch, seed):
    case = Case(seed)
    before = case.normal(case.rows, case.height, scale=4)
    before[case.kept :] = torch.nan
    bias = case.normal(case.experts, case.height) if seed % 3 else None
    end = case.counts.cumsum(0).int() if bias is not None else None
    arguments = [bias, end, case.experts, case.limit, case.rows, case.hidden]
    output = Output((case.rows, case.hidden), case.dtype)
    if bias is None:
        (active,) = launch(case.kernel("activate"), case.geometry(), before, *arguments, None, output)
        hidden = before
    else:
        stored = InOut(before) if seed % 2 else Output(before.shape, case.dtype)  # which may be in the same place
        given = stored if seed % 2 else before
        hidden, active = launch(case.kernel("activate"), case.geometry(), given, *arguments, stored, output)
        expected = before[: case.kept].double() + bias.double().repeat_interleave(case.counts, 0)
        assert_close(hidden[: case.kept], expected, TOLERANCE[case.dtype], "hidden")
    assert_close(active[: case.kept], case.active(hidden[: case.kept].double()), TOLERANCE[case.dtype], "active")
    assert not active[case.kept :].any()


@pytest.mark.parametrize("seed", range(60))
def test_activate_backward(launch, seed):
    case = Case(seed)
    hidden, d_active = case.normal(case.rows, case.height, scale=4), case.normal(case.rows, case.hidden)
    hidden[case.kept :] = d_active[case.kept :] = torch.nan
    order = torch.randperm(case.rows, generator=case.g) if seed % 5 else None
    weight = torch.rand(case.rows, generator=case.g) if seed % 7 else None
    wanted = [seed % 11 != 1, seed % 11 != 2, seed % 11 != 3]
    outputs = [
        Output((case.rows, case.hidden), case.dtype),
        Output((case.rows, case.height), case.dtype),
        Output((case.rows,), torch.float32),
    ]
    found = launch(
        case.kernel("activate_backward"), case.geometry(4), hidden, d_active, weight, order, case.limit, case.rows,
        case.hidden, *[output if wants else None for output, wants in zip(outputs, wanted, strict=True)],
    )  # fmt: skip
    order = torch.arange(case.rows) if order is None else order
    weight = torch.ones(case.rows) if weight is None else weight
    leaf = hidden[: case.kept].double().requires_grad_()
    w_M1 = weight.double()[order[: case.kept]].unsqueeze(1).requires_grad_()
    scaled = case.active(leaf) * w_M1
    scaled.backward(d_active[: case.kept].double())
    expected_weight = torch.zeros(case.rows).double()
    expected_weight[order[: case.kept]] = w_M1.grad.squeeze(1)
    tail = case.rows - case.kept
    expected = [F.pad(scaled, (0, 0, 0, tail)), F.pad(leaf.grad, (0, 0, 0, tail)), expected_weight]
    limits = [TOLERANCE[case.dtype]] * 2 + [1e-5]
    names = ["scaled", "d_hidden", "d_weight"]
    for name, value, limit, wants in zip(names, expected, limits, wanted, strict=True):
        if wants:
            assert_close(found.pop(0), value, limit, name)


@pytest.mark.parametrize("number", range(4))
def test_far_from_zero(launch, number):
    """No overflow on the way: large inputs, infinities, NaN."""
    values = torch.tensor([-torch.inf, -1e30, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e30, torch.inf, torch.nan, 1.0])
    (active,) = launch(
        f"fmoe::activate<float, {number}, false>", geometry.rows(1, 12, 4), values.view(1, -1), None, None, 1, None, 1,
        12, None, Output((1, 12), torch.float32),
    )  # fmt: skip
    expected = ACTIVATIONS[number](values).nan_to_num(nan=7.0, posinf=8.0, neginf=9.0)
    found = active[0].nan_to_num(nan=7.0, posinf=8.0, neginf=9.0)
    finite = values.abs() < 1e29
    torch.testing.assert_close(found[finite], expected[finite], rtol=1e-5, atol=1e-6)
    assert torch.equal(found[values == torch.inf], torch.tensor([8.0])) and found[10] == 7
