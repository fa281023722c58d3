"""Auxiliary losses as plain functions, and the Function that adds them to the backward pass.

Each is counted within a routing group and averaged over groups by their number of tokens, so that it is the same
however the batch is spread over micro batches and ranks. Shapes: G groups, S places of a group, E experts, K choices.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Factors of the losses where a layer is told none: balance as in Switch (section 2.2), z as in ST-MoE, importance and
# load as in arXiv 1701.06538, sequence balance as in DeepSeek-V3.
DEFAULT_LOSS_WEIGHTS = {"balance": 1e-2, "z": 1e-3, "importance": 1e-1, "load": 1e-1, "sequence_balance": 1e-4}


def load_balancing_loss(probs_GSE: Tensor, load_GE: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """``E * sum_e f_e P_e``, 1 when balanced (Switch, arXiv 2101.03961 equations 4-6; GShard's ``l_aux``, arXiv
    2006.16668 algorithm 1, is the same up to a constant).

    E is the number of experts in all, never those of one rank.

    Args:
        probs_GSE: the router's probabilities, differentiable.
        load_GE: how often the group chose each expert, before any choice was dropped for capacity.
        valid_GS: which places hold a token; None for all.

    Returns:
        A scalar; 0 when there is no token.
    """
    num_groups, size, num_experts = probs_GSE.shape
    load_GE = load_GE.to(torch.promote_types(probs_GSE.dtype, torch.float32))
    fraction_GE = load_GE / load_GE.sum(1, keepdim=True).clamp(min=1)
    if valid_GS is None:
        per_group_G = (fraction_GE * probs_GSE.mean(1)).sum(1)
        return num_experts * (per_group_G.mean() if num_groups and size else probs_GSE.sum())
    valid_GS = valid_GS.to(probs_GSE.dtype)
    tokens_G = valid_GS.sum(1)
    mean_GE = (probs_GSE * valid_GS.unsqueeze(-1)).sum(1) / tokens_G.clamp(min=1).unsqueeze(1)
    per_group_G = (fraction_GE * mean_GE).sum(1)
    return num_experts * (per_group_G * tokens_G).sum() / tokens_G.sum().clamp(min=1)


def sequence_balance_loss(scores_GSE: Tensor, load_GE: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """`load_balancing_loss` of scores that do not sum to one, normalised for each token (DeepSeek-V3, arXiv 2412.19437
    equations 17-20; a routing group is the sequence).

    Args:
        scores_GSE: positive affinities of tokens and experts, differentiable.
        load_GE: how often each expert is among the K best scores of the group's tokens.
        valid_GS: which places hold a token; None for all.
    """
    return load_balancing_loss(scores_GSE / scores_GSE.sum(-1, keepdim=True).clamp(min=1e-20), load_GE, valid_GS)


def importance_loss(gates_GSE: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """``CV(Importance)^2``, Importance being the sum of an expert's gate values over the group's tokens (Shazeer et
    al., arXiv 1701.06538 equations 6-7).

    Args:
        gates_GSE: combine weight of each expert, 0 where it was not chosen; differentiable.
        valid_GS: which places hold a token; None for all.

    Returns:
        A scalar; 0 when there is no token.
    """
    return _squared_variation(gates_GSE, valid_GS)


def load_loss(chosen_GSE: Tensor, valid_GS: Tensor | None = None) -> Tensor:
    """``CV(Load)^2``, Load being a smooth estimate of how many of the group's tokens an expert gets (arXiv 1701.06538
    equations 10-11).

    Args:
        chosen_GSE: probability P(x, i) that a new draw of an expert's noise alone has it chosen (equation 9).
        valid_GS: which places hold a token; None for all.

    Returns:
        A scalar; 0 when there is no token.
    """
    return _squared_variation(chosen_GSE, valid_GS)


def _squared_variation(value_GSE: Tensor, valid_GS: Tensor | None) -> Tensor:
    """Variance over experts of the sums over a group's tokens, over the mean squared; averaged by tokens."""
    if valid_GS is None:
        valid_GS = value_GSE.new_ones(value_GSE.shape[:2])
    valid_GS = valid_GS.to(value_GSE.dtype)
    total_GE = (value_GSE * valid_GS.unsqueeze(-1)).sum(1)
    mean_G1 = total_GE.mean(1, keepdim=True)
    square_G = (total_GE - mean_G1).square().mean(1) / mean_G1.square().squeeze(1).clamp(min=1e-20)
    tokens_G = valid_GS.sum(1)
    return (square_G * tokens_G).sum() / tokens_G.sum().clamp(min=1)


def router_z_loss(logsumexp_T: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """Mean over tokens of ``logsumexp(logits)^2``, which keeps router logits small (ST-MoE, arXiv 2202.08906
    equation 5).

    Args:
        logsumexp_T: of each token's logits, differentiable.
        mask_T: which tokens are routed; None for all.
    """
    square_T = logsumexp_T.square()
    if mask_T is None:
        return square_T.mean() if square_T.numel() else square_T.sum()
    mask_T = mask_T.to(square_T.dtype)
    return (square_T * mask_T).sum() / mask_T.sum().clamp(min=1)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss, scale, on_backward):
        ctx.scale, ctx.on_backward = scale, on_backward
        ctx.like = None if loss is None else (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_x):
        ctx.on_backward()
        grad_loss = None
        if ctx.like is not None:
            dtype, device = ctx.like
            grad_loss = torch.as_tensor(ctx.scale(), dtype=dtype, device=device).reshape(())
        return grad_x, grad_loss, None, None


def attach_loss(
    x: Tensor, loss: Tensor | None, scale: Callable[[], float | Tensor], on_backward: Callable[[], None] = lambda: None
) -> Tensor:
    """``x`` unchanged; its backward pass also sends ``scale()`` into ``loss`` (None: there is none), as if the loss had
    been added to the training loss with that factor, and calls ``on_backward()`` once.

    The result is a view made by a Function, which must not be changed in place: attach to what users never see.

    A forward pass may run twice (activation recomputation), a backward pass runs once: whatever is counted belongs
    into ``on_backward``.
    """
    return _AttachLoss.apply(x, loss, scale, on_backward)


_default_scale: float | Tensor = 1.0


def set_loss_scale(value: float | Tensor) -> None:
    """The factor between auxiliary losses and the backward pass, for every layer that was given none of its own.

    A trainer sets it to what its own loss is multiplied with: (loss scale of fp16) / (micro batches a step). It is 1
    for plain ``loss.backward()``.
    """
    global _default_scale
    _default_scale = value


def loss_scale() -> float | Tensor:
    """What `set_loss_scale` was told last."""
    return _default_scale
