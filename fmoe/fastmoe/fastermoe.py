"""FasterMoE's functions (PPoPP'22), as in FastMoE 1.1.

Shadowing sends the parameters of a hot expert to all ranks, instead of sending tokens to the expert. In new code, use
``FMoE(exchange_options={"chunks": ..., "shadow": ...})`` instead (docs/parallelism.md).

Shape letters: W ranks, L experts per rank, E = W * L, T tokens, K choices, D width, R rows.
"""

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from fmoe.errors import UserError
from fmoe.exchange.collectives import all_gather
from fmoe.exchange.shadow import Cost, broadcast_parameters, choose
from fmoe.fastmoe.functions import MOEGather, MOEScatter, count_by_gate, moe_group_of, prepare_forward


def float_from_env(key: str, default: float = -1) -> float:
    """Return an environment variable as a number; ``default`` if it is not set.

    Raises:
        UserError: the value is not a number.
    """
    text = os.environ.get(key)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise UserError(f"{key}={text!r} must be a number") from None


def switch_from_env(key: str, default: bool = False) -> bool:
    """Return whether an environment variable is "1" or "ON"; ``default`` if it is not set."""
    return os.environ[key] in ("1", "ON") if key in os.environ else default


Policy = Callable[[Tensor, Tensor, int, int, torch.device], Tensor]


def no_shadow_policy(_lec: Tensor, _gec: Tensor, num_expert: int, world_size: int, device: torch.device) -> Tensor:
    """Return False for every expert of all ranks, bool [E], so that none is shadowed (`get_shadow_policy`)."""
    return torch.zeros(world_size * num_expert, dtype=torch.bool, device="cpu")


def get_shadow_policy(d_model: int | None = None) -> Policy:
    """Return a function that decides which experts are shadowed: computed by every rank for its own tokens.

    Without FMOE_FASTER_SHADOW_ENABLE=ON it is `no_shadow_policy`. With it, the function calls
    `fmoe.exchange.shadow.choose`, with costs for two-layer experts. The costs depend on environment variables:

    * FMOE_FASTER_GLBPLC_NETBW, bandwidth in bytes per second, by default 6.25e9;
    * FMOE_FASTER_GLBPLC_GPUTP, FLOP/s of a rank, by default 1.15e13;
    * FMOE_FASTER_GLBPLC_ALPHA, hidden width / model width, by default 2;
    * FMOE_FASTER_GLBPLC_DMODEL, model width, by default ``d_model``, or 2048 if that is None.
    """
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


def _fmoe_general_global_forward(
    inp: Tensor,
    gate: Tensor,
    expert_fn: Callable[[Tensor, Tensor, int], Tensor],
    n_expert: int,
    world_size: int,
    experts: Sequence[nn.Module] | None = None,
    stored_models: Tensor | None = None,
) -> Tensor:
    """Send tokens to their experts, call ``expert_fn``, and send the outputs back, unweighted.

    Args:
        inp: [T, D].
        gate: int64 [T] or [T, K], expert ids of each token; -1 for no expert.
        expert_fn: called with an expert's rows [R, D], a tensor [1] that holds R, and the expert's index on its rank.
            It is called once per expert of this rank, and once per shadowed expert (`get_shadow_policy`). During the
            call for a shadowed expert, the module ``experts[index]`` has the parameters of that expert.
        experts: the L modules that ``expert_fn`` calls, of equal architecture; required for shadowing.
        stored_models: bool [W * L], True for experts to shadow; None for the policy of `get_shadow_policy`. A single
            rank ignores it.

    Returns:
        [T * K, D]; zero for choices of -1.

    Raises:
        UserError: an expert would be shadowed, but ``experts`` is None.
    """

    def run(rows: Tensor, index: int) -> Tensor:
        return expert_fn(rows, torch.tensor([len(rows)], dtype=torch.int64, device="cpu"), index)

    top_k = gate.shape[1] if gate.dim() == 2 else 1
    if stored_models is None:
        policy = get_shadow_policy(d_model=inp.shape[-1])
        _, sent, received = count_by_gate(gate, n_expert, world_size, require_pos=False)
        stored_models = policy(sent, received, n_expert, world_size, inp.device)
    stored = stored_models.nonzero().view(-1).tolist() if world_size > 1 else []
    if stored and experts is None:
        raise UserError("experts=None is not supported with shadowing: pass the modules that expert_fn calls")
    modules = experts or ()
    is_stored = torch.isin(gate, torch.tensor(stored, dtype=gate.dtype, device=gate.device))
    pos, sent, received, counts_L, num_rows = prepare_forward(gate.masked_fill(is_stored, -1), n_expert, world_size)
    token = torch.div(pos, top_k, rounding_mode="floor")
    rows = MOEScatter.apply(inp, token, sent, received, num_rows, world_size)
    parts = rows.split(counts_L.tolist())
    outputs = [run(part, index) for index, part in enumerate(parts)]
    out = MOEGather.apply(torch.cat(outputs), pos, sent, received, gate.numel(), world_size)
    for expert in stored:
        owner, index = divmod(expert, n_expert)
        names, local = zip(*modules[index].named_parameters(), strict=True)
        parameters = broadcast_parameters(moe_group_of(world_size), owner, local)
        place = (gate.reshape(-1) == expert).nonzero().view(-1)
        rows = inp.index_select(0, torch.div(place, top_k, rounding_mode="floor"))
        with _reparametrize_module(modules[index], dict(zip(names, parameters, strict=True))):
            out = out.index_add(0, place, run(rows, index))
    return out
