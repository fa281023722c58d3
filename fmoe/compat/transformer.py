"""FastMoE's expert of a transformer's MLP."""

from collections.abc import Callable

from torch import Tensor, nn

from fmoe.experts.linear import FMoELinear


class _Expert(nn.Module):
    """``h4toh(activation(htoh4(x)))`` for the rows of several experts (FastMoE's name and attributes)."""

    def __init__(
        self, num_expert: int, d_model: int, d_hidden: int, activation: Callable[[Tensor], Tensor], rank: int = 0
    ):
        super().__init__()
        self.htoh4 = FMoELinear(num_expert, d_model, d_hidden, bias=True, rank=rank)
        self.h4toh = FMoELinear(num_expert, d_hidden, d_model, bias=True, rank=rank)
        self.activation = activation

    def forward(self, inp: Tensor, fwd_expert_count: Tensor) -> Tensor:
        """[R, D] -> [R, D]; ``fwd_expert_count`` has the rows of each expert."""
        return self.h4toh(self.activation(self.htoh4(inp, fwd_expert_count)), fwd_expert_count)

    def reset_parameters(self) -> None:
        """Draws both linear maps anew."""
        self.htoh4.reset_parameters()
        self.h4toh.reset_parameters()
