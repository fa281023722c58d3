"""FastMoE's linear map of several experts."""

from collections.abc import Sequence

from torch import Tensor

from fmoe.experts.linear import FMoELinear
from fmoe.kernels import grouped_linear


class MOELinear:
    """``MOELinear.apply(...)``: what `FMoELinear` computes, as a function."""

    @staticmethod
    def apply(
        global_input_buf: Tensor,
        fwd_expert_count: Tensor | Sequence[int],
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        """``rows @ weight[e].T + bias[e]`` for the rows of each expert e: [R, I] with weight [L, O, I] -> [R, O]."""
        counts = fwd_expert_count.tolist() if isinstance(fwd_expert_count, Tensor) else list(fwd_expert_count)
        return grouped_linear(global_input_buf, weight, bias, counts)


__all__ = ["FMoELinear", "MOELinear"]
