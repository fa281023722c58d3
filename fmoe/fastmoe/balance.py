"""FastMoE's balance metrics by layer, which a gate hook stores. `fmoe.metrics` has more metrics and needs no hook."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

metrics: dict[str, Callable[[Tensor], Tensor]] = {
    "coefficient-variation": lambda count_E: count_E.std(correction=min(1, len(count_E) - 1)) / count_E.mean(),
    "Lmax-over-Lmin": lambda count_E: (count_E.max() + 1) / (count_E.min() + 1),
    "Lmax-over-Lmean": lambda count_E: count_E.max() / count_E.mean(),
}


def reset_balance_profile(balance_dict: dict[str, list], num_layers: int, balance_strategy: str | None) -> None:
    """Set every metric in ``balance_dict`` to a list of ``num_layers`` Nones.

    If ``balance_strategy`` is given, the gate's loss is also a metric.
    """
    names = [*metrics, f"{balance_strategy}_loss"] if balance_strategy else list(metrics)
    balance_dict.update({name: [None] * num_layers for name in names})


@torch.no_grad()
def update_balance_profile(
    balance_dict: dict[str, list],
    gate_top_k_idx: Tensor,
    _gate_score_top_k: Tensor | None,
    gate_context: Any,
    layer_idx: int,
    num_expert: int,
    balance_strategy: str | None,
) -> None:
    """Store one layer's balance metrics in ``balance_dict``; call this in the ``gate_hook`` of the layer (`FMoE`).

    Args:
        gate_top_k_idx: expert ids chosen by the gate, of any shape; -1 is not counted.
        gate_context: loss of the gate, stored if ``balance_strategy`` is given; None without a loss.
        num_expert: number of experts over all ranks.
    """
    chosen_N = gate_top_k_idx.reshape(-1)
    count_E = torch.zeros(num_expert, device=chosen_N.device, dtype=torch.float32)
    count_E.index_add_(0, chosen_N.clamp(min=0), (chosen_N >= 0).to(count_E.dtype))
    for name, metric in metrics.items():
        balance_dict[name][layer_idx] = metric(count_E)
    if balance_strategy and gate_context is not None:
        balance_dict[f"{balance_strategy}_loss"][layer_idx] = gate_context
