"""Forward and backward passes of feed-forward experts, by any of the GEMMs of `fmoe.kernels.cuda.gemm`.

Shape letters: T tokens, K experts per token, N = T * K assignments, M rows, L experts, D width, H hidden width, P
output width of the first map (2 H if gated, else H).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fmoe.kernels.cuda import calls
from fmoe.kernels.cuda.gemm import Gemms
from fmoe.kernels.cuda.triton_gemm import TritonGemms
from fmoe.kernels.fused import NAMES


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows grouped by expert, and the parameters of the experts.

    Attributes:
        x: rows [M, D]; with ``perm``, tokens [T, D].
        weight: combine weights, [T, K]; without ``perm``, [M]. None for weights of 1. Without ``perm``, only `backward`
            multiplies by them.
        perm, inverse, limit: ``perm_N``, ``inverse_TK`` and ``num_kept`` of a `fmoe.kernels.rows.DispatchPlan`; None if
            ``x`` holds rows.
        end: int32 [L], end of each expert's rows.
        counts: number of rows of each expert as a list on the host, or None.
        activation: index of the activation in `fmoe.kernels.backends.ACTIVATIONS`.
    """

    x: Tensor
    weight: Tensor | None
    w_in: Tensor
    b_in: Tensor | None
    w_out: Tensor
    b_out: Tensor | None
    perm: Tensor | None
    inverse: Tensor | None
    end: Tensor
    limit: Tensor | None
    counts: list[int] | None
    activation: int
    gated: bool

    @property
    def num_rows(self) -> int:
        """Number of rows: M without ``perm``; with it N, because dropped assignments have rows too."""
        return (self.x if self.perm is None else self.perm).shape[0]

    @property
    def per(self) -> int:
        """K, the number of assignments per token; 1 without ``perm``."""
        return 1 if self.inverse is None else self.inverse.shape[1]

    @property
    def flat(self) -> Tensor | None:
        """``weight`` as a vector, or None."""
        return None if self.weight is None else self.weight.view(-1)

    def rows(self, tokens: Tensor) -> Tensor:
        """Gather a row of ``tokens`` for each assignment in ``perm``; without ``perm``, return ``tokens``."""
        if self.perm is None:
            return tokens
        return calls.gather(tokens, self.perm, self.per, self.num_rows, limit=self.limit)

    def mixed(self, rows: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each token's rows, [T, D]; without ``perm``, return the rows themselves.

        Args:
            bias: bias of each expert, added to its rows first; in place without ``perm``.
        """
        if self.inverse is not None:
            return calls.combine(rows, self.inverse, weight, self.limit, bias, None if bias is None else self.end)
        if bias is not None:
            calls.add_bias(rows, bias, self.end)
        return rows


def forward(batch: Batch, variant: str) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the pre-activations of the rows, [num_rows, P].

    Args:
        variant: "grouped", "loop" or "triton".
    """
    if variant == "triton":
        triton = TritonGemms(batch.end, batch.num_rows)
        hidden, active = triton.up(
            batch.x, batch.perm, batch.per, batch.w_in, batch.b_in, batch.activation, batch.gated
        )
        out = triton.down(active, batch.w_out, batch.b_out)
        return batch.mixed(out, batch.weight), hidden
    gemms = Gemms(batch.end, variant, batch.counts)
    # A bias that nearly cancels the product loses digits, and with ReLU the sign, if added after 16-bit rounding.
    in_gemm = (batch.b_in, batch.b_out) if gemms.adds_bias else (None, None)
    after = (None, None) if gemms.adds_bias else (batch.b_in, batch.b_out)
    hidden = gemms.forward(batch.rows(batch.x), batch.w_in, in_gemm[0])
    active = calls.activate(hidden, after[0], batch.end, batch.limit, batch.activation, batch.gated)
    out = gemms.forward(active, batch.w_out, in_gemm[1])
    return batch.mixed(out, batch.weight, after[1]), hidden


def backward(
    batch: Batch,
    grad: Tensor,
    hidden: Tensor,
    needs: Sequence[bool],
    variant: str,
    sums: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Run the backward pass of `forward`, and return the gradients by name, without those that are added to ``sums``.

    Args:
        grad: gradient of the outputs.
        hidden: pre-activations that `forward` returned.
        needs: for each of `NAMES`, whether to compute its gradient.
        variant: "grouped", "loop" or "triton".
        sums: float32 tensors by name, to which the gradients of ``w_in`` and ``w_out`` are added.
    """
    needed = {name for name, is_needed in zip(NAMES, needs, strict=True) if is_needed}
    if variant == "triton":
        found, d_hidden = _backward_by_triton(batch, grad, hidden, needed, sums)
    else:
        found, d_hidden = _backward_by_gemms(batch, grad, hidden, needed, variant, sums)
    gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
    d_weight = gradients.get("weight")
    if d_weight is not None and batch.weight is not None:
        gradients["weight"] = d_weight = d_weight.view_as(batch.weight)
    if needed & {"b_in", "b_out"} or (d_weight is not None and batch.b_out is not None):
        inverse = batch.inverse
        if inverse is None and d_weight is not None:
            inverse = torch.arange(batch.num_rows, device=grad.device, dtype=torch.int64).unsqueeze(1)
        d_b_in, d_b_out, d_x = calls.bias_gradients(
            grad,
            d_hidden,
            batch.end,
            batch.perm,
            batch.flat,
            needs_in="b_in" in needed,
            needs_out="b_out" in needed,
            inverse_TK=inverse,
            limit=batch.limit,
            d_rows_MD=gradients.get("x") if batch.inverse is not None else None,
            bias_out_LD=batch.b_out,
            d_weight_TK=d_weight if batch.b_out is not None else None,
        )
        added = {"b_in": d_b_in, "b_out": d_b_out, "x": d_x}
        gradients |= {name: gradient for name, gradient in added.items() if gradient is not None}
    elif "x" in gradients:
        gradients["x"] = batch.mixed(gradients["x"], None)
    return {name: gradient for name, gradient in gradients.items() if name not in sums}


_Gradients = tuple[dict[str, Tensor | None], Tensor | None]  # of rows, combine weights, matrices; of pre-activations


def _backward_by_gemms(
    batch: Batch, grad: Tensor, hidden: Tensor, needed: set[str], variant: str, sums: Mapping[str, Tensor]
) -> _Gradients:
    gradients: dict[str, Tensor | None] = {}
    d_hidden = None
    gemms = Gemms(batch.end, variant, batch.counts)
    d_out = batch.rows(grad)
    if needed - {"b_out"}:
        d_active = gemms.backward(d_out, batch.w_out)
        scaled, d_hidden, gradients["weight"] = calls.activate_backward(
            hidden,
            d_active,
            batch.flat,
            batch.perm,
            batch.limit,
            batch.activation,
            batch.gated,
            needs_active="w_out" in needed,
            needs_hidden=bool(needed & {"x", "w_in", "b_in"}),
            needs_weight="weight" in needed,
        )
        del d_active
        if scaled is not None:
            gradients["w_out"] = gemms.weights(d_out, scaled, sums.get("w_out"))
            del scaled
    del d_out
    if d_hidden is not None and "w_in" in needed:
        gradients["w_in"] = gemms.weights(d_hidden, batch.rows(batch.x), sums.get("w_in"))
    if d_hidden is not None and "x" in needed:
        gradients["x"] = gemms.backward(d_hidden, batch.w_in)
    return gradients, d_hidden


def _backward_by_triton(
    batch: Batch, grad: Tensor, hidden: Tensor, needed: set[str], sums: Mapping[str, Tensor]
) -> _Gradients:
    gradients: dict[str, Tensor | None] = {}
    d_hidden = None
    gemms = TritonGemms(batch.end, batch.num_rows)
    if needed - {"b_out"}:
        scaled, d_hidden, gradients["weight"] = gemms.down_backward(
            grad,
            batch.perm,
            batch.per,
            batch.w_out,
            hidden,
            batch.flat,
            batch.activation,
            batch.gated,
            needs_active="w_out" in needed,
            needs_hidden=bool(needed & {"x", "w_in", "b_in"}),
            needs_weight="weight" in needed,
        )
        if scaled is not None:
            total = sums.get("w_out")
            gradients["w_out"] = gemms.weights(grad, scaled, batch.perm, batch.per, gathered="left", total=total)
            del scaled
    if d_hidden is not None and "w_in" in needed:
        total = sums.get("w_in")
        gradients["w_in"] = gemms.weights(d_hidden, batch.x, batch.perm, batch.per, gathered="right", total=total)
    if d_hidden is not None and "x" in needed:
        gradients["x"] = gemms.up_backward(d_hidden, batch.w_in)
    return gradients, d_hidden
