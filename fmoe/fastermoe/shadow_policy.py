"""Which experts are sent to all workers, by FasterMoE's environment variables.

Shape letters: W workers, L experts of one, E = W * L.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fmoe.exchange.collectives import all_gather
from fmoe.exchange.shadow import Cost, choose
from fmoe.fastermoe.config import float_from_env, switch_from_env
from fmoe.functions import moe_group_of

Policy = Callable[[Tensor, Tensor, int, int, torch.device], Tensor]


def no_shadow_policy(_lec: Tensor, _gec: Tensor, num_expert: int, world_size: int, device: torch.device) -> Tensor:
    """bool [E], none."""
    return torch.zeros(world_size * num_expert, dtype=torch.bool, device="cpu")


def get_shadow_policy(d_model: int | None = None) -> Policy:
    """`no_shadow_policy`, or with FMOE_FASTER_SHADOW_ENABLE=ON what `fmoe.exchange.shadow.choose` finds for two-layer
    experts: FMOE_FASTER_GLBPLC_NETBW bytes a second (6.25e9), _GPUTP FLOP/s (1.15e13), _ALPHA hidden / model width (2),
    _DMODEL the width (``d_model``, else 2048)."""
    if not switch_from_env("FMOE_FASTER_SHADOW_ENABLE"):
        return no_shadow_policy
    width = float_from_env("FMOE_FASTER_GLBPLC_DMODEL", 2048 if d_model is None else d_model)
    size = 2 * float_from_env("FMOE_FASTER_GLBPLC_ALPHA", 2) * width**2
    cost = Cost(
        row_seconds=3 * 2 * size / float_from_env("FMOE_FASTER_GLBPLC_GPUTP", 11.5e12),
        row_bytes=4 * width,
        expert_bytes=4 * size,
        bandwidth=float_from_env("FMOE_FASTER_GLBPLC_NETBW", 50e9 / 8),
    )

    def policy(lec: Tensor, _gec: Tensor, num_expert: int, world_size: int, device: torch.device) -> Tensor:
        chosen = no_shadow_policy(lec, _gec, num_expert, world_size, device)
        loads = lec
        if world_size > 1:
            loads = all_gather(moe_group_of(world_size), lec.to(device), "exchange of loads").wait(for_host=True)
        chosen[choose(loads.view(world_size, -1).tolist(), num_expert, len(chosen), cost)] = True
        return chosen

    return policy
