"""Feed-forward experts by the native CPU backend: one operation forward, one backward.

The operations are torch custom ops with fake kernels and derivatives, so that checkpointing and torch.compile support
them. Call `fmoe.kernels.native.loader.load` first.

Shape letters: T tokens, K experts per token, M rows (kept assignments, sorted by expert), L experts, D width, H hidden
width, P output width of the first map (2 H if gated, else H).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fmoe.kernels import backends, fused
from fmoe.kernels.backends import activation_code
from fmoe.kernels.glu import Activation
from fmoe.runtime.deferral import deferrable


def expert_ffn(
    rows_MD: Tensor,
    w_in_LPD: Tensor,
    b_in_LP: Tensor | None,
    w_out_LDH: Tensor,
    b_out_LD: Tensor | None,
    counts: Tensor | Sequence[int],
    activation: Activation,
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
            attribute ``main_grad``, if it is contiguous and in float32. It then sets
            ``grad_added_to_main_grad``, as Megatron does. With ``create_graph`` it does neither. No other operation
            may use the same matrices: the gradients from that operation would be lost.

    Raises:
        NotImplementedError: an input has a forward-mode tangent.
    """
    fused.check_forward_mode(rows_MD, w_in_LPD, b_in_LP, w_out_LDH, b_out_LD, weight_TK)
    if weight_TK is not None:
        weight_TK = weight_TK.float().contiguous()
    counts = counts if isinstance(counts, Tensor) else torch.tensor(counts, dtype=torch.int64, device="cpu")
    parameters = [None if p is None else p.contiguous() for p in (w_in_LPD, b_in_LP, w_out_LDH, b_out_LD)]
    options = (activation_code(activation), gated, _is_wide, into_main_grad)
    plan = (perm_N, inverse_TK, weight_TK, counts)
    return torch.ops.fmoe_native.expert_ffn(rows_MD.contiguous(), *plan, *parameters, *options)[0]


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


def _fake(x: Tensor, perm: Tensor | None, _inverse: Any, _weight: Any, _count: Any, w_in: Tensor, *_: Any) -> Any:
    rows = x.shape[0] if perm is None else torch.library.get_ctx().new_dynamic_size()
    return torch.empty_like(x), x.new_empty(rows, w_in.shape[1])


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    _, x, _, _, _, weight, _, w_in, b_in, w_out, b_out, _, _, _, needs, sum_in, sum_out = arguments
    is_returned = list(needs)
    is_returned[2] &= sum_in is None
    is_returned[4] &= sum_out is None
    tensors = (x, weight, w_in, b_in, w_out, b_out)
    return tuple(
        torch.empty_like(t) if returned and t is not None else x.new_empty(0)
        for t, returned in zip(tensors, is_returned, strict=True)
    )


# Called with shapes in place of tensors.
def _flops(*arguments: Any, out_shape: Any) -> int:
    _x, _perm, _inverse, _weight, _count, w_in, _b_in, w_out, *_ = arguments
    return fused.forward_flops(out_shape[1][0], w_in, w_out)


def _flops_backward(*arguments: Any, **_options: Any) -> int:
    _, _, hidden, _, _, _, _, w_in, _, w_out, _, _, _, _, needs, *_ = arguments
    return fused.backward_flops(hidden[0], w_in, w_out, needs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation, ctx.gated, ctx.wide, ctx.into_main_grad = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.is_deferrable = True
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


@deferrable
def _backward(ctx: Any, grad: Tensor | None, _grad_hidden: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 13
    x, perm, inverse, weight, count, w_in, b_in, w_out, b_out, hidden = ctx.saved_tensors
    need_x, _, _, need_weight, _, *need_parameters = ctx.needs_input_grad[:9]
    needs = [need_x, need_weight, *need_parameters]

    def run(*sums: Tensor | None) -> Sequence[Tensor]:
        tensors = (grad.contiguous(), x, hidden, perm, inverse, weight, count, w_in, b_in, w_out, b_out)
        options = (ctx.activation, ctx.gated, ctx.wide)
        return torch.ops.fmoe_native.expert_ffn_backward(*tensors, *options, needs, *sums)

    d_x, d_weight, *d_parameters = fused.gradients(
        (x, weight, w_in, b_in, w_out, b_out),
        needs,
        grad,
        run,
        perm=perm,
        counts=count.tolist,
        activation=ctx.activation,
        gated=ctx.gated,
        into_main_grad=ctx.into_main_grad,
    )
    return d_x, None, None, d_weight, None, *d_parameters, None, None, None, None
