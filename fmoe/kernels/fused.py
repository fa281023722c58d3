"""What the fused operations of the native and the CUDA backend share: derivatives, accumulation, FLOPs.

Both backends compute feed-forward experts in one operation forward and one backward.

Shape letters: T tokens, M rows, L experts, D width, H hidden width.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fmoe.kernels import reference
from fmoe.kernels.backends import ACTIVATIONS

NAMES = ("x", "weight", "w_in", "b_in", "w_out", "b_out")  # inputs with gradients


def check_forward_mode(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError if a tensor has a forward-mode tangent.

    Without this check, the tangent would be lost silently if no tensor requires a gradient.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:  # outside of any dual_level
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError("fused experts have no forward-mode derivatives (torch.autograd.forward_ad, jvp)")


def gradients(
    inputs: Sequence[Any],
    needs: Sequence[bool],
    grad: Tensor,
    run: Callable[[Tensor | None, Tensor | None], Sequence[Tensor]],
    *,
    perm: Tensor | None,
    counts: Callable[[], Sequence[int]],
    activation: int,
    gated: bool,
    into_main_grad: bool,
) -> list[Tensor | None]:
    """Return the gradient of each of `NAMES`; None if it is not needed, or was added to ``main_grad``.

    With ``create_graph``, they are computed in plain torch, so that they can be differentiated again.

    Args:
        inputs: the tensors of `NAMES`.
        needs: whether the gradient of each input is needed.
        grad: gradient of the output.
        run: function that runs the operation for the backward pass. Its arguments are the tensors to which it adds the
            gradients of ``w_in`` and ``w_out``; None to return these.
        perm: assignment of each row; None if ``x`` holds rows.
        counts: function that returns the number of rows of each expert.
        activation: index of the activation in `ACTIVATIONS`.
        into_main_grad: as in `fmoe.kernels.native.ops.expert_ffn`.
    """
    if torch.is_grad_enabled():  # create_graph
        plain = functools.partial(
            reference.expert_ffn_of_tokens,
            perm_N=perm,
            counts=counts(),
            activation=ACTIVATIONS[activation],
            gated=gated,
        )
        return reference.gradients(plain, inputs, needs, grad)
    _, _, w_in, _, w_out, _ = inputs
    sum_in = _main_grad(w_in) if into_main_grad and needs[2] else None
    sum_out = _main_grad(w_out) if into_main_grad and needs[4] else None
    gradients = run(sum_in, sum_out)
    results = [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]
    if sum_in is not None:
        results[2] = _added_to_main_grad(w_in)
    if sum_out is not None:
        results[4] = _added_to_main_grad(w_out)
    return results


def _added_to_main_grad(weight: Tensor) -> Tensor | None:
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


def _main_grad(weight: Tensor) -> Tensor | None:
    """Return the ``main_grad`` in which Megatron accumulates a parameter's gradient; None if it is not usable.

    It is usable if it is contiguous, in float32, and has the parameter's shape and device. The parameter must have
    Megatron's attribute ``grad_added_to_main_grad``. It must have no tensor hooks, because gradients added to
    ``main_grad`` bypass them.
    """
    total = getattr(weight, "main_grad", None)
    is_usable = (
        hasattr(weight, "grad_added_to_main_grad")
        and not weight._backward_hooks
        and isinstance(total, Tensor)
        and total.dtype == torch.float32
        and total.device == weight.device
        and total.is_contiguous()
        and total.shape == weight.shape
    )
    return total if is_usable else None


def forward_flops(rows: int, w_in: Sequence[int], w_out: Sequence[int]) -> int:
    """Count the FLOPs of the two GEMMs of a forward pass, as `torch.utils.flop_counter` does.

    Args:
        w_in, w_out: shapes of the weights of L experts, [L, H or 2 H, D] and [L, D, H].
    """
    return 2 * rows * (w_in[1] * w_in[2] + w_out[1] * w_out[2])


def backward_flops(rows: int, w_in: Sequence[int], w_out: Sequence[int], needs: Sequence[bool]) -> int:
    """Count the FLOPs of the GEMMs of a backward pass.

    Args:
        needs: for each of `NAMES`, whether its gradient is computed.
    """
    needs_x, _, needs_w_in, _, needs_w_out, _ = needs
    first = 2 * rows * w_in[1] * w_in[2]
    second = 2 * rows * w_out[1] * w_out[2]
    return second + needs_w_out * second + (needs_w_in + needs_x) * first
