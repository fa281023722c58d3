"""Routing from logits to experts and weights, as one differentiable kernel (`fmoe.kernels.cuda.calls.route`).

Shape letters: T tokens, E experts, K experts per token.
"""

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from fmoe.kernels.cuda import calls
from fmoe.kernels.cuda.calls import Rule

RULE = (  # the fields of a `Rule` in the schema of an operation
    "bool is_sigmoid, bool by_logits, bool normalize, float scale, int groups, int kept_groups, int best_of"
)


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
    return Routed(*_route(logits_TE.contiguous(), bias_E, mask_T, top_k, *astuple(rule)))


@torch.library.custom_op(
    "fmoe_cuda::route",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor? bias, Tensor? mask, int top_k, {RULE}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _route(logits, bias, mask, top_k, *rule):
    return calls.route(logits, bias, mask, top_k, Rule(*rule))


@_route.register_fake
def _(logits, _bias, _mask, top_k, *_rule):
    tokens = logits.shape[0]
    new = logits.new_empty
    score = torch.empty_like(logits, dtype=torch.float32)
    return new(tokens, top_k, dtype=torch.int64), new(tokens, top_k), score, new(tokens), new(tokens)


@torch.library.custom_op(
    "fmoe_cuda::route_backward",
    mutates_args=(),
    schema="(Tensor logits, Tensor expert, Tensor logsumexp, Tensor? d_weight, Tensor? d_score, Tensor? d_logsumexp, "
    "bool is_sigmoid, bool normalize, float scale) -> Tensor",
)
def _route_backward(*inputs):
    *tensors, is_sigmoid, normalize, scale = inputs
    return calls.route_backward(*tensors, is_sigmoid=is_sigmoid, normalize=normalize, scale=scale)


@_route_backward.register_fake
def _(logits, *_others):
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
