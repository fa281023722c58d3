"""Feed-forward experts by the native CPU backend: one operation forward, one backward.

The operations are torch custom ops with fake kernels and derivatives, so that checkpointing and torch.compile support
them. Call `fmoe.kernels.native.loader.load` first.

Shape letters: T tokens, K experts per token, M rows (kept assignments, sorted by expert), L experts, D width, H hidden
width, P output width of the first map (2 H if gated, else H).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from fmoe.kernels import backends, reference
from fmoe.kernels.backends import ACTIVATIONS, activation_code


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
    perm_N: Tensor | None = None,
    inverse_TK: Tensor | None = None,
    weight_TK: Tensor | None = None,
    offsets: tuple[Tensor | None, Tensor | None] = (None, None),
    into_main_grad: bool = False,
) -> Tensor:
    """Compute `fmoe.kernels.expert_ffn` of rows by the native CPU backend: [M, D] -> [M, D].

    With ``perm_N``, the input is tokens: gather a row for each assignment, apply the experts, and combine their
    outputs: [T, D] -> [T, D].

    Args:
        rows_MD: rows [M, D]; with ``perm_N``, tokens [T, D].
        counts: number of rows of each expert, on the CPU.
        perm_N, inverse_TK: fields of a `fmoe.kernels.rows.DispatchPlan`.
        weight_TK: combine weights. Without ``perm_N``, weights [M] of the rows, which only the backward pass uses
            (`fmoe.kernels.rows.weigh_gradient`).
        offsets: unused; the CUDA backend has the same argument.
        into_main_grad: whether the backward pass adds the gradients of ``w_in_LPD`` and ``w_out_LDH`` to their
            attribute ``main_grad``, if usable (see the function `main_grad`). It then sets
            ``grad_added_to_main_grad``, as Megatron does. With ``create_graph`` it does neither. No other operation
            may use the same matrices: the gradients from that operation would be lost.

    Raises:
        NotImplementedError: an input has a forward-mode tangent.
    """
    check_forward_mode(rows_MD, w_in_LPD, b_in_LP, w_out_LDH, b_out_LD, weight_TK)
    if weight_TK is not None:
        weight_TK = weight_TK.float().contiguous()
    counts = counts if isinstance(counts, Tensor) else torch.tensor(counts, dtype=torch.int64, device="cpu")
    parameters = [None if p is None else p.contiguous() for p in (w_in_LPD, b_in_LP, w_out_LDH, b_out_LD)]
    options = (activation_code(activation), gated, _is_wide, into_main_grad)
    plan = (perm_N, inverse_TK, weight_TK, counts)
    return torch.ops.fmoe_native.expert_ffn(rows_MD.contiguous(), *plan, *parameters, *options)[0]


def check_forward_mode(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError if a tensor has a forward-mode tangent.

    Without this check, the tangent would be lost silently if no tensor requires a gradient.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:  # outside of any dual_level
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError("fused experts have no forward-mode derivatives (torch.autograd.forward_ad, jvp)")


def differentiable_gradients(
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad: Tensor,
    *,
    perm: Tensor | None,
    counts: Sequence[int],
    activation: int,
    gated: bool,
) -> list[Tensor | None]:
    """Return the gradients of `expert_ffn`, computed in plain torch, so that they can be differentiated again.

    Args:
        inputs: x, weight, w_in, b_in, w_out, b_out of the operation.
        needs: whether the gradient of each input is needed.
        grad: gradient of the output.
        perm: ``perm_N`` of the operation.
        activation: index of the activation in `ACTIVATIONS`.

    Returns:
        The gradient of each input; None if it is not needed.
    """
    plain = functools.partial(
        reference.expert_ffn_of_tokens,
        perm_N=perm,
        counts=counts,
        activation=ACTIVATIONS[activation],
        gated=gated,
    )
    return reference.gradients(plain, inputs, needs, grad)


# Whether to multiply bf16 in float32: on a processor without bf16 GEMMs, torch's bf16 GEMMs are several times slower.
_is_wide = False


def register(huge_pages: bool = True) -> None:
    """Register derivatives, fake kernels and FLOP formulas of the native operations. Call it once, after loading them.

    Args:
        huge_pages: use huge pages for weights and for the memory of the operations, if the system has them.
    """
    global _is_wide
    torch.ops.fmoe_native.huge_pages(huge_pages)
    _is_wide = not torch.ops.fmoe_native.has_bf16_gemm()
    backends.native_is_loaded = True
    torch.library.register_fake("fmoe_native::expert_ffn", _fake)
    torch.library.register_fake("fmoe_native::expert_ffn_backward", _fake_backward)
    torch.library.register_autograd("fmoe_native::expert_ffn", _backward, setup_context=_keep)
    register_flop_formula(torch.ops.fmoe_native.expert_ffn)(_flops)
    register_flop_formula(torch.ops.fmoe_native.expert_ffn_backward)(_flops_backward)


def _fake(
    x: Tensor, perm: Tensor | None, inverse: Tensor | None, weight: Tensor | None, count: Tensor, w_in: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] if perm is None else torch.library.get_ctx().new_dynamic_size()
    return torch.empty_like(x), x.new_empty(rows, w_in.shape[1])


def _fake_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    perm: Tensor | None,
    inverse: Tensor | None,
    weight: Tensor | None,
    count: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    activation: int,
    gated: bool,
    wide: bool,
    needs: Sequence[bool],
    sum_in: Tensor | None,
    sum_out: Tensor | None,
) -> tuple[Tensor, ...]:
    def like(needed: bool, tensor: Tensor | None) -> Tensor:
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
    """Count the FLOPs of the two GEMMs of `expert_ffn`, as `torch.utils.flop_counter` does.

    Args:
        w_in, w_out: shapes of the weights of L experts, [L, H or 2 H, D] and [L, D, H].
    """
    return 2 * rows * (w_in[1] * w_in[2] + w_out[1] * w_out[2])


def backward_flops(rows: int, w_in: Sequence[int], w_out: Sequence[int], needs: Sequence[bool]) -> int:
    """Count the FLOPs of the GEMMs in the backward pass of `expert_ffn`.

    Args:
        needs: whether the gradients of x, weight, w_in, b_in, w_out and b_out are computed.
    """
    needs_x, _, needs_w_in, _, needs_w_out, _ = needs
    first, second = 2 * rows * w_in[1] * w_in[2], 2 * rows * w_out[1] * w_out[2]
    return second + needs_w_out * second + (needs_w_in + needs_x) * first


# Called with shapes in place of tensors.
def _flops(
    x: Any, perm: Any, inverse: Any, weight: Any, count: Any, w_in: Any, b_in: Any, w_out: Any, *_: Any, out_shape: Any
) -> int:
    return forward_flops(out_shape[1][0], w_in, w_out)


def _flops_backward(*arguments: Any, **_options: Any) -> int:
    _grad, _x, hidden, _perm, _inverse, _weight, _count, w_in, _b_in, w_out, *others = arguments
    needs = others[4]  # after b_out, activation, gated, wide
    return backward_flops(hidden[0], w_in, w_out, needs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, perm, inverse, weight, count, w_in, b_in, w_out, b_out, *ctx.options = inputs
    ctx.save_for_backward(x, perm, inverse, weight, count, w_in, b_in, w_out, b_out, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


_DIFFERENTIABLE = (0, 3, 5, 6, 7, 8)  # positions of x, weight, w_in, b_in, w_out, b_out among the arguments


def _backward(ctx: Any, grad: Tensor | None, _grad_hidden: None) -> tuple[Tensor | None, ...]:
    nothing: list[Tensor | None] = [None] * 13
    if grad is None:
        return tuple(nothing)
    x, perm, inverse, weight, count, w_in, b_in, w_out, b_out, hidden = ctx.saved_tensors
    activation, gated, wide, into_main_grad = ctx.options
    needs = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    if torch.is_grad_enabled():  # create_graph
        options = {"perm": perm, "counts": count.tolist(), "activation": activation, "gated": gated}
        gradients = differentiable_gradients((x, weight, w_in, b_in, w_out, b_out), needs, grad, **options)
        for position, gradient in zip(_DIFFERENTIABLE, gradients, strict=True):
            nothing[position] = gradient
        return tuple(nothing)
    sums: list[Tensor | None] = [None, None]
    if into_main_grad:
        sums = [main_grad(w) if n else None for w, n in ((w_in, needs[2]), (w_out, needs[4]))]
    gradients = list(
        torch.ops.fmoe_native.expert_ffn_backward(
            grad.contiguous(),
            *(x, hidden, perm, inverse, weight, count, w_in, b_in, w_out, b_out, activation, gated, wide, needs, *sums),
        )
    )
    for number, w, total in ((2, w_in, sums[0]), (4, w_out, sums[1])):
        if total is not None:
            nothing[_DIFFERENTIABLE[number]] = added_to_main_grad(w)
            needs[number] = False
    for position, needed, gradient in zip(_DIFFERENTIABLE, needs, gradients, strict=True):
        if needed:
            nothing[position] = gradient
    return tuple(nothing)


def added_to_main_grad(weight: Tensor) -> Tensor | None:
    """Set ``weight.grad_added_to_main_grad`` to True, and return the gradient of the weight to give to autograd.

    With post-accumulate hooks, the result is an uninitialized tensor: autograd runs these hooks only for a gradient.
    Without them, the result is None. If ``weight.grad`` is None too, it is set to an expanded scalar, which takes no
    memory. Megatron needs a ``grad`` that is not None, but does not read it.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if weight._post_accumulate_grad_hooks:
        return torch.empty_like(weight)
    if weight.grad is None:
        weight.grad = weight.new_zeros(()).expand_as(weight)
    return None


def main_grad(weight: Tensor) -> Tensor | None:
    """Return the ``main_grad`` in which Megatron accumulates a parameter's gradient; None if it is not usable.

    It is usable if it is contiguous, in float32, and has the parameter's shape and device. The parameter must have
    Megatron's attribute ``grad_added_to_main_grad``. It must have no tensor hooks, because gradients added to
    ``main_grad`` bypass them.
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
