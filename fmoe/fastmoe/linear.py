"""FastMoE's linear maps of several experts, as a module and as a function.

Shape letters: R rows, L experts, I input width, O output width.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fmoe.experts.ffn import Stacked, autocast_dtype
from fmoe.kernels import grouped_linear


class FMoELinear(Stacked):
    """A linear map per expert: ``rows @ weight[e].T + bias[e]`` for the rows of each expert e.

    Args:
        num_expert: L, the number of experts.
        in_feat, out_feat: I and O, the widths of input and output.
        bias: whether to add a bias, initialized to zero.
        rank: part of FastMoE's signature, ignored; weights are drawn from torch's default generator.
    """

    def __init__(self, num_expert: int, in_feat: int, out_feat: int, bias: bool = True, rank: int = 0):
        super().__init__()
        self.num_expert = num_expert
        self.in_feat = in_feat
        self.out_feat = out_feat
        self.rank = rank
        self.weight = nn.Parameter(torch.empty(num_expert, out_feat, in_feat))
        self.bias = nn.Parameter(torch.zeros(num_expert, out_feat)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's matrix as `nn.Linear` does, and zero the bias.

        FastMoE used the fan-in of the whole stack instead.
        """
        with torch.no_grad():
            for matrix in self.weight.unbind(0):
                nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, inp: Tensor, fwd_expert_count: Tensor | Sequence[int]) -> Tensor:
        """Map [R, I] to [R, O]; ``fwd_expert_count`` is the number of rows of each expert."""
        dtype = autocast_dtype(inp.device, inp.dtype, self.weight.dtype) or self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return MOELinear.apply(inp.to(dtype), fwd_expert_count, self.weight.to(dtype), bias)

    def extra_repr(self) -> str:
        return (
            f"num_expert={self.num_expert}, in_features={self.in_feat}, out_features={self.out_feat}, "
            f"bias={self.bias is not None}"
        )


class MOELinear:
    """Functional form of `FMoELinear`, by ``MOELinear.apply(...)``."""

    @staticmethod
    def apply(
        global_input_buf: Tensor,
        fwd_expert_count: Tensor | Sequence[int],
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return ``rows @ weight[e].T + bias[e]`` for the rows of each expert e, [R, O].

        Args:
            global_input_buf: rows of all experts, sorted by expert, [R, I].
            fwd_expert_count: number of rows of each expert.
            weight: [L, O, I].
            bias: [L, O].
        """
        counts = fwd_expert_count.tolist() if isinstance(fwd_expert_count, Tensor) else list(fwd_expert_count)
        return grouped_linear(global_input_buf, weight, bias, counts)
