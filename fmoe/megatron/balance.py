"""Figures of balance by layer of a Megatron model, written by gate hooks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fmoe.balance import reset_balance_profile, update_balance_profile
from fmoe.megatron.utils import megatron_args

_profile: dict[str, list] = {}
_known_layers = 0


def reset_gate_hook(num_layers: int | None = None) -> None:
    """Forgets the figures; room for so many layers, or as many as before."""
    global _known_layers
    _known_layers = _known_layers if num_layers is None else num_layers
    reset_balance_profile(_profile, _known_layers, _strategy())


def get_balance_profile() -> dict[str, list]:
    """The last figures of each layer, by name."""
    return _profile


def generate_megatron_gate_hook(layer_idx: int, num_expert_global: int) -> Callable[[Tensor, Tensor, Any], None]:
    """The gate hook of one layer."""
    strategy = _strategy()

    def hook(gate_top_k_idx: Tensor, gate_score_top_k: Tensor, gate_context: Any) -> None:
        if layer_idx < _known_layers:
            update_balance_profile(
                _profile, gate_top_k_idx, gate_score_top_k, gate_context, layer_idx, num_expert_global, strategy
            )

    return hook


def _strategy() -> str | None:
    return getattr(megatron_args(), "balance_strategy", None)
