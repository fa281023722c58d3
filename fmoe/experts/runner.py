"""A layer's experts as transfers call them: flat lists of tensors in, flat lists out."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fmoe.compat.fastmoe import FastMoEMembers
from fmoe.errors import UserError
from fmoe.experts.ffn import FFNExperts

if TYPE_CHECKING:
    from fmoe.kernels.rows import DispatchPlan
    from fmoe.layer import FMoE

# Of a module: where somebody wants to see rows or outputs as they are between the steps.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Runner:
    """One forward pass of a layer's experts (`fmoe.dispatch.exchange.Experts`).

    Args:
        nest: structure of the inputs.
        has_keys: the last tensor of the rows is a key of noise for each of them.

    Attributes:
        nest: structure of the outputs, once there are some.
    """

    def __init__(self, layer: "FMoE", nest: pytree.TreeSpec, has_keys: bool):
        self._layer, self._inputs, self._has_keys = layer, nest, has_keys
        self.nest: pytree.TreeSpec | None = None

    def __call__(self, rows: list[Tensor], counts: list[int]) -> list[Tensor]:
        counts_L = torch.tensor(counts, dtype=torch.int64, device="cpu")
        if self._has_keys:
            *rows, keys_R1 = rows
            return self._flat(self._layer.experts(self._nested(rows), counts_L, keys_R1.squeeze(1)), sum(counts))
        return self._flat(self._layer.expert_fn(self._nested(rows), counts_L), sum(counts))

    def mix(self, inputs: list[Tensor], weight_TK: Tensor, plan: "DispatchPlan") -> list[Tensor] | None:
        """Permute, call and combine in one, where these experts can (`FFNExperts.mix`) and nobody looks on between."""
        experts = self._layer.experts
        is_plain = (
            isinstance(experts, FFNExperts)
            and _is_own(experts, "forward", FFNExperts.forward)
            and _is_own(self._layer, "expert_fn", FastMoEMembers.expert_fn)
            and self._inputs.is_leaf()
            and not self._has_keys
            and not any(getattr(experts, hooks) for hooks in _HOOKS)
        )
        out = experts.mix(inputs[0], weight_TK, plan) if is_plain else None
        return None if out is None else self._flat(out, inputs[0].shape[0])

    def lend(self, local: int) -> list[Tensor]:
        """The parameters of local expert ``local``."""
        return self._layer.experts.lend(local)

    def run_with(self, parameters: list[list[Tensor]], rows: list[Tensor], counts: list[int]) -> list[Tensor]:
        """Experts of other workers, by their parameters."""
        keys_R = None
        if self._has_keys:
            *rows, keys_R1 = rows
            keys_R = keys_R1.squeeze(1)
        return self._flat(self._layer.experts.run_with(parameters, self._nested(rows), counts, keys_R), sum(counts))

    def _nested(self, rows: list[Tensor]) -> Any:
        return pytree.tree_unflatten(list(rows), self._inputs)

    def _flat(self, out: Any, expected: int) -> list[Tensor]:
        leaves, self.nest = pytree.tree_flatten(out)
        for leaf in leaves:
            if leaf.shape[0] != expected:
                raise UserError(f"the experts of {self._layer.name} returned {leaf.shape[0]} rows for {expected}")
        return leaves


def _is_own(owner: object, name: str, function: Callable) -> bool:
    """Whether that is what a call of the method runs: neither a subclass nor the instance has another."""
    return getattr(type(owner), name) is function and name not in owner.__dict__
