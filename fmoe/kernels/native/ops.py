"""Experts' feed-forward blocks by the native extension (`fmoe.kernels.native`): one operation forward, one backward.

The operations are torch custom ops with fake kernels and a derivative, so that autocast, checkpointing and
torch.compile take them like any other. `fmoe.kernels.native.loader.load` comes first.

Shape letters: T tokens, K choices, M rows (assignments kept, sorted by expert), L experts, D width, H hidden width, P
height of the first map (H, twice that where it is gated).
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from fmoe.kernels import reference

if TYPE_CHECKING:  # the plan is made of values that these operations take; it imports nothing from here
    from fmoe.kernels.plan import DispatchPlan

_DTYPES = (torch.float32, torch.bfloat16)


def takes(rows: Tensor, activation: Callable[[Tensor], Tensor], *parameters: Tensor | None) -> bool:
    """Whether the native operations know these: of one dtype, float32 or bfloat16, in memory of the CPU."""
    given = [rows, *(p for p in parameters if p is not None)]
    return knows(activation) and all(
        t.device.type == "cpu" and t.dtype == rows.dtype and t.dtype in _DTYPES for t in given
    )


def knows(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether the extension computes it."""
    return code(activation) is not None


def expert_ffn(
    rows_MD: Tensor,
    w_in_LPD: Tensor,
    b_in_LP: Tensor | None,
    w_out_LDH: Tensor,
    b_out_LD: Tensor | None,
    counts: Tensor | Sequence[int],
    activation: Callable[[Tensor], Tensor],
    gated: bool = False,
    *,
    plan: "DispatchPlan | None" = None,
    weight_TK: Tensor | None = None,
    into_main_grad: bool = False,
) -> Tensor:
    """`fmoe.kernels.expert_ffn`; with a plan, of tokens: gathered, computed and combined, [T, D] -> [T, D].

    Args:
        plan: with ``weight_TK``; ``rows_MD`` are then tokens [T, D].
        into_main_grad: gradients of the two matrices are added to their ``main_grad``, and marked as Megatron marks
            them (``grad_added_to_main_grad``), where they have one in float32. Gradients that the same weights get from
            elsewhere are then lost: for who knows that there are none.
    """
    check_forward_mode(rows_MD, w_in_LPD, b_in_LP, w_out_LDH, b_out_LD, weight_TK)
    order = place = None
    if plan is not None:
        order, place, weight_TK = plan.order_N, plan.place_TK, weight_TK.float().contiguous()
    counts = counts if isinstance(counts, Tensor) else torch.tensor(counts, dtype=torch.int64, device="cpu")
    out, _ = torch.ops.fmoe_native.expert_ffn(
        rows_MD.contiguous(),
        order,
        place,
        weight_TK,
        counts,
        w_in_LPD.contiguous(),
        None if b_in_LP is None else b_in_LP.contiguous(),
        w_out_LDH.contiguous(),
        None if b_out_LD is None else b_out_LD.contiguous(),
        code(activation),
        gated,
        _is_wide,
        into_main_grad,
    )
    return out


def check_forward_mode(*tensors: Tensor | None) -> None:
    """Raise where a tensor has a forward-mode tangent, which operations lose where none requires a gradient."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:  # outside of any dual_level
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError("fused experts have no forward-mode derivatives (torch.autograd.forward_ad, jvp)")


def code(activation: Callable) -> int | None:
    """The kernels' number of an activation (kernels.h; the CUDA ones' too); None for one that it does not know."""
    if activation is F.gelu:
        return 0
    if isinstance(activation, functools.partial) and activation.func is F.gelu and not activation.args:
        return {"none": 0, "tanh": 1}.get(activation.keywords.get("approximate", "none"))
    if activation is F.relu:
        return 2
    return 3 if activation is F.silu else None


_ACTIVATIONS = (F.gelu, functools.partial(F.gelu, approximate="tanh"), F.relu, F.silu)  # by their code


def differentiable_gradients(
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad: Tensor,
    *,
    order: Tensor | None,
    counts: Sequence[int],
    activation: int,
    gated: bool,
) -> list[Tensor | None]:
    """Return gradients that can be differentiated again (create_graph), unlike the gradients from the kernels.

    Args:
        inputs: x, weight, w_in, b_in, w_out, b_out of the operation.
        activation: its `code`.
    """
    plain = functools.partial(
        reference.expert_ffn_of_tokens,
        order_N=order,
        counts=counts,
        activation=_ACTIVATIONS[activation],
        gated=gated,
    )
    return reference.gradients(plain, inputs, needs, grad)


# Whether bf16 is multiplied in float32: where the processor has no bf16 GEMMs, torch's are several times slower.
_is_wide = False


def register(huge_pages: bool = True) -> None:
    """Derivatives and fake kernels; called once, when the extension is loaded.

    Args:
        huge_pages: whether weights and what the operations allocate are to lie on them, where the system has them.
    """
    global _is_wide
    torch.ops.fmoe_native.huge_pages(huge_pages)
    _is_wide = not torch.ops.fmoe_native.has_bf16_gemm()
    torch.library.register_fake("fmoe_native::expert_ffn", _fake)
    torch.library.register_fake("fmoe_native::expert_ffn_backward", _fake_backward)
    torch.library.register_autograd("fmoe_native::expert_ffn", _backward, setup_context=_keep)
    register_flop_formula(torch.ops.fmoe_native.expert_ffn)(_flops)
    register_flop_formula(torch.ops.fmoe_native.expert_ffn_backward)(_flops_backward)


def _fake(x, order, place, weight, count, w_in, b_in, w_out, b_out, activation, gated, wide, into_main_grad=False):
    rows = x.shape[0] if order is None else torch.library.get_ctx().new_dynamic_size()
    return torch.empty_like(x), x.new_empty(rows, w_in.shape[1])


def _fake_backward(
    grad,
    x,
    hidden,
    order,
    place,
    weight,
    count,
    w_in,
    b_in,
    w_out,
    b_out,
    activation,
    gated,
    wide,
    needs,
    sum_in,
    sum_out,
):
    def like(needed, tensor):
        return torch.empty_like(tensor) if needed and tensor is not None else x.new_empty(0)

    return (
        like(needs[0], x),
        like(needs[1], weight),
        like(needs[2] and sum_in is None, w_in),
        like(needs[3], b_in),
        like(needs[4] and sum_out is None, w_out),
        like(needs[5], b_out),
    )


def forward_flops(rows: int, w_in: Sequence[int], w_out: Sequence[int]) -> int:
    """Count the FLOPs of the two GEMMs as `torch.utils.flop_counter` does; the CUDA operation uses this formula too.

    Args:
        w_in, w_out: shapes [L, P, D] and [L, D, H].
    """
    return 2 * rows * (w_in[1] * w_in[2] + w_out[1] * w_out[2])


def backward_flops(rows: int, w_in: Sequence[int], w_out: Sequence[int], needs: Sequence[bool]) -> int:
    """As `forward_flops`, of the GEMMs that the gradients of x, weight, w_in, b_in, w_out and b_out need."""
    needs_x, _, needs_w_in, _, needs_w_out, _ = needs
    first, second = 2 * rows * w_in[1] * w_in[2], 2 * rows * w_out[1] * w_out[2]
    return second + needs_w_out * second + (needs_w_in + needs_x) * first


def _flops(x, order, place, weight, count, w_in, b_in, w_out, *others, out_shape=None, **options) -> int:
    return forward_flops(out_shape[1][0], w_in, w_out)


def _flops_backward(grad, x, hidden, order, place, weight, count, w_in, b_in, w_out, *others, **options) -> int:
    needs = others[4]  # after b_out, activation, gated, wide
    return backward_flops(hidden[0], w_in, w_out, needs)


def _keep(ctx, inputs, output):
    x, order, place, weight, count, w_in, b_in, w_out, b_out, *ctx.options = inputs
    ctx.save_for_backward(x, order, place, weight, count, w_in, b_in, w_out, b_out, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _grad_hidden):
    nothing = [None] * 13
    if grad is None:
        return tuple(nothing)
    x, order, place, weight, count, w_in, b_in, w_out, b_out, hidden = ctx.saved_tensors
    activation, gated, wide, into_main_grad = ctx.options
    # Where each of the six lies among the arguments.
    places = {"x": 0, "weight": 3, "w_in": 5, "b_in": 6, "w_out": 7, "b_out": 8}
    needs = [ctx.needs_input_grad[i] for i in places.values()]
    if torch.is_grad_enabled():  # create_graph
        options = {"order": order, "counts": count.tolist(), "activation": activation, "gated": gated}
        gradients = differentiable_gradients((x, weight, w_in, b_in, w_out, b_out), needs, grad, **options)
        for place_of, gradient in zip(places.values(), gradients, strict=True):
            nothing[place_of] = gradient
        return tuple(nothing)
    sums = [None, None]
    if into_main_grad:
        sums = [main_grad(w) if n else None for w, n in ((w_in, needs[2]), (w_out, needs[4]))]
    gradients = list(
        torch.ops.fmoe_native.expert_ffn_backward(
            grad.contiguous(),
            *(x, hidden, order, place, weight, count, w_in, b_in, w_out, b_out, activation, gated, wide, needs, *sums),
        )
    )
    for number, w, total in ((2, w_in, sums[0]), (4, w_out, sums[1])):
        if total is not None:
            w.grad_added_to_main_grad = True
            gradients[number] = torch.empty_like(
                w
            )  # Megatron's hooks wait for one; nobody reads it, no page is touched
    for place_of, needed, gradient in zip(places.values(), needs, gradients, strict=True):
        if needed:
            nothing[place_of] = gradient
    return tuple(nothing)


def main_grad(weight: Tensor) -> Tensor | None:
    """Return Megatron's accumulator of a parameter, or None where gradients cannot be added to it.

    A gradient that is added here passes no tensor hook, so a parameter that has one gets its gradient from autograd.
    """
    total = getattr(weight, "main_grad", None)
    usable = (
        hasattr(weight, "grad_added_to_main_grad")
        and not weight._backward_hooks
        and isinstance(total, Tensor)
        and total.dtype == torch.float32
        and total.device == weight.device
        and total.is_contiguous()
        and total.shape == weight.shape
    )
    return total if usable else None
