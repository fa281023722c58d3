"""Gates that CUDA kernels compute, and the rule of each.

`route` replaces the call of a gate. The gate itself is the fallback and the reference.

Shape letters: T tokens, D width, E experts, K experts per token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.parametrize import type_before_parametrizations as type_of

from fmoe.gates.gshard import GShardRouter
from fmoe.gates.naive import NaiveRouter
from fmoe.gates.router import Scores, normalize_scores, routing_stats
from fmoe.gates.sigmoid import SigmoidRouter
from fmoe.gates.switch import JITTER, SwitchRouter
from fmoe.kernels import backends
from fmoe.kernels.cuda import router, routing, rows
from fmoe.kernels.cuda.calls import TokenTiles
from fmoe.kernels.cuda.routing import Rule
from fmoe.kernels.rows import CountedRouting
from fmoe.layout import LocalTokens
from fmoe.routing import Routing, RoutingGroups, RoutingStats

# By exact class: a subclass may compute something else.
RULES: dict[type, Callable[[Any], Rule]] = {
    NaiveRouter: lambda gate: Rule(
        is_sigmoid=gate.score == "sigmoid",
        by_logits=True,
        normalize=gate.normalize,
        scale=gate.routed_scale,
        groups=gate.expert_groups or 0,
        kept_groups=gate.kept_groups,
    ),
    SwitchRouter: lambda gate: Rule(normalize=False),
    GShardRouter: lambda gate: Rule(),
    SigmoidRouter: lambda gate: Rule(
        is_sigmoid=gate.score == "sigmoid",
        normalize=gate.normalize and gate.top_k > 1,
        scale=gate.routed_scale,
        groups=gate.expert_groups or 0,
        kept_groups=gate.kept_groups,
        best_of=2,
    ),
}


def route(gate: Any, tokens: LocalTokens) -> Routing | None:
    """Route tokens by CUDA kernels, or return None if the caller must call the gate.

    For softmax routers, one operation computes logits, choices, losses and statistics. It also returns the tokens,
    which replace the first of ``tokens.inputs``: its backward pass then adds the experts' gradient to its own.
    """
    rule_of = RULES.get(type_of(gate))
    x_TD = tokens.gate_input_TD
    if rule_of is None or _is_changed(gate) or not backends.cuda_takes_tokens(x_TD, gate.num_experts):
        return None
    rule = rule_of(gate)
    with torch.autocast(x_TD.device.type, enabled=False):
        if _is_one_operation(gate, rule, x_TD, tokens.groups):
            return _route_by_one_operation(gate, rule, tokens)
        return _choose_by_kernel(gate, rule, x_TD, tokens.groups)


def memory_shape(groups: RoutingGroups) -> tuple[int, int]:
    """Return the shape that tells kernels the order of tokens in memory: (sequences, length), or (1, T)."""
    return (groups.num_sequences, groups.sequence_length) if groups.sequence_first else (1, groups.num_tokens)


def _is_changed(gate: Any) -> bool:
    """Return whether calling this instance does more than the ``forward`` of its class."""
    hooks = (gate._forward_pre_hooks, gate._forward_hooks, gate._backward_pre_hooks, gate._backward_hooks)
    return any(hooks) or "forward" in vars(gate)


def _is_one_operation(gate: Any, rule: Rule, x_TD: Tensor, groups: RoutingGroups) -> bool:
    """Return whether the operation of `fmoe.kernels.cuda.router` computes this gate."""
    return (
        type_of(gate) in (NaiveRouter, SwitchRouter)
        and not rule.is_sigmoid
        and gate.bias is None
        and gate.balance_group is None
        and groups.shards is None
        and groups.num_tokens > 0
        and backends.cuda_takes(x_TD, gate.weight)
        and not (_has_noise(gate) and torch.compiler.is_compiling())  # the key would be a tensor
        and router.fits(gate.num_experts, gate.top_k, rule, gate.factor is not None)
    )


def _has_noise(gate: Any) -> bool:
    return gate.training and getattr(gate, "jitter", 0.0) > 0


def _route_by_one_operation(gate: Any, rule: Rule, tokens: LocalTokens) -> Routing:
    x_TD = tokens.gate_input_TD
    groups = tokens.groups
    tiles = TokenTiles(groups.num_tokens, groups.size, *memory_shape(groups))
    jitter = None
    if _has_noise(gate):
        jitter = router.Jitter(gate.jitter, groups.key_on_host(JITTER), int(groups.first_group))
    result = router.route(x_TD, gate.weight, gate.top_k, rule, tiles, groups.mask_T, gate.factor, jitter)
    if result.tokens_TD is not None and x_TD is tokens.x_TD:
        tokens.inputs = [result.tokens_TD, *tokens.inputs[1:]]
    losses = {}
    stats = RoutingStats.of_sums(result.stats[: gate.num_experts + 3])
    if gate.training:
        losses = {"z": result.z, "balance": result.balance}
        stats = RoutingStats.of_sums(result.stats, router.LOSSES)
    tile_count = None if gate.factor is None else result.tile_count
    max_load = gate.max_load(groups)
    return CountedRouting(result.expert_TK, result.weight_TK, losses, stats, max_load, tile_count=tile_count)


def _choose_by_kernel(gate: Any, rule: Rule, x_TD: Tensor, groups: RoutingGroups) -> Routing:
    """Choose experts and weights by a kernel, between the gate's own router and losses."""
    x_TD = gate.router_input(gate.widened(x_TD), groups)
    logits_TE = gate.logits(x_TD, groups)
    bias_E = gate.expert_bias_E if type_of(gate) is SigmoidRouter else None
    routed = routing.route(logits_TE, gate.top_k, rule, bias_E=bias_E, mask_T=groups.mask_T)
    probs_TE = normalize_scores(routed.score_TE) if rule.is_sigmoid else routed.score_TE
    scores = Scores(x_TD, logits_TE, probs_TE, routed.logsumexp_T)
    expert_TK = routed.expert_TK
    if type_of(gate) is GShardRouter:
        expert_TK = gate.leave_out(expert_TK, routed.weight_TK, groups)
    losses = {}
    if gate.training:
        losses = gate.losses(scores, expert_TK, groups)
    if type_of(gate) is SigmoidRouter:
        losses |= gate.balance_loss(routed.score_TE, groups)
    kept_TK = expert_TK
    if gate.factor is not None and expert_TK.numel():
        shape = (gate.num_experts, groups.size, *memory_shape(groups))
        kept_TK = rows.drop_over_capacity(expert_TK, groups.mask_T, *shape, gate.factor)
    stats = routing_stats(expert_TK, kept_TK, routed.entropy_T, groups, gate.num_experts)
    return Routing(kept_TK, routed.weight_TK, losses, stats, gate.max_load(groups))
