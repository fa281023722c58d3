"""Feed-forward experts on a GPU: one operation forward, one backward.

The forward pass gathers rows, runs two GEMMs with the activation in between, and combines the results. It saves only
the tokens and the pre-activations. The backward pass gathers the rows again, and recomputes the activation. The host
waits for the GPU only in some GEMMs (`fmoe.kernels.cuda.gemm`).

Shape letters: T tokens, K experts per token, N = T * K assignments, M rows, L experts, D width, H hidden width, P
output width of the first map (2 H if gated, else H).
"""

import functools
from collections.abc import Callable, Sequence
from typing import List, Optional, Tuple  # noqa: UP035  torch infers operator schemas from these

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fmoe.kernels.backends import activation_code
from fmoe.kernels.cuda.gemm import choose, requested
from fmoe.kernels.cuda.variants import NAMES, Backward, Batch, forward
from fmoe.kernels.native import ops as native


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
    gemm: str = "auto",
    into_main_grad: bool = False,
) -> Tensor:
    """Compute `fmoe.kernels.expert_ffn` of rows by CUDA kernels: [M, D] -> [M, D].

    With ``perm_N``, the input is tokens: gather a row for each assignment, apply the experts, and combine their
    outputs: [T, D] -> [T, D].

    Args:
        rows_MD: rows [M, D]; with ``perm_N``, tokens [T, D].
        counts: number of rows of each expert. Without ``perm_N``, a tensor on the device is copied to the host.
        perm_N, inverse_TK: fields of a `fmoe.kernels.rows.DispatchPlan`.
        weight_TK: as in `fmoe.kernels.native.ops.expert_ffn`.
        offsets: ``end_E`` and ``num_kept`` of the `DispatchPlan`; None to compute them from ``counts``.
        gemm: one of `fmoe.kernels.cuda.gemm.VARIANTS`.
        into_main_grad: as in `fmoe.kernels.native.ops.expert_ffn`.

    Raises:
        UserError: ``gemm`` is unknown or unavailable.
        NotImplementedError: an input has a forward-mode tangent.
    """
    native.check_forward_mode(rows_MD, w_in_LPD, b_in_LP, w_out_LDH, b_out_LD, weight_TK)
    limit = on_host = None
    if perm_N is not None:
        end, limit = offsets
        if end is None:
            ends = torch.as_tensor(counts, dtype=torch.int64, device=rows_MD.device).cumsum(0)
            end, limit = ends.int(), ends[-1:]
    else:
        on_host = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        end = _ends_on(rows_MD.device, on_host)
    weight_TK = None if weight_TK is None else weight_TK.float().contiguous()
    given = [rows_MD, w_in_LPD, b_in_LP, w_out_LDH, b_out_LD]
    x, w_in, b_in, w_out, b_out = (None if t is None else t.contiguous() for t in given)
    tensors = (x, perm_N, inverse_TK, weight_TK, end, limit, w_in, b_in, w_out, b_out)
    options = (activation_code(activation), gated, requested(gemm), into_main_grad)
    out, _ = _expert_ffn(*tensors, on_host, *options)
    return out


def _ends_on(device: torch.device, counts: list[int]) -> Tensor:
    """Return the cumulative sums of ``counts``, int32, on ``device``."""
    if counts and counts[0] and min(counts) == max(counts):
        # Equal counts (`fmoe.exchange.PaddedExchange`) need no copy from the host, whose memory would have to outlive
        # every CUDA graph that repeats the copy.
        return torch.arange(counts[0], len(counts) * counts[0] + 1, counts[0], dtype=torch.int32, device=device)
    end = torch.tensor(counts, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    # A copy from pinned memory is asynchronous.
    return end.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else end


@torch.library.custom_op("fmoe_cuda::expert_ffn", mutates_args=())
def _expert_ffn(
    x: Tensor,
    perm: Optional[Tensor],  # noqa: UP045
    inverse: Optional[Tensor],  # noqa: UP045
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
    into_main_grad: bool,
) -> Tuple[Tensor, Tensor]:  # noqa: UP006
    """Return the outputs, and the pre-activations: [N, P] with ``perm``, else [M, P]."""
    batch = Batch(x, perm, inverse, weight, end, limit, w_in, b_in, w_out, b_out, counts, activation, gated)
    if not batch.num_rows:
        return torch.zeros_like(x), x.new_empty(0, w_in.shape[1])
    run = functools.partial(forward, batch)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        return run(choose(gemm, "forward", x, batch.num_rows, w_in, w_out, run))


@_expert_ffn.register_fake
def _(x, perm, inverse, weight, end, limit, w_in, b_in, w_out, b_out, counts, activation, gated, gemm, into_main_grad):
    return torch.empty_like(x), x.new_empty(x.shape[0] if perm is None else perm.shape[0], w_in.shape[1])


@torch.library.custom_op("fmoe_cuda::expert_ffn_backward", mutates_args=())
def _expert_ffn_backward(
    grad: Tensor,
    x: Tensor,
    hidden: Tensor,
    perm: Optional[Tensor],  # noqa: UP045
    inverse: Optional[Tensor],  # noqa: UP045
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
    """Return the gradient of each input in `NAMES`; an empty tensor if it is not needed."""
    batch = Batch(x, perm, inverse, weight, end, limit, w_in, b_in, w_out, b_out, counts, activation, gated)
    return _gradients(batch, grad, hidden, needs, gemm)


def _gradients(
    batch: Batch,
    grad: Tensor,
    hidden: Tensor,
    needs: Sequence[bool],
    gemm: str,
    sum_in: Tensor | None = None,
    sum_out: Tensor | None = None,
) -> list[Tensor]:
    """Return the gradient of each input in `NAMES`; empty if not needed, or if added to ``sum_in`` or ``sum_out``."""
    step = Backward(batch, grad, hidden, needs, sum_in, sum_out)
    if not hidden.shape[0]:
        here = [name for name, is_returned in zip(NAMES, step.returned(), strict=True) if is_returned]
        found = {name: torch.zeros_like(getattr(batch, name)) for name in here}
    else:
        name = "backward" if sum_in is None and sum_out is None else "backward to main_grad"
        with torch.cuda.device_of(batch.x):
            found = step.run(choose(gemm, name, batch.x, batch.num_rows, batch.w_in, batch.w_out, step.rehearse))
    return [found[name] if name in found else hidden.new_empty(0) for name in NAMES]  # one each: torch forbids aliases


@_expert_ffn_backward.register_fake
def _(
    grad,
    x,
    hidden,
    perm,
    inverse,
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
    *tensors, counts, activation, gated, gemm, ctx.into_main_grad = inputs
    ctx.options = (counts, activation, gated, gemm)
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


# Indices of `NAMES` among the arguments.
_DIFFERENTIABLE = (0, 3, 6, 7, 8, 9)


def _backward(ctx, grad, _grad_hidden):
    results: list[Tensor | None] = [None] * 15
    if grad is None:
        return tuple(results)
    x, *tensors, hidden = ctx.saved_tensors
    w_in, w_out = tensors[5], tensors[7]
    needs = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    counts, activation, gated, gemm = ctx.options
    if torch.is_grad_enabled():  # create_graph
        perm, _, weight, end, _, w_in, b_in, w_out, b_out = tensors
        counts = end.diff(prepend=end.new_zeros(1)).tolist() if counts is None else counts
        options = {"perm": perm, "counts": counts, "activation": activation, "gated": gated}
        inputs = (x, weight, w_in, b_in, w_out, b_out)
        gradients = native.differentiable_gradients(inputs, needs, grad, **options)
        for position, gradient in zip(_DIFFERENTIABLE, gradients, strict=True):
            results[position] = gradient
        return tuple(results)
    sums: list[Tensor | None] = [None, None]
    if ctx.into_main_grad:
        sums = [native.main_grad(w) if needed else None for w, needed in ((w_in, needs[2]), (w_out, needs[4]))]
    if sums == [None, None]:
        gradients = _expert_ffn_backward(grad.contiguous(), x, hidden, *tensors, *ctx.options, needs)
    else:  # a plain function: main_grad does not exist under tracing
        batch = Batch(*(x, *tensors, counts, activation, gated))
        with torch.no_grad():
            gradients = [*_gradients(batch, grad.contiguous(), hidden, needs, gemm, *sums)]
    for number, w, total in ((2, w_in, sums[0]), (4, w_out, sums[1])):
        if total is not None:
            results[_DIFFERENTIABLE[number]] = native.added_to_main_grad(w)
            needs[number] = False
    for position, needed, gradient in zip(_DIFFERENTIABLE, needs, gradients, strict=True):
        if needed:
            results[position] = gradient
    return tuple(results)


_expert_ffn.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.fmoe_cuda.expert_ffn)
def _flops(x, perm, inverse, weight, end, limit, w_in, b_in, w_out, *others, out_shape=None) -> int:
    # Dropped assignments are included: only the device knows how many they are.
    return native.forward_flops(out_shape[1][0], w_in, w_out)


@register_flop_formula(torch.ops.fmoe_cuda.expert_ffn_backward)
def _flops_backward(grad, x, hidden, perm, inverse, weight, end, limit, w_in, b_in, w_out, *others, **options) -> int:
    return native.backward_flops(hidden[0], w_in, w_out, others[-1])
