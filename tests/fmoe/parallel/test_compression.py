"""Compressors of gradients against their papers' formulas."""

import math

import pytest
import torch
import torch.distributed as dist
from forks import values
from torch import nn

from fmoe import UserError
from fmoe.parallel.compression import DGC, OneBit, PowerSGD


class OneBucket:
    """A bucket of gradients that are views of a buffer with padding."""

    def __init__(self, parameters, padding=3):
        self._parameters = parameters
        self._buffer = torch.zeros(sum(p.numel() for p in parameters) + padding)

    def buffer(self):
        return self._buffer

    def gradients(self):
        found = []
        begin = 0
        for parameter in self._parameters:
            found.append(self._buffer[begin : begin + parameter.numel()].view(parameter.shape))
            begin += parameter.numel()
        return found

    def parameters(self):
        return self._parameters

    def index(self):
        return 0

    def is_last(self):
        return True

    def fill(self, gradients):
        for target, gradient in zip(self.gradients(), gradients, strict=True):
            target.copy_(gradient)
        return self


def parameters():
    return [nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(7))]


def gradients_of(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(40, 30, generator=generator), torch.randn(7, generator=generator)]


def by_dgc(momentum, clip):
    """Largest difference between the compressor's means and those of the algorithm, over seven steps."""
    compressor = DGC(dist.group.WORLD, density=0.1, momentum=momentum, clip=clip, min_numel=8)
    mine = parameters()
    bucket = OneBucket(mine)
    u = [torch.zeros(1200) for _ in range(2)]
    v = [torch.zeros(1200) for _ in range(2)]
    worst = 0.0
    for step in range(7):
        compressor(bucket.fill(gradients_of(step, dist.get_rank())))
        mean = torch.zeros(1200)
        small = torch.zeros(7)
        for rank in range(2):
            gradient, vector = gradients_of(step, rank)
            norm = math.sqrt(float(gradient.square().sum() + vector.square().sum()))
            factor = 1.0 if clip is None else min(1.0, clip / math.sqrt(2) / norm)
            u[rank] = momentum * u[rank] + factor * gradient.flatten()
            v[rank] = v[rank] + u[rank]
            largest = sorted(range(1200), key=lambda n, rank=rank: -abs(v[rank][n].item()))[:120]
            mean[largest] += v[rank][largest] / 2
            u[rank][largest] = v[rank][largest] = 0.0
            small += factor * vector / 2
        found = bucket.gradients()
        worst = max(worst, float((found[0].flatten() - mean).abs().max()), float((found[1] - small).abs().max()))
    return worst


@pytest.mark.parametrize(("momentum", "clip"), [(0.0, None), (0.5, 20.0)])
def test_dgc_is_the_algorithm_of_its_paper(forks, momentum, clip):
    assert max(values(forks.run(2, by_dgc, momentum, clip))) < 1e-5


def by_one_bit():
    """Relative errors of the momentum that gradients lead to, averaged over 75 and 300 steps, and its last value."""
    compressor = OneBit(dist.group.WORLD, warmup=2, beta1=0.8)
    bucket = OneBucket(parameters())
    momentum = torch.zeros(1200)  # an optimizer's
    exact = torch.zeros(1200)
    sums = torch.zeros(2, 1200)
    errors = []
    for step in range(302):
        constant = [torch.linspace(-1, 1, 1200).view(40, 30), torch.ones(7)]
        noisy = [a + 0.1 * b for a, b in zip(constant, gradients_of(step, dist.get_rank()), strict=True)]
        compressor(bucket.fill(noisy))
        both = sum(0.5 * (constant[0] + 0.1 * gradients_of(step, rank)[0]) for rank in range(2)).flatten()
        momentum = 0.8 * momentum + 0.2 * bucket.gradients()[0].flatten()
        exact = 0.8 * exact + 0.2 * both
        if step < 2:
            torch.testing.assert_close(momentum, exact)
            continue
        block = momentum[:1024].abs()
        assert block.max() - block.min() < 1e-5, "a block has one magnitude in a step"
        sums += torch.stack([momentum, exact])
        if step in (76, 301):
            errors.append(float((sums[0] - sums[1]).norm() / sums[1].norm()))
    return errors, momentum


def test_one_bit_momenta_are_right_on_average(forks):
    """Error feedback: what is rounded away in a step comes in later ones. All ranks have the same."""
    (errors, momentum), (_, other) = values(forks.run(2, by_one_bit))
    assert errors[1] < 0.5 * errors[0] and errors[1] < 0.12
    assert torch.equal(momentum, other)


def by_power():
    """Relative error of the mean that 25 steps of equal gradients lead to."""
    compressor = PowerSGD(dist.group.WORLD, rank=2, warmup=2)
    bucket = OneBucket(parameters())
    total = torch.zeros(1200)
    for _ in range(25):
        compressor(bucket.fill(gradients_of(0, dist.get_rank())))
        total += bucket.gradients()[0].flatten()
    mean = (gradients_of(0, 0)[0] + gradients_of(0, 1)[0]).flatten() / 2
    return float((total / 25 - mean).norm() / mean.norm()), float(compressor.step)


def test_power_sgd_is_right_on_average(forks):
    for error, steps in values(forks.run(2, by_power)):
        assert error < 0.6 and steps == 25


def of_nothing(dtype):
    """Means of gradients that are zero, twice, and of others in between."""
    found = []
    for make in (DGC, OneBit, PowerSGD):
        compressor = make(dist.group.WORLD, warmup=2)
        bucket = OneBucket(parameters())
        bucket._buffer = bucket._buffer.to(dtype)
        for step in range(6):
            gradients = gradients_of(step, dist.get_rank()) if step == 4 else [torch.zeros(40, 30), torch.zeros(7)]
            compressor(bucket.fill(gradients))
            found.append(bool(bucket.buffer().isfinite().all()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_zero_are_no_nan(forks, dtype):
    """As those of an expert without tokens; and buckets of 16 bits are taken."""
    for found in values(forks.run(2, of_nothing, dtype)):
        assert all(found)


def test_what_a_compressor_does_not_know_is_an_error():
    with pytest.raises(TypeError, match="ranks"):
        PowerSGD(None, ranks=2)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (DGC, {"density": 0.0}),
        (DGC, {"density": 1.5}),
        (DGC, {"momentum": 1.0}),
        (DGC, {"warmup": -1}),
        (DGC, {"clip": 0.0}),
        (OneBit, {"warmup": 1}),
        (OneBit, {"beta1": 1.0}),
        (PowerSGD, {"rank": 0}),
        (PowerSGD, {"warmup": 0}),
    ],
)
def test_wrong_options_are_one_line_with_key_and_value(make, options):
    ((key, value),) = options.items()
    with pytest.raises(UserError, match=f"{key}={value} ") as refused:
        make(None, **options)
    assert "\n" not in str(refused.value)
