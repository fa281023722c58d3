"""Calling any gate: ours, a user's, or one of FastMoE's kind.

Shape letters: T tokens, K choices a token, E experts.
"""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fmoe.errors import UserError
from fmoe.gates.base import Router
from fmoe.routing import Routing, RoutingGroups

if TYPE_CHECKING:
    from fmoe.layer import FMoE


def route(layer: "FMoE", inputs: Any, x_TD: Tensor, groups: RoutingGroups) -> Routing:
    """What the layer's gate decides, checked.

    A gate takes ``(x_TD, groups)`` or ``x_TD`` alone, and returns a `Routing` or FastMoE's ``(index, score)``.
    FastMoE's gates get the whole input, nests included.

    Raises:
        UserError: what it decided cannot be.
    """
    gate = layer.gate
    if isinstance(gate, Router):
        routing = gate(x_TD, groups)
    else:
        result = gate(x_TD, groups) if _takes_groups(gate) else gate(inputs if layer.is_fastmoe else x_TD)
        routing = result if isinstance(result, Routing) else _from_pair(layer, result, x_TD.shape[0])
        if groups.mask_T is not None and not isinstance(result, Routing):
            routing = Routing(torch.where(groups.mask_T.unsqueeze(-1), routing.expert_TK, -1), routing.weight_TK)
        _check(layer, routing, x_TD.shape[0])
    if layer.check and not bool(routing.weight_TK.isfinite().all()):
        raise UserError(f"the router of {layer.name} gave weights that are not finite: its input or weights are not")
    if layer.gate_hook is not None:
        layer.gate_hook(routing.expert_TK, routing.weight_TK, None)
    return routing


def _takes_groups(gate: Any) -> bool:
    """Whether the gate wants a second argument."""
    call = gate.forward if isinstance(gate, torch.nn.Module) else gate
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in inspect.signature(call).parameters.values() if p.kind in kinds and p.default is p.empty]
    return len(required) >= 2


def _from_pair(layer: "FMoE", result: Any, num_tokens: int) -> Routing:
    if not (isinstance(result, tuple | list) and len(result) >= 2 and all(isinstance(r, Tensor) for r in result[:2])):
        raise UserError(
            f"the gate of {layer.name} returned {type(result).__name__}, neither a Routing nor (index, score)"
        )
    index, score = result[:2]
    top_k = index.numel() // num_tokens if num_tokens else max(getattr(layer.gate, "top_k", 1) or 1, 1)
    if index.numel() != num_tokens * top_k or score.numel() != index.numel():
        raise UserError(
            f"the gate of {layer.name} returned indices of shape {tuple(index.shape)} and scores of "
            f"{tuple(score.shape)} for {num_tokens} tokens"
        )
    return Routing(index.reshape(num_tokens, top_k).long(), score.reshape(num_tokens, top_k))


def _check(layer: "FMoE", routing: Routing, num_tokens: int) -> None:
    expert_TK, weight_TK = routing.expert_TK, routing.weight_TK
    if expert_TK.shape != weight_TK.shape or expert_TK.dim() != 2 or expert_TK.shape[0] != num_tokens:
        raise UserError(
            f"the gate of {layer.name} returned experts of shape {tuple(expert_TK.shape)} and weights of "
            f"{tuple(weight_TK.shape)} for {num_tokens} tokens; both must be [tokens, choices]"
        )
    # Looking at values stalls a GPU; there, only when checking is on.
    if expert_TK.numel() and (layer.check or expert_TK.device.type == "cpu"):
        low, high = int(expert_TK.min()), int(expert_TK.max())
        if low < -1 or high >= layer.num_experts:
            raise UserError(
                f"the gate of {layer.name} returned expert {high if high >= layer.num_experts else low}, "
                f"which is not in -1..{layer.num_experts - 1} (num_experts={layer.num_experts})"
            )
