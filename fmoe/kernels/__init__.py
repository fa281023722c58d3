"""Operations on the rows of experts: `permute` and `combine` move rows, the others run GEMMs.

A row is the vector of a token for one of its experts. `fmoe.kernels.reference` has the same operations in plain
differentiable torch. Tests compare values and gradients with its results.
"""

from fmoe.kernels.ffn import expert_ffn, grouped_linear
from fmoe.kernels.rows import combine, permute

__all__ = ["combine", "expert_ffn", "grouped_linear", "permute"]
