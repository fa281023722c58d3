"""Feed-forward experts on a GPU: one operation forward, one backward.

The forward pass gathers rows, runs two GEMMs with the activation in between, and combines the results. It saves only
the tokens and the pre-activations. The backward pass gathers the rows again, and recomputes the activation. The host
waits for the GPU only in some GEMMs (`fmoe.kernels.cuda.gemm`).

Shape letters: T tokens, K experts per token, N = T * K assignments, M rows, L experts, D width, H hidden width, P
output width of the first map (2 H if gated, else H).
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fmoe.kernels import fused
from fmoe.kernels.backends import activation_code
from fmoe.kernels.cuda.gemm import choose, requested
from fmoe.kernels.cuda.variants import Batch, backward, forward
from fmoe.kernels.fused import NAMES
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
    fused.check_forward_mode(rows_MD, w_in_LPD, b_in_LP, w_out_LDH, b_out_LD, weight_TK)
    on_host = None
    end, limit = offsets
    if perm_N is None:
        on_host = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        end = _ends_on(rows_MD.device, on_host)
        limit = None
    elif end is None:
        ends = torch.as_tensor(counts, dtype=torch.int64, device=rows_MD.device).cumsum(0)
        end = ends.int()
        limit = ends[-1:]
    weight_TK = None if weight_TK is None else weight_TK.float()
    tensors = (rows_MD, weight_TK, w_in_LPD, b_in_LP, w_out_LDH, b_out_LD)
    inputs = [None if t is None else t.contiguous() for t in tensors]
    options = (activation_code(activation), gated, requested(gemm), into_main_grad)
    return _expert_ffn(*inputs, perm_N, inverse_TK, end, limit, on_host, *options)[0]


def _ends_on(device: torch.device, counts: list[int]) -> Tensor:
    """Return the cumulative sums of ``counts``, int32, on ``device``."""
    if counts and counts[0] and min(counts) == max(counts):
        # Equal counts (`fmoe.exchange.PaddedExchange`) need no copy from the host, whose memory would have to outlive
        # every CUDA graph that repeats the copy.
        return torch.arange(counts[0], len(counts) * counts[0] + 1, counts[0], dtype=torch.int32, device=device)
    end = torch.tensor(counts, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    # A copy from pinned memory is asynchronous.
    return end.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else end


_FIELDS = (  # of a `Batch`
    "Tensor x, Tensor? weight, Tensor w_in, Tensor? b_in, Tensor w_out, Tensor? b_out, "
    "Tensor? perm, Tensor? inverse, Tensor end, Tensor? limit, SymInt[]? counts, int activation, bool gated"
)


@torch.library.custom_op(
    "fmoe_cuda::expert_ffn",
    mutates_args=(),
    schema=f"({_FIELDS}, str gemm, bool into_main_grad) -> (Tensor, Tensor)",
)
def _expert_ffn(*inputs):
    """Return the outputs, and the pre-activations: [N, P] with ``perm``, else [M, P]."""
    *fields, gemm, _into_main_grad = inputs
    batch = Batch(*fields)
    x = batch.x
    if not batch.num_rows:
        return torch.zeros_like(x), x.new_empty(0, batch.w_in.shape[1])
    run = functools.partial(forward, batch)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        return run(choose(gemm, "forward", x, batch.num_rows, batch.w_in, batch.w_out, run))


@_expert_ffn.register_fake
def _(x, _weight, w_in, _b_in, _w_out, _b_out, perm, *_others):
    return torch.empty_like(x), x.new_empty(x.shape[0] if perm is None else perm.shape[0], w_in.shape[1])


@torch.library.custom_op(
    "fmoe_cuda::expert_ffn_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor hidden, {_FIELDS}, str gemm, bool[] needs) -> Tensor[]",
)
def _expert_ffn_backward(grad, hidden, *inputs):
    """Return the gradient of each input in `NAMES`; an empty tensor if it is not needed."""
    *fields, gemm, needs = inputs
    return _gradients(Batch(*fields), grad, hidden, needs, gemm, {})


@_expert_ffn_backward.register_fake
def _(grad, _hidden, *inputs):
    tensors = inputs[: len(NAMES)]
    needs = inputs[-1]
    return [torch.empty_like(t) if needed else grad.new_empty(0) for t, needed in zip(tensors, needs, strict=True)]


def _gradients(
    batch: Batch, grad: Tensor, hidden: Tensor, needs: Sequence[bool], gemm: str, sums: dict[str, Tensor]
) -> list[Tensor]:
    """Return the gradient of each input in `NAMES`; empty if it is not needed, or is added to a tensor in ``sums``."""
    run = functools.partial(backward, batch, grad, hidden, needs)

    def rehearse(variant: str) -> None:
        run(variant, {name: torch.empty_like(total) for name, total in sums.items()})

    if not batch.num_rows:
        needed = [name for name, is_needed in zip(NAMES, needs, strict=True) if is_needed and name not in sums]
        gradients = {name: torch.zeros_like(getattr(batch, name)) for name in needed}
    else:
        step = "backward to main_grad" if sums else "backward"
        with torch.cuda.device_of(batch.x):
            gradients = run(choose(gemm, step, batch.x, batch.num_rows, batch.w_in, batch.w_out, rehearse), sums)
    # Each gets its own empty tensor: torch forbids aliases.
    return [gradients[name] if name in gradients else hidden.new_empty(0) for name in NAMES]


def _keep(ctx, inputs, output):
    *tensors, counts, activation, gated, gemm, ctx.into_main_grad = inputs
    ctx.options = (counts, activation, gated)
    ctx.gemm = gemm
    ctx.save_for_backward(*tensors, output[1])
    ctx.is_deferrable = True
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


@deferrable
def _backward(ctx, grad, _grad_hidden):
    if grad is None:
        return (None,) * 15
    *tensors, hidden = ctx.saved_tensors
    counts, activation, gated = ctx.options
    needs = list(ctx.needs_input_grad[: len(NAMES)])

    def run(sum_in, sum_out):
        if sum_in is None and sum_out is None:
            return _expert_ffn_backward(grad.contiguous(), hidden, *tensors, *ctx.options, ctx.gemm, needs)
        sums = {name: total for name, total in (("w_in", sum_in), ("w_out", sum_out)) if total is not None}
        with torch.no_grad():  # a plain function: main_grad does not exist under tracing
            return _gradients(Batch(*tensors, *ctx.options), grad.contiguous(), hidden, needs, ctx.gemm, sums)

    def counts_on_host():
        end = tensors[8]
        return end.diff(prepend=end.new_zeros(1)).tolist() if counts is None else counts

    gradients = fused.gradients(
        tensors[: len(NAMES)],
        needs,
        grad,
        run,
        perm=tensors[6],
        counts=counts_on_host,
        activation=activation,
        gated=gated,
        into_main_grad=ctx.into_main_grad,
    )
    return *gradients, *(None,) * 9


_expert_ffn.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.fmoe_cuda.expert_ffn)
def _flops(_x, _weight, w_in, _b_in, w_out, *_others, out_shape=None) -> int:
    # Dropped assignments are included: only the device knows how many they are.
    return fused.forward_flops(out_shape[1][0], w_in, w_out)


@register_flop_formula(torch.ops.fmoe_cuda.expert_ffn_backward)
def _flops_backward(_grad, hidden, _x, _weight, w_in, _b_in, w_out, *others, **_options) -> int:
    return fused.backward_flops(hidden[0], w_in, w_out, others[-1])
