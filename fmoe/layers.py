"""FastMoE's module of the layer: `FMoE`, and what users' own layers took from beside it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fmoe.compat.fastmoe import mark_module_parallel_comm
from fmoe.functions import MOEGather, MOEScatter, prepare_forward
from fmoe.layer import FMoE


def _fmoe_general_global_forward(
    inp: Any, gate: Tensor, expert_fn: Callable[[Any, Tensor], Any], num_expert: int, world_size: int, **kwargs
) -> Any:
    """Tokens to their experts, through ``expert_fn(rows, counts)``, and back, without weights.

    Args:
        inp: [T, D], or a nest of such tensors.
        gate: int64 [T] or [T, K], experts of each token; -1 is none.
        kwargs: not used.

    Returns:
        [T * K, D] for each tensor that ``expert_fn`` returns; zero where the choice is -1.
    """
    pos, sent, received, counts_L, num_rows = prepare_forward(gate, num_expert, world_size)
    top_k = gate.shape[1] if gate.dim() == 2 else 1
    token = torch.div(pos, top_k, rounding_mode="floor")
    rows = pytree.tree_map(lambda x: MOEScatter.apply(x, token, sent, received, num_rows, world_size), inp)
    outputs = expert_fn(rows, counts_L)
    return pytree.tree_map(lambda y: MOEGather.apply(y, pos, sent, received, gate.numel(), world_size), outputs)


__all__ = ["FMoE", "_fmoe_general_global_forward", "mark_module_parallel_comm"]
