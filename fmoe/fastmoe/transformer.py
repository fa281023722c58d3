"""FastMoE's Mixture-of-Experts block that replaces the feed-forward block of a transformer."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fmoe.errors import UserError
from fmoe.fastmoe.layers import FMoE
from fmoe.fastmoe.linear import FMoELinear


class _Expert(nn.Module):
    def __init__(
        self, num_expert: int, d_model: int, d_hidden: int, activation: Callable[[Tensor], Tensor], rank: int = 0
    ):
        super().__init__()
        self.htoh4 = FMoELinear(num_expert, d_model, d_hidden, bias=True, rank=rank)
        self.h4toh = FMoELinear(num_expert, d_hidden, d_model, bias=True, rank=rank)
        self.activation = activation

    def forward(self, inp: Tensor, fwd_expert_count: Tensor) -> Tensor:
        return self.h4toh(self.activation(self.htoh4(inp, fwd_expert_count)), fwd_expert_count)

    def reset_parameters(self) -> None:
        self.htoh4.reset_parameters()
        self.h4toh.reset_parameters()


class FMoETransformerMLP(FMoE):
    """`FMoE` with two-layer feed-forward experts, which replaces a transformer's MLP.

    It has the two signatures of `FMoE`. With FastMoE's signature, each expert is a module with two `FMoELinear` maps,
    ``htoh4`` and ``h4toh``, and the parameters have the attribute ``dp_comm`` of `DistributedGroupedDataParallel`.

    Args:
        num_expert: FastMoE's signature only; see `FMoE`.
        expert_dp_comm: FastMoE's signature only; name of the group over which the experts' gradients are averaged.
        expert_rank: FastMoE's signature only; ignored.
        d_model: width of tokens.
        d_hidden: hidden width of each expert; None for ``4 * d_model``, or 4096 in FastMoE's signature.
        activation: a function or a module. With ``num_experts=``, also a name in `fmoe.experts.ffn.ACTIVATIONS`. None
            for GELU; if the option ``expert`` is set, for that expert's default activation.
        options: all other arguments of `FMoE`.
    """

    def __init__(
        self,
        num_expert: int | None = None,
        d_model: int | None = None,
        d_hidden: int | None = None,
        activation: str | Callable[[Tensor], Tensor] | None = None,
        expert_dp_comm: str = "none",
        expert_rank: int = 0,
        *,
        num_experts: int | None = None,
        expert_options: Mapping[str, Any] | None = None,
        **options,
    ):
        if num_experts is not None:
            if expert_dp_comm != "none" or expert_rank != 0:
                raise UserError(
                    "expert_dp_comm and expert_rank are arguments of FastMoE's signature (num_expert=): with "
                    "num_experts=, omit them"
                )
            expert_options = ({} if activation is None else {"activation": activation}) | dict(expert_options or {})
            super().__init__(
                num_expert,
                d_model,
                num_experts=num_experts,
                d_hidden=d_hidden,
                expert_options=expert_options,
                **{"expert": "ffn"} | options,
            )
            return
        function: Any = nn.GELU() if activation is None else activation
        d_hidden = 4096 if d_hidden is None else d_hidden

        expert = functools.partial(_Expert, 1, d_hidden=d_hidden, activation=function, rank=expert_rank)
        super().__init__(num_expert, d_model, expert=expert, **options)
        self.d_hidden = d_hidden
        self.mark_parallel_comm(expert_dp_comm)
