"""Experts' feed-forward blocks on a GPU: one operation forward, one backward; nothing waits for the host.

Forward: rows are gathered, multiplied (`fmoe.ops.cuda.gemm`), activated, multiplied and combined. Kept for the backward
pass are the tokens and the pre-activations alone: rows are gathered again, the activation is computed again in the
kernel of its derivative, and the router's gradient is <active, dO W_out>, which that kernel has in its hands.

Shape letters: T tokens, K choices, N = T * K assignments, M rows, L experts, D width, H hidden width, P height of the
first map (H, twice that where it is gated).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, List, Optional, Tuple  # noqa: UP035  what torch's schemas are read from

import torch
from torch import Tensor

from fmoe.ops import native
from fmoe.ops.cuda import kernels
from fmoe.ops.cuda.gemm import Gemms, asked_way, choose

if TYPE_CHECKING:
    from fmoe.dispatch.plan import DispatchPlan


def takes(rows: Tensor, activation: Callable[[Tensor], Tensor], *parameters: Tensor | None) -> bool:
    """Whether these are for the kernels: of one dtype, where they are loaded, with an activation that they know."""
    given = [rows, *(p for p in parameters if p is not None)]
    return native.knows(activation) and kernels.takes(*given) and all(t.dtype == rows.dtype for t in given)


def expert_ffn(
    rows_MD: Tensor,
    w_in_LPD: Tensor,
    b_in_LP: Tensor | None,
    w_out_LDH: Tensor,
    b_out_LD: Tensor | None,
    counts: Tensor | Sequence[int] | None,
    activation: Callable[[Tensor], Tensor],
    gated: bool = False,
    *,
    plan: "DispatchPlan | None" = None,
    weight_TK: Tensor | None = None,
    gemm: str = "auto",
) -> Tensor:
    """`fmoe.ops.expert_ffn`; with a plan, of tokens: gathered, computed and combined, [T, D] -> [T, D].

    Args:
        counts: rows of each expert, on the host; not looked at with a plan, which has them on the device.
        plan: with ``weight_TK``; ``rows_MD`` are then tokens [T, D].
        gemm: one of `fmoe.ops.cuda.gemm.WAYS`.
    """
    order = place = limit = on_host = None
    if plan is not None:
        order, place = plan.order_N, plan.place_TK
        end, limit = plan.offsets
        weight_TK = weight_TK.float().contiguous()
    else:
        on_host = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        end = torch.tensor(on_host, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        if rows_MD.is_cuda:  # from pinned memory the copy does not wait
            end = end.pin_memory().to(rows_MD.device, non_blocking=True)
    given = [rows_MD, w_in_LPD, b_in_LP, w_out_LDH, b_out_LD]
    x, w_in, b_in, w_out, b_out = (None if t is None else t.contiguous() for t in given)
    code, way = native.code(activation), asked_way(gemm)
    out, _ = _expert_ffn(x, order, place, weight_TK, end, limit, w_in, b_in, w_out, b_out, on_host, code, gated, way)
    return out


@torch.library.custom_op("fmoe_cuda::expert_ffn", mutates_args=())
def _expert_ffn(
    x: Tensor,
    order: Optional[Tensor],  # noqa: UP045
    place: Optional[Tensor],  # noqa: UP045
    weight: Optional[Tensor],  # noqa: UP045
    end: Tensor,
    limit: Optional[Tensor],  # noqa: UP045
    w_in: Tensor,
    b_in: Optional[Tensor],  # noqa: UP045
    w_out: Tensor,
    b_out: Optional[Tensor],  # noqa: UP045
    counts: Optional[List[int]],  # noqa: UP006, UP045
    activation: int,
    gated: bool,
    gemm: str,
) -> Tuple[Tensor, Tensor]:  # noqa: UP006
    """(outputs, pre-activations [N or M, P])."""
    rows = _rows(x, order, place, limit)
    if not rows.shape[0]:
        return torch.zeros_like(x), x.new_empty(0, w_in.shape[1])
    gemms = Gemms(end, choose(gemm, rows, w_in, end), counts)
    hidden = gemms.forward(rows, w_in)
    del rows
    active = kernels.activate(hidden, b_in, end, limit, activation, gated)
    out = gemms.forward(active, w_out)
    if b_out is not None:
        kernels.add_bias(out, b_out, end)
    return (out if place is None else kernels.combine(out, place, weight, limit)), hidden


def _rows(x: Tensor, order: Tensor | None, place: Tensor | None, limit: Tensor | None) -> Tensor:
    return x if order is None else kernels.gather(x, order, place.shape[1], order.shape[0], limit=limit)


@_expert_ffn.register_fake
def _(x, order, place, weight, end, limit, w_in, b_in, w_out, b_out, counts, activation, gated, gemm):
    return torch.empty_like(x), x.new_empty(x.shape[0] if order is None else order.shape[0], w_in.shape[1])


@torch.library.custom_op("fmoe_cuda::expert_ffn_backward", mutates_args=())
def _expert_ffn_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    order: Optional[Tensor],  # noqa: UP045
    place: Optional[Tensor],  # noqa: UP045
    weight: Optional[Tensor],  # noqa: UP045
    end: Tensor,
    limit: Optional[Tensor],  # noqa: UP045
    w_in: Tensor,
    b_in: Optional[Tensor],  # noqa: UP045
    w_out: Tensor,
    b_out: Optional[Tensor],  # noqa: UP045
    counts: Optional[List[int]],  # noqa: UP006, UP045
    activation: int,
    gated: bool,
    gemm: str,
    needs: List[bool],  # noqa: UP006
) -> List[Tensor]:  # noqa: UP006
    """Gradients of x, weight, w_in, b_in, w_out and b_out; empty where they are not needed."""
    needs_x, needs_weight, needs_w_in, needs_b_in, needs_w_out, needs_b_out = needs
    needs_hidden = needs_x or needs_w_in or needs_b_in
    nothing = x.new_empty(0)
    if not hidden.shape[0]:
        given = (x, weight, w_in, b_in, w_out, b_out)
        return [torch.zeros_like(t) if needed else x.new_empty(0) for t, needed in zip(given, needs, strict=True)]
    d_out = _rows(grad, order, place, limit)
    gemms = Gemms(end, choose(gemm, d_out, w_in, end), counts)
    flat = None if weight is None else weight.view(-1)
    found = [nothing] * 6
    if needs_b_out:
        found[5] = kernels.column_sums(d_out, end, b_out.dtype, flat, order)
    if needs_hidden or needs_weight or needs_w_out:
        d_active = gemms.backward(d_out, w_out)
        scaled, d_hidden, d_weight = kernels.activate_backward(
            *(hidden, d_active, flat, order, limit, activation, gated),
            needs_active=needs_w_out,
            needs_hidden=needs_hidden,
            needs_weight=needs_weight,
        )
        del d_active
        if needs_w_out:
            found[4] = gemms.weights(d_out, scaled)
            del scaled
    if needs_weight:
        found[1] = d_weight.view_as(weight)
        if b_out is not None:
            found[1] += _of_bias(grad, b_out, place, end)
    if needs_b_in:
        found[3] = kernels.column_sums(d_hidden, end, b_in.dtype)
    del d_out
    if needs_w_in:
        found[2] = gemms.weights(d_hidden, _rows(x, order, place, limit))
    if needs_x:
        d_rows = gemms.backward(d_hidden, w_in)
        found[0] = d_rows if place is None else kernels.combine(d_rows, place, None, limit)
    return [x.new_empty(0) if gradient is nothing else gradient for gradient in found]  # none is another's alias


def _of_bias(grad_TD: Tensor, b_out_LD: Tensor, place_TK: Tensor, end_L: Tensor) -> Tensor:
    """What the second bias adds to the gradient of the weights, <dO, b_out>: of all experts, then of the chosen."""
    dots_TL = grad_TD.float() @ b_out_LD.float().t()
    expert_TK = torch.searchsorted(end_L, place_TK, right=True)
    is_kept = expert_TK < len(end_L)
    return torch.where(is_kept, dots_TL.gather(1, expert_TK.clamp(max=len(end_L) - 1)), 0)


@_expert_ffn_backward.register_fake
def _(
    grad,
    x,
    hidden,
    order,
    place,
    weight,
    end,
    limit,
    w_in,
    b_in,
    w_out,
    b_out,
    counts,
    activation,
    gated,
    gemm,
    needs,
):
    given = (x, weight, w_in, b_in, w_out, b_out)
    return [torch.empty_like(t) if needed else x.new_empty(0) for t, needed in zip(given, needs, strict=True)]


def _keep(ctx, inputs, output):
    *tensors, counts, activation, gated, gemm = inputs
    ctx.options = (counts, activation, gated, gemm)
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


# Where x, weight, w_in, b_in, w_out and b_out lie among the arguments.
_DIFFERENTIABLE = (0, 3, 6, 7, 8, 9)


def _backward(ctx, grad, _grad_hidden):
    results = [None] * 14
    if grad is None:
        return tuple(results)
    x, *tensors, hidden = ctx.saved_tensors
    needs = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    gradients = _expert_ffn_backward(grad.contiguous(), x, hidden, *tensors, *ctx.options, needs)
    for position, needed, gradient in zip(_DIFFERENTIABLE, needs, gradients, strict=True):
        if needed:
            results[position] = gradient
    return tuple(results)


_expert_ffn.register_autograd(_backward, setup_context=_keep)
