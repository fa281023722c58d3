"""Memory that is used again is never memory in use, and nobody's numbers change by it."""

import pytest
import torch

import fmoe
from fmoe.ops import scratch


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(scratch, "_SMALLEST", 1)
    monkeypatch.setattr(scratch, "_blocks", {})


def test_memory_comes_back_once_nobody_has_it(small_blocks):
    like = torch.zeros(1)
    first = scratch.empty((4, 8), like)
    address = first.data_ptr()
    view = first[1:]
    del first
    assert scratch.empty((4, 8), like).untyped_storage().data_ptr() != address
    del view
    assert scratch.empty((4, 7), like).data_ptr() == address


def test_what_autograd_keeps_is_in_use(small_blocks):
    weight = torch.ones(4, 8, requires_grad=True)
    rows = scratch.empty((4, 8), weight.detach()).fill_(3)
    out = (rows * weight).sum()
    del rows
    for _ in range(4):
        scratch.empty((4, 8), weight.detach()).fill_(7)
    out.backward()
    assert weight.grad.eq(3).all()


def test_blocks_of_sizes_that_no_longer_come_go_back(small_blocks):
    like = torch.zeros(1)
    for size in (1000, *[10] * (scratch._PATIENCE + 1), 100_000):
        scratch.empty((size,), like)
    assert sorted(block.nbytes for block in scratch._blocks) == [45, 450_000]


@pytest.mark.parametrize("capacity", [None, 0.5])
def test_a_layer_computes_the_same(monkeypatch, capacity):
    def train():
        torch.manual_seed(0)
        layer = fmoe.FMoE(
            d_model=16,
            num_experts=4,
            d_hidden=8,
            top_k=2,
            gate_options={"capacity_factor": capacity},
            backend="torch",
            seed=1,
        )
        x = torch.randn(32, 16, requires_grad=True)
        for _ in range(3):
            layer(x).square().sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    expected = train()
    monkeypatch.setattr(scratch, "_SMALLEST", 1)
    monkeypatch.setattr(scratch, "_blocks", {})
    assert all(torch.equal(a, b) for a, b in zip(train(), expected, strict=True))
    assert scratch._blocks
