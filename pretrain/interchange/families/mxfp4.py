"""Weights in MXFP4 (OCP Microscaling Formats 1.0, section 5.3.4): 32 numbers of four bits share a power of two."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fmoe.errors import UserError
from pretrain.interchange.tensors import Sizes, Transform

# E2M1: a sign, two bits of exponent, one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)], dtype=torch.float32, device="cpu")
_BIAS = 127  # of the scales' exponents (E8M0); 255 is NaN


class FromMXFP4:
    """Import-only transform that decodes MXFP4 weights to bfloat16 matrices [E, out, in], without rounding.

    The inputs are blocks, uint8 [E, out, in / 32, 16], and scales, uint8 [E, out, in / 32]. The lower four bits of a
    byte hold the first of its two numbers.

    Args:
        of_rows: transform whose ``join`` then converts the decoded matrices.
    """

    def __init__(self, of_rows: Transform):
        self.of_rows = of_rows

    def split(self, ours: Tensor, sizes: Sizes) -> Sequence[Tensor]:
        raise UserError("export does not support MXFP4")

    def join(self, theirs: Sequence[Tensor], sizes: Sizes) -> Tensor:
        blocks, scales = theirs
        matrices = torch.empty(*blocks.shape[:2], blocks.shape[2] * 32, dtype=torch.bfloat16, device="cpu")
        for matrix, block, scale in zip(matrices, blocks, scales, strict=True):  # one by one, to save memory
            codes = torch.stack([block & 15, block >> 4], dim=-1).flatten(2)
            exponents = scale.int().sub_(_BIAS).unsqueeze(-1)
            matrix.copy_(torch.ldexp(_VALUES[codes.int()], exponents).flatten(1))
        if bool((scales == 255).any()) or not bool(matrices.isfinite().all()):
            raise UserError("MXFP4 weights or their scales are not finite")
        return self.of_rows.join([matrices], sizes)
