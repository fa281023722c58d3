"""Kernels between the two maps of an expert, against torch's activations in float64 and their gradients."""

import random

import pytest
import torch
from compare import assert_close
from torch.nn import functional as F

from fmoe.kernels.backends import ACTIVATIONS
from fmoe.kernels.cuda import calls
from fmoe.kernels.cuda.instances import DTYPES
from fmoe.kernels.glu import gate

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Case:
    """Inner rows of some experts; every combination of activation, gating and dtype occurs."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.g = torch.Generator().manual_seed(seed)
        self.number = seed % 5
        self.gated = bool(seed // 5 % 2) or seed % 5 == 4
        self.dtype = list(DTYPES)[seed // 10 % 3]
        self.experts = self.draw.choice([1, 3, 8])
        self.hidden = self.draw.choice([1, 5, 16, 33, 64, 200, 520, 1048])
        self.counts = torch.randint(0, self.draw.choice([1, 4, 9]), (self.experts,), generator=self.g)
        self.kept = int(self.counts.sum())
        self.rows = self.kept + self.draw.choice([0, 0, 5])
        self.limit = None if self.rows == self.kept and self.draw.random() < 0.5 else torch.tensor([self.kept])
        self.height = self.hidden * (1 + self.gated)

    def normal(self, *shape, scale=1.0):
        return (torch.randn(*shape, generator=self.g) * scale).to(self.dtype)

    def active(self, hidden):
        act = ACTIVATIONS[self.number]
        return gate(act, hidden) if self.gated else act(hidden)


@pytest.mark.by_default(*range(0, 60, 2))
@pytest.mark.parametrize("seed", range(60))
def test_activate(launch, seed):
    case = Case(seed)
    hidden = case.normal(case.rows, case.height, scale=4)
    hidden[case.kept :] = torch.nan
    expected = hidden[: case.kept].double()
    bias = None
    if seed % 3:
        bias = case.normal(case.experts, case.height)
        expected = expected + bias.double().repeat_interleave(case.counts, 0)
    end = case.counts.cumsum(0).int()
    active = launch(calls.activate, hidden, bias, end, case.limit, case.number, case.gated)
    assert_close(hidden[: case.kept], expected, TOLERANCE[case.dtype], "hidden")  # the bias is added in place
    assert_close(active[: case.kept], case.active(hidden[: case.kept].double()), TOLERANCE[case.dtype], "active")
    assert not active[case.kept :].any()


@pytest.mark.by_default(*range(1, 60, 2))
@pytest.mark.parametrize("seed", range(60))
def test_activate_backward(launch, seed):
    case = Case(seed)
    hidden = case.normal(case.rows, case.height, scale=4)
    d_active = case.normal(case.rows, case.hidden)
    hidden[case.kept :] = d_active[case.kept :] = torch.nan
    perm = torch.randperm(case.rows, generator=case.g) if seed % 5 else None
    weight = torch.rand(case.rows, generator=case.g) if seed % 7 else None
    needs = {"needs_active": seed % 11 != 1, "needs_hidden": seed % 11 != 2, "needs_weight": seed % 11 != 3}
    options = (case.limit, case.number, case.gated)
    found = launch(calls.activate_backward, hidden, d_active, weight, perm, *options, **needs)
    needs["needs_weight"] &= weight is not None
    kept_M = torch.arange(case.kept) if perm is None else perm[: case.kept]
    leaf = hidden[: case.kept].double().requires_grad_()
    weight_N = torch.ones(case.rows) if weight is None else weight
    w_M1 = weight_N.double()[kept_M].unsqueeze(1).requires_grad_()
    scaled = case.active(leaf) * w_M1
    scaled.backward(d_active[: case.kept].double())
    d_weight = torch.zeros(case.rows).double().index_put((kept_M,), w_M1.grad.squeeze(1))
    tail = (0, 0, 0, case.rows - case.kept)
    expected = (F.pad(scaled, tail), F.pad(leaf.grad, tail), d_weight)
    for (name, is_needed), gradient, right in zip(needs.items(), found, expected, strict=True):
        assert is_needed == (gradient is not None)
        if is_needed:
            assert_close(gradient, right, TOLERANCE[case.dtype] if gradient.dim() == 2 else 1e-5, name)


@pytest.mark.parametrize("number", range(4))
def test_far_from_zero(launch, number):
    """No overflow on the way: large inputs, infinities, NaN."""
    values = torch.tensor([-torch.inf, -1e30, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e30, torch.inf, torch.nan, 1.0])
    end = torch.ones(1, dtype=torch.int32)
    active = launch(calls.activate, values.view(1, -1).clone(), None, end, None, number, False)[0]
    finite = values.abs() < 1e29
    torch.testing.assert_close(active[finite], ACTIVATIONS[number](values)[finite], rtol=1e-5, atol=1e-6)
    assert active[9] == torch.inf and active[10].isnan()
