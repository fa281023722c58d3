"""An expert that processes every token."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe import random
from fmoe.errors import check_options
from fmoe.experts import initial
from fmoe.experts.ffn import FFNExperts


class SharedExpert(nn.Module):
    """Shared expert: it processes every token, in parallel with the routed experts.

    The source is DeepSeekMoE (arXiv 2401.06066 section 3.2). Every rank has a replica.

    Args:
        d_model: width of tokens.
        expert: a module that maps tokens [T, D] to [T, D], or the hidden width of an FFN.
        gated_output: multiply the output by ``sigmoid(w . x)``, as Qwen2-MoE does.
        options: options of the FFN (`FFNExperts`).
    """

    def __init__(
        self,
        d_model: int,
        expert: nn.Module | int,
        *,
        gated_output: bool = False,
        options: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        if isinstance(expert, int):
            # Drawn from torch's default generator, which the layer has seeded, like the other weights of this module.
            seed = random.draw_seed()
            own = ("num_experts", "d_model", "d_hidden", "first_expert", "seed")
            check_options("shared_options", FFNExperts, options or {}, "the shared expert", own)
            expert = FFNExperts(1, d_model, expert, seed=seed, **(options or {}))
        self.expert = expert
        self.output_gate = nn.Linear(d_model, 1, bias=False) if gated_output else None

    def reset_parameters(self) -> None:
        """Draw the parameters again from torch's default CPU generator.

        An expert without a method ``reset_parameters`` needs it in its submodules.
        """
        if isinstance(self.expert, FFNExperts):
            self.expert.seed = random.draw_seed()
        for part in (self.expert, self.output_gate):
            initial.reset(part)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Map tokens [T, D] to outputs [T, D]."""
        if isinstance(self.expert, FFNExperts):
            y_TD = self.expert(x_TD, torch.tensor([x_TD.shape[0]], dtype=torch.int64, device="cpu"))
        else:
            y_TD = self.expert(x_TD)
        if self.output_gate is not None:
            y_TD = y_TD * F.sigmoid(self.output_gate(x_TD))
        return y_TD
