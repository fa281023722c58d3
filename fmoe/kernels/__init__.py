"""Kernels of the layer: `permute`, `combine`, `reorder` (rows), `grouped_linear` and `expert_ffn` (GEMMs).

`reference` has the same operations in plain differentiable torch; tests compare values and gradients with its results.
"""

from fmoe.kernels.ffn import expert_ffn, grouped_linear
from fmoe.kernels.rows import combine, permute, reorder

__all__ = ["combine", "expert_ffn", "grouped_linear", "permute", "reorder"]
