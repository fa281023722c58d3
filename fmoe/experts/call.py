"""A layer's experts as an exchange calls them in one forward pass: lists of tensors in, lists of tensors out.

Shape letters: T tokens, K experts per token, R rows, L experts of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fmoe.errors import UserError
from fmoe.experts.ffn import FFNExperts
from fmoe.kernels.rows import DispatchPlan

# Hooks of a module that see rows or outputs between permutation and combination.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ExpertCall:
    """One forward pass of a layer's experts. They are called as a module, which hooks and FSDP see, except in a fused
    forward (without hooks) and with parameters of other ranks.

    Args:
        module: the experts.
        name: the layer's name in errors.
        x_TD: the tokens.
        training: the layer's mode.

    Attributes:
        needs_keys: rows need dropout keys, as their last tensor [R, 1], for dropout that does not depend on the split.

    Raises:
        UserError: tokens and experts have different dtypes, without autocast.
    """

    module: Any  # an nn.Module; its type lacks the experts' own methods

    def __init__(self, module: nn.Module, name: str, x_TD: Tensor, training: bool):
        self.module, self.name = module, name
        self.needs_keys = training and getattr(module, "wants_row_keys", False)
        dtype = getattr(module, "dtype", x_TD.dtype)
        # Under fully_shard its mixed precision policy casts weights and rows when the experts are called.
        is_cast = torch.is_autocast_enabled(x_TD.device.type) or getattr(module, "_is_fsdp_managed_module", False)
        if x_TD.dtype != dtype and not is_cast:
            raise UserError(f"the input of {name} is {x_TD.dtype}, its experts are {dtype}: cast one, or use autocast")

    def __call__(self, rows: list[Tensor], counts: list[int]) -> list[Tensor]:
        """Return the outputs of the rows.

        Args:
            rows: tensors [R, ...], sorted by expert.
            counts: rows of each expert.
        """
        counts_L = torch.tensor(counts, dtype=torch.int64, device="cpu")
        rows, keys = (rows[:-1], [rows[-1].squeeze(1)]) if self.needs_keys else (rows, [])
        return self._checked(self.compute(rows, counts_L, *keys), sum(counts))

    def compute(self, rows: list[Tensor], counts_L: Tensor, *keys_R: Tensor) -> list[Tensor]:
        """Call the module."""
        return [self.module(rows[0], counts_L, *keys_R)]

    def fused(self, inputs: list[Tensor], weight_TK: Tensor, plan: DispatchPlan) -> list[Tensor] | None:
        """Permute, compute and combine in one operation; None if the experts have none, or a hook is
        registered."""
        if self.needs_keys or not self._is_plain():
            return None
        out = self.module.fused_forward(inputs[0], weight_TK, plan)
        return None if out is None else [out]

    def _is_plain(self) -> bool:
        return (
            isinstance(self.module, FFNExperts)
            and is_unchanged(self.module, "forward", FFNExperts.forward)
            and not any(getattr(self.module, hooks) for hooks in _HOOKS)
        )

    def shadow(self, local: int) -> list[Tensor]:
        """Return the parameters of local expert ``local``."""
        return self.module.shadow(local)

    def run_with(self, parameters: list[list[Tensor]], rows: list[Tensor], counts: list[int]) -> list[Tensor]:
        """Run rows through experts of other ranks, given their parameters."""
        rows, keys_R = (rows[:-1], rows[-1].squeeze(1)) if self.needs_keys else (rows, None)
        return self._checked(self.compute_with(parameters, rows, counts, keys_R), sum(counts))

    def compute_with(
        self, parameters: list[list[Tensor]], rows: list[Tensor], counts: list[int], keys_R: Tensor | None
    ) -> list[Tensor]:
        """Call the module with other parameters."""
        return [self.module.run_with(parameters, rows[0], counts, keys_R)]

    def _checked(self, outputs: list[Tensor], expected: int) -> list[Tensor]:
        for out in outputs:
            if out.shape[0] != expected:
                raise UserError(f"the experts of {self.name} returned {out.shape[0]} rows for {expected}")
        return outputs


def is_unchanged(owner: object, name: str, function: Callable[..., Any]) -> bool:
    """Return whether a call of the method runs ``function``: neither a subclass nor the instance replaces it."""
    return getattr(type(owner), name) is function and name not in owner.__dict__
