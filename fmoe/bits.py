"""Booleans as bits."""

import torch
from torch import Tensor

_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)


def pack_bits(flags: Tensor) -> Tensor:
    """Return bool flags [..., N] as bits, uint8 [..., N / 8 rounded up]."""
    powers = torch.tensor(_POWERS, dtype=torch.uint8, device=flags.device)
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[-1] % 8))
    return (padded.view(*flags.shape[:-1], -1, 8) * powers).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, count: int) -> Tensor:
    """Return the first ``count`` flags [..., count] of bits from `pack_bits`."""
    powers = torch.tensor(_POWERS, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(-1) & powers).bool().flatten(-2)[..., :count]
