"""Routing from logits to experts and weights, as one differentiable kernel (`fmoe.kernels.cuda.calls.route`).

Shape letters: T tokens, E experts, K experts per token.
"""

from dataclasses import dataclass
from typing import Optional, Tuple  # noqa: UP035  torch infers operator schemas from these

import torch
from torch import Tensor

from fmoe.kernels.cuda import calls


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Routing rule: choose the K experts with the largest ranking values, and weight them by their scores.

    Args:
        is_sigmoid: scores are sigmoids of the logits; by default their softmax.
        by_logits: ranking values are the logits; by default the scores. ``bias_E`` of `route` is added in both cases.
        normalize: divide the weights by their sum over the K chosen experts.
        scale: factor of the weights.
        groups: number of groups into which the experts are divided; 0 for no groups.
        kept_groups: number of groups from which a token's experts are chosen, those with the largest group values.
        best_of: a group value is the sum of the group's ``best_of`` largest ranking values.
    """

    is_sigmoid: bool = False
    by_logits: bool = False
    normalize: bool = True
    scale: float = 1.0
    groups: int = 0
    kept_groups: int = 1
    best_of: int = 1


@dataclass(frozen=True)
class Routed:
    """Result of `route`. ``weight_TK``, ``score_TE`` and ``logsumexp_T`` are differentiable.

    Attributes:
        expert_TK: chosen experts; -1 for tokens whose mask is False.
        score_TE: softmax or sigmoid of the logits.
        logsumexp_T: logsumexp of the logits.
        entropy_T: entropy of the softmax, or of the sigmoids divided by their sum.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    score_TE: Tensor
    logsumexp_T: Tensor
    entropy_T: Tensor


def route(
    logits_TE: Tensor,
    top_k: int,
    rule: Rule,
    *,
    bias_E: Tensor | None = None,
    mask_T: Tensor | None = None,
) -> Routed:
    """Choose the experts and the weights of each token by a rule.

    Args:
        bias_E: added to the ranking values (`Rule`), not to the weights.
        mask_T: bool; False for tokens that are not routed.
    """
    bias_E = None if bias_E is None else bias_E.float().contiguous()
    mask_T = None if mask_T is None else mask_T.contiguous()
    flags = (rule.is_sigmoid, rule.by_logits, rule.normalize, rule.scale)
    groups = (rule.groups, rule.kept_groups, rule.best_of)
    return Routed(*_route(logits_TE.contiguous(), bias_E, mask_T, top_k, *flags, *groups))


@torch.library.custom_op("fmoe_cuda::route", mutates_args=())
def _route(
    logits: Tensor,
    bias: Optional[Tensor],  # noqa: UP045
    mask: Optional[Tensor],  # noqa: UP045
    top_k: int,
    is_sigmoid: bool,
    by_logits: bool,
    normalize: bool,
    scale: float,
    groups: int,
    kept_groups: int,
    best_of: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # noqa: UP006
    expert, weight, score, logsumexp, entropy = calls.route(
        logits,
        bias,
        mask,
        top_k,
        is_sigmoid=is_sigmoid,
        by_logits=by_logits,
        normalize=normalize,
        scale=scale,
        groups=groups,
        kept_groups=kept_groups,
        best_of=best_of,
    )
    assert score is not None
    return expert, weight, score, logsumexp, entropy


@_route.register_fake
def _(logits, bias, mask, top_k, *rule):
    tokens = logits.shape[0]
    new = logits.new_empty
    score = torch.empty_like(logits, dtype=torch.float32)
    return new(tokens, top_k, dtype=torch.int64), new(tokens, top_k), score, new(tokens), new(tokens)


@torch.library.custom_op("fmoe_cuda::route_backward", mutates_args=())
def _route_backward(
    logits: Tensor,
    expert: Tensor,
    logsumexp: Tensor,
    d_weight: Optional[Tensor],  # noqa: UP045
    d_score: Optional[Tensor],  # noqa: UP045
    d_logsumexp: Optional[Tensor],  # noqa: UP045
    is_sigmoid: bool,
    normalize: bool,
    scale: float,
) -> Tensor:
    return calls.route_backward(
        logits,
        expert,
        logsumexp,
        d_weight,
        d_score,
        d_logsumexp,
        is_sigmoid=is_sigmoid,
        normalize=normalize,
        scale=scale,
    )


@_route_backward.register_fake
def _(logits, expert, logsumexp, d_weight, d_score, d_logsumexp, is_sigmoid, normalize, scale):
    return torch.empty_like(logits)


def _keep(ctx, inputs, output):
    logits, _, _, _, is_sigmoid, _, normalize, scale, *_ = inputs
    expert, _, _, logsumexp, entropy = output
    ctx.save_for_backward(logits, expert, logsumexp)
    ctx.rule = (is_sigmoid, normalize, scale)
    ctx.mark_non_differentiable(expert, entropy)
    ctx.set_materialize_grads(False)


def _backward(ctx, _expert, d_weight, d_score, d_logsumexp, _entropy):
    gradients = [None if d is None else d.contiguous() for d in (d_weight, d_score, d_logsumexp)]
    d_logits = None
    if any(d is not None for d in gradients):
        d_logits = _route_backward(*ctx.saved_tensors, *gradients, *ctx.rule)
    return d_logits, *(None,) * 10


_route.register_autograd(_backward, setup_context=_keep)
