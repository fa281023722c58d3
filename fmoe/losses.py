"""Auxiliary losses as plain functions, and the Function that adds them to the backward pass.

Each is counted within a routing group and averaged over groups by their number of tokens, so that it is the same
however the batch is spread over micro batches and ranks. Shapes: G groups, S places of a group, E experts, K choices.
"""

from collections.abc import Callable

import torch
from torch import Tensor


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
    fraction_GE = load_GE / load_GE.sum(1, keepdim=True).clamp(min=1)
    if valid_GS is None:
        per_group_G = (fraction_GE * probs_GSE.mean(1)).sum(1)
        return num_experts * (per_group_G.mean() if num_groups and size else probs_GSE.sum())
    valid_GS = valid_GS.to(probs_GSE.dtype)
    tokens_G = valid_GS.sum(1)
    mean_GE = (probs_GSE * valid_GS.unsqueeze(-1)).sum(1) / tokens_G.clamp(min=1).unsqueeze(1)
    per_group_G = (fraction_GE * mean_GE).sum(1)
    return num_experts * (per_group_G * tokens_G).sum() / tokens_G.sum().clamp(min=1)


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
    def forward(ctx, y, loss, scale, on_backward):
        ctx.scale, ctx.on_backward, ctx.like = scale, on_backward, (loss.dtype, loss.device)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad_y):
        ctx.on_backward()
        dtype, device = ctx.like
        scale = torch.as_tensor(ctx.scale(), dtype=dtype, device=device).reshape(())
        return grad_y, scale, None, None


def attach_loss(
    y: Tensor, loss: Tensor, scale: Callable[[], float | Tensor], on_backward: Callable[[], None] = lambda: None
) -> Tensor:
    """``y`` unchanged; its backward pass also sends ``scale()`` into ``loss``, as if the loss had been added to the
    training loss with that factor, and calls ``on_backward()`` once.

    A forward pass may run twice (activation recomputation), a backward pass runs once: whatever is counted belongs
    into ``on_backward``.
    """
    return _AttachLoss.apply(y, loss, scale, on_backward)


class LossScale:
    """The factor between a layer's auxiliary loss and what enters the backward pass.

    A trainer sets it to (loss scale of fp16) / (micro batches a step), as it does with its own loss. One object is
    shared by the layers of a model; the module-wide default serves who trains with plain ``loss.backward()``.
    """

    def __init__(self, value: float | Tensor = 1.0):
        self.value = value

    def __call__(self) -> float | Tensor:
        return self.value


DEFAULT_LOSS_SCALE = LossScale()


def set_loss_scale(value: float | Tensor) -> None:
    """Sets the scale of every layer that was given none of its own; e.g. ``1 / accumulation_steps``."""
    DEFAULT_LOSS_SCALE.value = value
