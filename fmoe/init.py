"""Initialisers of one matrix."""

import torch
from torch import Tensor, nn


def truncated_normal_(weight: Tensor, scale: float = 0.1) -> Tensor:
    """Fills a [out, in] matrix from a normal of standard deviation ``sqrt(scale / in)``, cut at two of them.

    The Switch Transformer's initialisation (arXiv 2101.03961 section 2.4): a tenth of the usual scale trains large
    sparse models stably.
    """
    std = (scale / weight.shape[-1]) ** 0.5
    with torch.no_grad():
        return nn.init.trunc_normal_(weight, mean=0.0, std=std, a=-2 * std, b=2 * std)
