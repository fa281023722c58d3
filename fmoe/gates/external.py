"""Calls of gates that are not `fmoe.gates.Router`: modules or functions of users, and FastMoE's gates.

Shape letters: T tokens, K experts per token.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from fmoe.errors import UserError
from fmoe.routing import Routing, RoutingGroups
from fmoe.runtime.adapters import adapted


def checked(gate: Any, result: Any, groups: RoutingGroups, num_experts: int, *, name: str, check: bool) -> Routing:
    """Convert the ``result`` that ``gate`` returned to a `Routing`, check it, and return it.

    Args:
        name: the layer's name in errors.
        check: also raise if a combine weight is not finite, and check expert ids even on a GPU. The host then waits for
            the GPU.

    Raises:
        UserError: the result is neither a `Routing` nor (index, score), has an invalid shape, or has an expert id out
            of range.
    """
    num_tokens = groups.num_tokens
    routing = result if isinstance(result, Routing) else _from_pair(gate, result, num_tokens, name)
    if groups.mask_T is not None and not isinstance(result, Routing):
        routing = Routing(torch.where(groups.mask_T.unsqueeze(-1), routing.expert_TK, -1), routing.weight_TK)
    expert_TK = routing.expert_TK
    weight_TK = routing.weight_TK
    if expert_TK.shape != weight_TK.shape or expert_TK.dim() != 2 or expert_TK.shape[0] != num_tokens:
        raise UserError(
            f"the gate of {name} returned experts of shape {tuple(expert_TK.shape)} and weights of "
            f"{tuple(weight_TK.shape)} for {num_tokens} tokens; both must have one shape, [tokens, choices]"
        )
    # Reading values stalls a GPU, so values on a GPU are read only with `check`.
    if expert_TK.numel() and (check or expert_TK.device.type == "cpu"):
        low, high = map(int, expert_TK.aminmax())
        if low < -1 or high >= num_experts:
            raise UserError(
                f"the gate of {name} returned expert {high if high >= num_experts else low}, "
                f"which is not in -1..{num_experts - 1} (num_experts={num_experts})"
            )
    if check and not bool(weight_TK.isfinite().all()):
        raise UserError(f"the gate of {name} returned weights that are not finite: check its input and parameters")
    return routing


def takes_groups(gate: Any) -> bool:
    """Return whether the gate requires a second positional argument: the routing groups."""
    gate = adapted(gate)
    call = gate.forward if isinstance(gate, torch.nn.Module) else gate
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in inspect.signature(call).parameters.values() if p.kind in kinds and p.default is p.empty]
    return len(required) >= 2


def _from_pair(gate: Any, result: Any, num_tokens: int, name: str) -> Routing:
    if not (isinstance(result, tuple | list) and len(result) >= 2 and all(isinstance(r, Tensor) for r in result[:2])):
        returned = type(result).__name__
        if isinstance(result, tuple | list):
            returned += f" of {', '.join(type(r).__name__ for r in result) or 'nothing'}"
        raise UserError(
            f"the gate of {name} returned {returned}; it must return a Routing or two tensors (index, score)"
        )
    index, score = result[:2]
    top_k = index.numel() // num_tokens if num_tokens else max(getattr(adapted(gate), "top_k", 1) or 1, 1)
    if index.numel() != num_tokens * top_k or score.numel() != index.numel():
        raise UserError(
            f"the gate of {name} returned indices of shape {tuple(index.shape)} and scores of "
            f"{tuple(score.shape)} for {num_tokens} tokens; both must have one shape, [tokens, choices]"
        )
    return Routing(index.reshape(num_tokens, top_k).long(), score.reshape(num_tokens, top_k))
