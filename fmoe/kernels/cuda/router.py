"""A softmax router on a GPU: one operation for experts, weights, losses and statistics, one for the backward pass.

The backward pass also adds the experts' gradient of the tokens to the router's. `fmoe.gates.router` computes the same
in plain torch.

Shape letters: T tokens, D width, E experts, K experts per token, G routing groups.
"""

from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fmoe.kernels.cuda import calls, launch
from fmoe.kernels.cuda.calls import Rule, TokenTiles
from fmoe.kernels.cuda.instances import MAX_EXPERTS
from fmoe.kernels.cuda.routing import RULE

LOSSES = ("balance", "z")  # in the order of `Result.stats`


@dataclass(frozen=True)
class Jitter:
    """Multiplicative noise on the router's input, uniform in [1 - half_width, 1 + half_width).

    Attributes:
        key: number from which kernels derive the noise (`fmoe.routing.RoutingGroups.key_on_host`).
        first_group: index, within the global batch, of the first routing group of the router's input.
    """

    half_width: float
    key: int
    first_group: int


@dataclass(frozen=True)
class Result:
    """Result of `route`. ``weight_TK``, ``balance`` and ``z`` are differentiable.

    Attributes:
        expert_TK: chosen experts; -1 for padding and for assignments over capacity.
        stats: [E + 5], `fmoe.routing.RoutingStats.sums` for the losses named in `LOSSES`.
        balance, z: load balancing loss and router z-loss, scalars.
        tile_count: number of assignments by tile and expert, for `calls.place`; empty without a capacity factor.
        tokens_TD: the tokens, to pass to the experts. The router's backward pass then adds the experts' gradient to its
            own. None if the tokens need no gradient.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    balance: Tensor
    z: Tensor
    stats: Tensor
    tile_count: Tensor
    tokens_TD: Tensor | None


def fits(num_experts: int, top_k: int, rule: Rule, has_capacity: bool) -> bool:
    """Return whether the kernels support this router: their counters of assignments must fit in shared memory."""
    _, of_block, of_warp = calls.route_words(num_experts, top_k, rule.groups, True, has_capacity)
    return num_experts <= MAX_EXPERTS and 4 * (of_block + of_warp) <= launch.SHARED


def route(
    x_TD: Tensor,
    weight_ED: Tensor,
    top_k: int,
    rule: Rule,
    tiles: TokenTiles,
    mask_T: Tensor | None,
    factor: float | None,
    jitter: Jitter | None,
) -> Result:
    """Route tokens by the softmax of ``x @ weight.T``, computed in float32.

    Args:
        rule: a rule whose scores are a softmax.
        tiles: split of the routing groups into tiles of tokens.
        mask_T: bool; False for tokens that are not routed.
        factor: capacity factor; None for no limit.
        jitter: noise on the tokens; None for no noise.
    """
    assert not rule.is_sigmoid
    mask_T = None if mask_T is None else mask_T.contiguous()
    tile_options = (tiles.group_size, tiles.sequences, tiles.sequence_length)
    noise = (0.0, 0, 0) if jitter is None else (jitter.half_width, jitter.key, jitter.first_group)
    options = (top_k, *astuple(rule), *tile_options, float(factor or 0.0), *noise)
    return Result(*_Route.apply(x_TD.contiguous(), weight_ED.contiguous(), mask_T, options))


_TILES = "SymInt group_size, SymInt sequences, SymInt sequence_length"
_NOISE = "float half_width, int key, SymInt first_group"


@torch.library.custom_op(
    "fmoe_cuda::router",
    mutates_args=(),
    schema=f"(Tensor x, Tensor weight, Tensor? mask, int top_k, {RULE}, {_TILES}, float factor, {_NOISE}) -> Tensor[]",
)
def _router(x, weight, mask, top_k, *options):
    """Return the routing, and tensors for the backward pass; absent tensors are empty."""
    *rule, group_size, sequences, sequence_length, factor, half_width, key, first_group = options
    tiles = TokenTiles(x.shape[0], group_size, sequences, sequence_length)
    jittered = x.new_empty(0)
    logits = _product32(x, weight.t())
    if half_width:
        change = torch.empty_like(x)
        jittered = calls.jitter(x, key, first_group, half_width, tiles, change_TD=change)
        # Rounding the change ``x * (noise - 1)`` loses 2^-9 of it; rounding ``x * noise`` would lose 2^-9 of x.
        logits = _product32(change, weight.t(), logits)
    expert, weights, logsumexp, counted = calls.route_counted(
        logits, mask, top_k, Rule(*rule), tiles, by_choice=factor > 0
    )
    queued = calls.queue(counted, top_k, factor)
    kept = expert.new_empty(0)
    tile_count = expert.new_empty(0, dtype=torch.int32)
    if factor:
        kept, tile_count = calls.drop_over_capacity(expert, counted, queued)
    sums = queued.sums
    assert sums is not None
    inner = (logits, logsumexp, sums.fraction_GE, jittered)
    return [expert, kept, weights, sums.balance, sums.z, sums.stats, tile_count, *inner]


@_router.register_fake
def _(x, weight, mask, top_k, *flags_and_sizes):
    *_, group_size, _, _, factor, half_width, _, _ = flags_and_sizes
    tokens = x.shape[0]
    experts = weight.shape[0]
    groups = max(1, -(-tokens // group_size))
    counts_shape = calls.tile_count_shape(tokens * top_k, experts) if factor else (0,)

    def floats(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    return [
        x.new_empty(tokens, top_k, dtype=torch.int64),
        x.new_empty((tokens, top_k) if factor else 0, dtype=torch.int64),
        floats(tokens, top_k),
        floats(),
        floats(),
        floats(experts + 5),
        x.new_empty(counts_shape, dtype=torch.int32),
        floats(tokens, experts),
        floats(tokens),
        floats(groups, experts),
        torch.empty_like(x) if half_width else x.new_empty(0),
    ]


@torch.library.custom_op(
    "fmoe_cuda::router_backward",
    mutates_args=(),
    schema="(Tensor? d_weights, Tensor? d_balance, Tensor? d_z, Tensor? d_tokens, Tensor x, Tensor weight, "
    "Tensor? mask, Tensor expert, Tensor stats, Tensor logits, Tensor logsumexp, Tensor fraction, "
    f"bool normalize, float scale, {_TILES}, {_NOISE}, bool[] needs) -> (Tensor, Tensor)",
)
def _router_backward(d_weights, d_balance, d_z, d_tokens, x, weight, mask, expert, stats, logits, logsumexp, *others):
    """Return the gradients of the tokens, which include the experts' gradient ``d_tokens``, and of ``weight``."""
    fraction, normalize, scale, group_size, sequences, sequence_length, half_width, key, first_group, needs = others
    # `x` is the tokens with any jitter applied.
    tiles = TokenTiles(x.shape[0], group_size, sequences, sequence_length)
    losses = calls.LossGradients(d_balance, d_z, fraction, stats, mask, tiles)
    # bfloat16 has float32's range: the gradient of logits may be rounded like those of other linear maps.
    is_rounded = x.dtype == weight.dtype == torch.bfloat16
    d_logits = calls.route_backward(
        logits,
        expert,
        logsumexp,
        d_weights,
        None,
        None,
        losses,
        is_sigmoid=False,
        normalize=normalize,
        scale=scale,
        dtype=torch.bfloat16 if is_rounded else None,
    )
    d_x = x.new_empty(0)
    d_weight = weight.new_empty(0)
    if needs[0]:
        factors = (d_logits, weight) if is_rounded else (d_logits, weight.float())
        if half_width:
            d_x = torch.mm(*factors).to(x.dtype)
            d_x = calls.jitter(d_x, key, first_group, half_width, tiles, d_tokens)
        elif d_tokens is None:
            d_x = torch.mm(*factors).to(x.dtype)
        else:
            d_x = torch.addmm(d_tokens.to(d_logits.dtype), *factors).to(x.dtype)
    if needs[1]:
        d_weight = torch.mm(d_logits.t(), x) if is_rounded else (d_logits.t() @ x.float()).to(weight.dtype)
    return d_x, d_weight


@_router_backward.register_fake
def _(d_weights, d_balance, d_z, d_tokens, x, weight, *others):
    needs = others[-1]
    return tuple(
        torch.empty_like(t) if needed else t.new_empty(0) for t, needed in zip((x, weight), needs, strict=True)
    )


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mask: Tensor | None, options: tuple[Any, ...]) -> tuple[Any, ...]:
        expert, kept, weights, balance, z, stats, tile_count, *inner = _router(x, weight, mask, *options)
        logits, logsumexp, fraction, jittered = inner
        _, _, _, normalize, scale, _, _, _, *shape, factor, half_width, key, first_group = options
        ctx.save_for_backward(jittered if half_width else x, weight, mask, expert, stats, logits, logsumexp, fraction)
        ctx.options = (normalize, scale, *shape, half_width, key, first_group)
        chosen = kept if factor else expert
        ctx.mark_non_differentiable(chosen, stats, tile_count)
        ctx.set_materialize_grads(False)
        tokens = x.view_as(x) if ctx.needs_input_grad[0] else None
        return chosen, weights, balance, z, stats, tile_count, tokens

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _chosen: None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_weights, d_balance, d_z, _, _, d_tokens = (None if d is None else d.contiguous() for d in gradients)
        if d_weights is None and d_balance is None and d_z is None:
            return d_tokens, None, None, None
        needs = list(ctx.needs_input_grad[:2])
        gradients = (d_weights, d_balance, d_z, d_tokens)
        d_x, d_weight = _router_backward(*gradients, *ctx.saved_tensors, *ctx.options, needs)
        return d_x if needs[0] else None, d_weight if needs[1] else None, None, None


def _product32(a: Tensor, b: Tensor, addend: Tensor | None = None) -> Tensor:
    """Return ``a @ b + addend`` in float32; products of 16-bit factors are exact."""
    if not a.is_cuda or a.dtype != b.dtype or a.dtype == torch.float32:
        a = a.float()
        b = b.float()
        return torch.mm(a, b) if addend is None else torch.addmm(addend, a, b)
    if addend is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    try:
        return torch.addmm(addend, a, b, out_dtype=torch.float32)
    except RuntimeError:  # older versions of torch want an addend of the dtype of the factors
        return addend.add_(torch.mm(a, b, out_dtype=torch.float32))


@register_flop_formula(torch.ops.fmoe_cuda.router)
def _flops(x, weight, *others, out_shape=None) -> int:
    return 2 * x[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.fmoe_cuda.router_backward)
def _flops_backward(d_weights, d_balance, d_z, d_tokens, x, weight, *others, **options) -> int:
    return 2 * x[0] * weight[0] * weight[1] * sum(others[-1])
