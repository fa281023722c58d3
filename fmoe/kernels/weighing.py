"""Gradients of combine weights where the experts are, so that rows that come back are not saved.

The gradient of a combine weight is <output of the expert, gradient of the sum>. `combine_unsaved` adds up rows as
`combine` does, but its backward pass returns the gradient of each row's sum without the weight. Where the row was
computed, `weigh_gradient` multiplies it by the weight, which was sent with the row, and computes the product. Neither
is the derivative of its own forward pass; the two together are that of `combine`.

Shape letters: T tokens, D width, K choices per token, M rows of this rank's tokens, R rows of this rank's experts.
"""

from typing import Any

import torch
from torch import Tensor

from fmoe.kernels.padded import PaddedPlan
from fmoe.kernels.rows import DispatchPlan, row_dots


def combine_unsaved(rows_MD: Tensor, weight_TK: Tensor, plan: DispatchPlan | PaddedPlan) -> Tensor:
    """Return ``plan.combine(rows_MD, weight_TK)``; in the backward pass, return each row's gradient without its weight.

    The weights get no gradient: it comes from `weigh_gradient`, through the rows that `DispatchPlan.weights` sends.
    """
    return _CombineUnsaved.apply(rows_MD, weight_TK, plan)


def weigh_gradient(out_RD: Tensor, weight_R: Tensor) -> Tensor:
    """Return ``out_RD``; in the backward pass, multiply its gradient by the weights and compute theirs.

    It saves ``out_RD``, for outputs of any function. Operations of experts that take ``weight_R`` do not.
    """
    return _WeighGradient.apply(out_RD, weight_R)


class _CombineUnsaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, weight_TK: Tensor, plan: Any) -> Tensor:
        ctx.plan, ctx.num_rows = plan, rows_MD.shape[0]
        ctx.save_for_backward(plan.inverse_TK)
        return plan.combine(rows_MD, weight_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        _ = ctx.saved_tensors  # a checkpoint recomputes before gradients are sent, and waits for all of its exchanges
        return ctx.plan.permute(grad_TD, ctx.num_rows), None, None


class _WeighGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, weight_R: Tensor) -> Tensor:
        ctx.save_for_backward(out_RD, weight_R)
        return out_RD.view_as(out_RD)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, Tensor]:
        out_RD, weight_R = ctx.saved_tensors
        dtype = torch.promote_types(weight_R.dtype, out_RD.dtype)
        dot_R = row_dots(grad_RD.to(dtype), out_RD.to(dtype)).to(weight_R.dtype)
        return (grad_RD * weight_R.unsqueeze(1)).to(out_RD.dtype), dot_R
