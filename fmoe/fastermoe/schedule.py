"""FasterMoE's way through the experts: one call of ``expert_fn`` an expert, hot experts come to the tokens.

Shape letters: T tokens, K choices, D width, W workers, L experts of one, R rows of an expert.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from fmoe.errors import UserError
from fmoe.exchange.shadow import broadcast_parameters
from fmoe.fastermoe.shadow_policy import get_shadow_policy
from fmoe.functions import MOEGather, MOEScatter, count_by_gate, moe_group_of, prepare_forward


def _fmoe_general_global_forward(
    inp: Tensor,
    gate: Tensor,
    expert_fn: Callable[[Tensor, Tensor, int], Tensor],
    n_expert: int,
    world_size: int,
    experts: Sequence[nn.Module] | None = None,
    stored_models: Tensor | None = None,
) -> Tensor:
    """Tokens to their experts and back, without weights.

    Args:
        inp: [T, D].
        gate: int64 [T] or [T, K], experts of each token; -1 is none.
        expert_fn: called as ``(rows [R, D], [R] as a tensor, local index of the expert)``.
        experts: the modules that ``expert_fn`` calls, L of them, all alike; needed for shadowing.
        stored_models: bool [W * L], experts that come to the tokens; None for `get_shadow_policy`.

    Returns:
        [T * K, D]; zero where the choice is -1.

    Raises:
        UserError: experts are to be shadowed, and ``experts`` is not given.
    """
    top_k = gate.shape[1] if gate.dim() == 2 else 1
    if stored_models is None:
        policy = get_shadow_policy(d_model=inp.shape[-1])
        _, sent, received = count_by_gate(gate, n_expert, world_size, require_pos=False)
        stored_models = policy(sent, received, n_expert, world_size, inp.device)
    stored = stored_models.nonzero().view(-1).tolist() if world_size > 1 else []
    if stored and experts is None:
        raise UserError("experts=None: shadowing needs the modules that expert_fn calls")
    is_stored = torch.isin(gate, torch.tensor(stored, dtype=gate.dtype, device=gate.device))
    pos, sent, received, counts_L, num_rows = prepare_forward(gate.masked_fill(is_stored, -1), n_expert, world_size)
    token = torch.div(pos, top_k, rounding_mode="floor")
    rows = MOEScatter.apply(inp, token, sent, received, num_rows, world_size)
    parts = rows.split(counts_L.tolist())
    outputs = [
        expert_fn(part, torch.tensor([len(part)], dtype=torch.int64, device="cpu"), index)
        for index, part in enumerate(parts)
    ]
    out = MOEGather.apply(torch.cat(outputs), pos, sent, received, gate.numel(), world_size)
    for expert in stored:
        owner, index = divmod(expert, n_expert)
        names, own = zip(*experts[index].named_parameters(), strict=True)
        parameters = broadcast_parameters(moe_group_of(world_size), owner, own)
        place = (gate.reshape(-1) == expert).nonzero().view(-1)
        rows = inp.index_select(0, torch.div(place, top_k, rounding_mode="floor"))
        with _reparametrize_module(experts[index], dict(zip(names, parameters, strict=True))):
            out = out.index_add(
                0, place, expert_fn(rows, torch.tensor([len(rows)], dtype=torch.int64, device="cpu"), index)
            )
    return out
