"""Sampling: from logits to the next token.

Shape letters: N samples, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fmoe import random
from fmoe.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: divisor of the logits; 0 always takes the most probable token, the lowest id among equals.
        top_k: draw only from the ``top_k`` most probable tokens; None for all. Fan et al. 2018, arXiv 1805.04833.
        top_p: draw only from the fewest most probable tokens whose probabilities, after temperature and top_k, sum to
            at least this. Nucleus sampling, Holtzman et al. 2020, arXiv 1904.09751.
        seed: seed of the draws; sample i uses (seed, i), independently of the number of samples.

    Raises:
        UserError: a value is out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UserError(f"temperature={self.temperature} must be a finite number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be more than 0 and at most 1")
        if not 0 <= self.seed < 1 << 63:
            raise UserError(f"seed={self.seed} must be between 0 and 2^63 - 1")

    def generators(self, count: int) -> list[torch.Generator]:
        """Return one random generator per sample, on the CPU, so that draws are the same on every device."""
        return [torch.Generator().manual_seed(random.key("sample", self.seed, i)) for i in range(count)]


def distribution(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities of the next token, float64 [N, V]."""
    logits_NV = logits_NV.double()
    if not sampling.temperature:
        return torch.zeros_like(logits_NV).scatter_(1, logits_NV.argmax(1, keepdim=True), 1.0)
    logits_NV = (logits_NV - logits_NV.amax(1, keepdim=True)) / sampling.temperature
    # Stable: among equals the lower id comes first, on every device.
    probs_NV, order_NV = logits_NV.softmax(1).sort(dim=1, descending=True, stable=True)
    if sampling.top_k is not None:
        probs_NV[:, sampling.top_k :] = 0
    if sampling.top_p is not None and sampling.top_p < 1:
        probs_NV = probs_NV / probs_NV.sum(1, keepdim=True)
        before_NV = probs_NV.cumsum(1) - probs_NV
        probs_NV = probs_NV.where(before_NV < sampling.top_p, 0)
    probs_NV = probs_NV / probs_NV.sum(1, keepdim=True)
    return torch.zeros_like(probs_NV).scatter_(1, order_NV, probs_NV)


def draw(probs_NV: Tensor, generators: list[torch.Generator]) -> list[int]:
    """Draw a token from each row with one random number from the row's generator."""
    cumulated_NV = probs_NV.cpu().cumsum(1)
    numbers_N = torch.stack(
        [torch.rand((), dtype=torch.float64, generator=generator, device="cpu") for generator in generators]
    )
    total_N = cumulated_NV[:, -1]
    target_N = torch.minimum(numbers_N * total_N, total_N.nextafter(torch.zeros_like(total_N)))  # < total
    # The first token at which the sum exceeds the target has a positive probability.
    return torch.searchsorted(cumulated_NV, target_N.unsqueeze(1), right=True).squeeze(1).tolist()
