"""Every hot operation once: `permute`, `combine`, `reorder` (rows), `grouped_linear` and
`expert_ffn` (GEMMs).

`reference` holds the same operations as plain differentiable torch, obviously right; the tests compare values and
gradients.
"""

from fmoe.kernels.ffn import expert_ffn
from fmoe.kernels.grouped import grouped_linear
from fmoe.kernels.rows import combine, permute, reorder

__all__ = ["combine", "expert_ffn", "grouped_linear", "permute", "reorder"]
