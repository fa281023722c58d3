"""The kernels of LAMB, as fmoe.optim.Lamb uses them, against its steps in plain torch."""

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from compare import assert_close
from emulator import on_cpu

from fmoe.kernels import fused_lamb
from fmoe.optim import Lamb
from fmoe.optim.layout import Blocks, Layout

FLOAT = torch.float32
HALF = torch.float16
BFLOAT = torch.bfloat16
LIMITS = {FLOAT: 1e-5, HALF: 1e-3, BFLOAT: 8e-3}
GUARD = 8  # elements before and after each parameter, which no step may write


def guarded(tensor, offset=0):
    """Return a leaf like the tensor, and the memory around it."""
    memory = torch.full((tensor.numel() + 2 * GUARD,), 7.0, dtype=tensor.dtype)
    begin = GUARD - offset
    memory[begin : begin + tensor.numel()] = tensor.flatten()
    return memory[begin : begin + tensor.numel()].view(tensor.shape).requires_grad_(), memory


def is_intact(memory, offset=0):
    return bool((memory[: GUARD - offset] == 7).all() and (memory[len(memory) - GUARD - offset :] == 7).all())


def optimizers(seed):
    """Return two that are alike, with parameters of several dtypes in two groups, some of them flat shards."""
    draw = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    stacked = [torch.randn(draw.randint(1, 5), 12, draw.randint(1, 30), generator=g) for _ in range(3)]
    stacked[1][0] = 0  # an expert without a norm: its ratio is 1
    others = [torch.randn(shape, generator=g) for shape in ((40, 33), (70,), (300, 300), (1, 1))]
    dtypes = [FLOAT, FLOAT, BFLOAT, BFLOAT, FLOAT, HALF, FLOAT]
    tensors = [t.to(dtype) for t, dtype in zip(stacked + others, dtypes, strict=True)]
    start = draw.randint(0, 12)
    max_trust = draw.choice([None, 0.5])
    pair = []
    memories = []
    for _ in range(2):
        weights = []
        for tensor in tensors:
            weight, memory = guarded(tensor, seed % 2)
            weights.append(weight)
            memories.append(memory)
        for weight in weights[:3]:
            weight.is_stacked = True
        weights[5 if seed % 2 else 3].grad_dtype = FLOAT
        parts = list(weights)
        where = {w: (number, 0) for number, w in enumerate(weights)}
        if seed % 2:  # what a distributed optimizer has of the first: not whole blocks
            parts[0] = tensors[0].flatten()[start:].clone().requires_grad_()
            where = {parts[0]: (0, start)} | dict(list(where.items())[1:])
        groups = [{"params": parts[:2] + parts[4:]}, {"params": parts[2:4], "lr": 0.1, "max_trust": 2.0}]
        optimizer = Lamb(groups, lr=0.02, weight_decay=0.1, max_trust=max_trust)
        optimizer.set_layout(Layout([Blocks.of(w) for w in weights], where))
        pair.append((parts, optimizer))
    return g, pair, memories


@pytest.mark.by_default(*range(4))
@pytest.mark.parametrize("seed", range(12))
def test_steps(kernels, seed, monkeypatch):
    """Five steps with the kernels and without; some tensors have no gradient at times."""
    monkeypatch.setattr(fused_lamb, "CHUNK", (65536, 1000, 4096)[seed % 3])
    g, ((ours, fused), (theirs, plain)), memories = optimizers(seed)
    for number in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            dtype = mine.grad_dtype or mine.dtype
            gradient = torch.randn(mine.shape, generator=g).to(dtype)
            is_left_out = torch.rand((), generator=g) < 0.2
            mine.grad = None if is_left_out else gradient
            other.grad = None if is_left_out else gradient.clone()
        if number == 3:  # a schedule, and a state that was loaded
            for optimizer in (fused, plain):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                optimizer.param_groups[0]["lr"] *= 0.5
        for optimizer, where in ((fused, on_cpu(kernels, seed, seed % 3 == 2)), (plain, nullcontext())):
            with where as launcher:
                optimizer.step()
            if launcher is not None and any(p.grad is not None for p in ours):
                assert launcher.names() >= {"lamb_measure", "lamb_update"}
        for mine, other in zip(fused.trust_ratios(), plain.trust_ratios(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-6, equal_nan=True)
        for mine, other in zip(ours, theirs, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if name in plain.state[other]:
                    assert_close(fused.state[mine][name], plain.state[other][name], 1e-5, name)
            assert_close(mine, other, LIMITS[mine.dtype], "weight")
            with torch.no_grad():  # 16-bit rounding may differ in a last place
                mine.copy_(other)
    assert all(is_intact(memory, seed % 2) for memory in memories)


def step(kernels, tensor, gradient, offset=0):
    """Return a stack of experts after one step by the kernels, and the trust ratios."""
    weight, _memory = guarded(tensor, offset)
    weight.is_stacked = True
    weight.grad = gradient.clone()
    optimizer = Lamb([weight], lr=0.01, weight_decay=0.1)
    with on_cpu(kernels):
        optimizer.step()
    return weight.detach(), torch.cat(optimizer.trust_ratios())


def test_squares_do_not_overflow(kernels):
    """In float32 the square of 1e25 is infinite."""
    stack = torch.randn(3, 12, 7, generator=torch.Generator().manual_seed(0))
    assert step(kernels, 1e25 * stack, stack)[1].isfinite().all()


def test_the_same_bits_wherever_tensors_lie(kernels):
    """At 16 bytes or not: an expert of a stack is stepped as one that lies alone."""
    g = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 12, 30, generator=g)
    gradient = torch.randn(3, 12, 30, generator=g)
    aligned = step(kernels, stack, gradient)
    shifted = step(kernels, stack, gradient, offset=1)
    assert all(torch.equal(a, b) for a, b in zip(aligned, shifted, strict=True))


def test_what_the_kernels_do_not_take(kernels):
    """float64, and tensors that are no plain rows."""
    for weight in (torch.randn(4, 4, dtype=torch.float64), torch.randn(6, 4).t()):
        weight.requires_grad_().grad = torch.ones_like(weight)
        with on_cpu(kernels) as launcher:
            Lamb([weight]).step()
        assert not launcher.launched
