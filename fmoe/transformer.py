"""The feed-forward block of a transformer as a Mixture of Experts."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fmoe.layer import FMoE


class FMoETransformerMLP(FMoE):
    """`FMoE` whose experts are two-layer feed-forward networks, in the place of a transformer's MLP.

    Args:
        d_model: width of tokens.
        d_hidden: hidden width of each expert.
        num_experts: in all.
        activation: a name of `fmoe.experts.ffn.ACTIVATIONS` or a function.
        options: all other arguments of `FMoE`.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        *,
        activation: str | Callable[[Tensor], Tensor] = "gelu",
        expert_options: Mapping[str, Any] | None = None,
        **options,
    ):
        super().__init__(
            d_model,
            num_experts,
            d_hidden,
            expert="ffn",
            expert_options={"activation": activation, **(expert_options or {})},
            **options,
        )
