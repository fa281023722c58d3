"""Backward passes in two parts: the same gradients, each weight's computed once, hooks in the second part."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fmoe import MoE
from fmoe.runtime.deferral import backward_inputs, deferrable


class Linear(torch.autograd.Function):
    calls: ClassVar[list[tuple[bool, ...]]] = []

    @staticmethod
    def forward(ctx: Any, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.is_deferrable = True
        return x @ weight

    @staticmethod
    @deferrable
    def backward(ctx: Any, grad):
        Linear.calls.append(tuple(ctx.needs_input_grad))
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return grad @ weight.t() if needs_x else None, x.t() @ grad if needs_weight else None


def gradients(tensors):
    return [None if t.grad is None else t.grad.clone() for t in tensors]


def test_weights_of_deferrable_functions_come_later_and_once():
    torch.manual_seed(0)
    x, once, twice, mixed, scale = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(5))
    hooks = []
    once.register_post_accumulate_grad_hook(lambda _: hooks.append("once"))

    def run():
        y = Linear.apply(Linear.apply(x * scale, once), twice)
        return (Linear.apply(Linear.apply(y.tanh(), twice), mixed) * mixed).sum()

    tensors = (x, once, twice, mixed, scale)
    run().backward()
    expected = gradients(tensors)
    for t in tensors:
        t.grad = None
    hooks.clear()
    Linear.calls.clear()
    remaining = backward_inputs(run(), None)
    assert remaining.weights == {once, twice}, "a weight that another operation uses too is not deferred"
    assert once.grad is None
    assert twice.grad is None
    for found, wanted in zip(gradients((x, mixed, scale)), [expected[n] for n in (0, 3, 4)], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert not hooks
    assert sum(weight for _, weight in Linear.calls) == 1
    remaining.run()
    for found, wanted in zip(gradients(tensors), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert hooks == ["once"]
    assert sum(x for x, _ in Linear.calls) == 4
    assert sum(weight for _, weight in Linear.calls) == 4
    Linear.calls.clear()
    run().backward()
    assert Linear.calls == [(True, True)] * 4


def test_weights_of_products_with_constants_get_their_gradients():
    torch.manual_seed(0)
    x, scale, later, first, second = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(5))

    def run():
        constant = Linear.apply(Linear.apply(torch.ones_like(x), first).tanh(), second)
        return (Linear.apply(x * scale, later) + constant).sin().sum()

    tensors = (x, scale, later, first, second)
    run().backward()
    expected = gradients(tensors)
    for t in tensors:
        t.grad = None
    remaining = backward_inputs(run(), None)
    assert remaining.weights == {later}
    remaining.run()
    for found, wanted in zip(gradients(tensors), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("activation", [F.silu, torch.tanh], ids=["one operation", "two maps"])
def test_experts_defer_their_weights(backend, activation):
    expert_options = {"activation": activation, "bias": True, "backend": backend}
    layer = MoE.build(num_experts=4, d_model=8, d_hidden=16, top_k=2, expert_options=expert_options)
    x = torch.randn(12, 8, requires_grad=True)
    output = nn.Linear(8, 8)

    def run():
        return output(layer(x)).square().sum()

    tensors = [x, *layer.parameters(), *output.parameters()]
    run().backward()
    expected = gradients(tensors)
    for t in tensors:
        t.grad = None
    remaining = backward_inputs(run(), None)
    deferred = {name for name, p in layer.named_parameters() if p.grad is None}
    assert deferred == {name for name, _ in layer.named_parameters() if ".weight_" in name or ".bias_" in name}
    torch.testing.assert_close(x.grad, expected[0])
    remaining.run()
    for found, wanted in zip(gradients(tensors), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
