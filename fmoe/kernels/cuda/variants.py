"""Forward and backward passes of feed-forward experts, by any of the GEMMs of `fmoe.kernels.cuda.gemm`.

Shape letters: T tokens, K experts per token, N = T * K assignments, M rows, L experts, D width, H hidden width, P
output width of the first map (2 H if gated, else H).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fmoe.kernels.cuda import calls
from fmoe.kernels.cuda.gemm import Gemms
from fmoe.kernels.cuda.triton_gemm import TritonGemms

NAMES = ("x", "weight", "w_in", "b_in", "w_out", "b_out")  # inputs with gradients


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows grouped by expert, and the parameters of the experts.

    Attributes:
        x: rows [M, D]; with ``perm``, tokens [T, D].
        perm, inverse, limit: ``perm_N``, ``inverse_TK`` and ``num_kept`` of a `fmoe.kernels.rows.DispatchPlan`; None if
            ``x`` holds rows.
        weight: combine weights, [T, K]; without ``perm``, [M]. None for weights of 1. Without ``perm``, only `Backward`
            multiplies by them.
        end: int32 [L], end of each expert's rows.
        counts: number of rows of each expert as a list on the host, or None.
        activation: index of the activation in `fmoe.kernels.backends.ACTIVATIONS`.
    """

    x: Tensor
    perm: Tensor | None
    inverse: Tensor | None
    weight: Tensor | None
    end: Tensor
    limit: Tensor | None
    w_in: Tensor
    b_in: Tensor | None
    w_out: Tensor
    b_out: Tensor | None
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
        fused = TritonGemms(batch.end, batch.num_rows)
        hidden, active = fused.up(
            *(batch.x, batch.perm, batch.per, batch.w_in, batch.b_in, batch.activation, batch.gated)
        )
        out = fused.down(active, batch.w_out, batch.b_out)
    else:
        gemms = Gemms(batch.end, variant, batch.counts)
        # A bias that nearly cancels the product loses digits, and with ReLU the sign, if added after 16-bit rounding.
        in_gemm = (batch.b_in, batch.b_out) if gemms.adds_bias else (None, None)
        after = (None, None) if gemms.adds_bias else (batch.b_in, batch.b_out)
        hidden = gemms.forward(batch.rows(batch.x), batch.w_in, in_gemm[0])
        active = calls.activate(hidden, after[0], batch.end, batch.limit, batch.activation, batch.gated)
        out = gemms.forward(active, batch.w_out, in_gemm[1])
        return batch.mixed(out, batch.weight, after[1]), hidden
    return batch.mixed(out, batch.weight), hidden


class Backward:
    """Backward pass of `forward`.

    Args:
        grad: gradient of the outputs.
        hidden: pre-activations that `forward` returned.
        needs: for each of `NAMES`, whether to compute its gradient.
        sum_in, sum_out: float32 tensors to which the gradients of ``w_in`` and ``w_out`` are added, or None.
    """

    def __init__(
        self,
        batch: Batch,
        grad: Tensor,
        hidden: Tensor,
        needs: Sequence[bool],
        sum_in: Tensor | None = None,
        sum_out: Tensor | None = None,
    ):
        self._batch, self._grad, self._hidden = batch, grad, hidden
        self._sums = {"w_in": sum_in, "w_out": sum_out}
        self._needs = dict(zip(NAMES, needs, strict=True))
        self._needs_hidden = any(self._needs[name] for name in ("x", "w_in", "b_in"))
        self._needs_inner = self._needs_hidden or self._needs["weight"] or self._needs["w_out"]

    def returned(self) -> list[bool]:
        """Return for each of `NAMES` whether `run` returns its gradient."""
        return [needed and self._sums.get(name) is None for name, needed in self._needs.items()]

    def rehearse(self, variant: str) -> None:
        """Call `run` for a measurement, with temporary tensors instead of ``sum_in`` and ``sum_out``."""
        self.run(
            variant, {name: None if total is None else torch.empty_like(total) for name, total in self._sums.items()}
        )

    def run(self, variant: str, sums: dict[str, Tensor | None] | None = None) -> dict[str, Tensor]:
        """Return the gradients by name, without those that are added to ``sums``.

        Args:
            variant: "grouped", "loop" or "triton".
            sums: float32 tensors by name. The gradient of that name is added to each. If ``sums`` is None, they are
                ``sum_in`` and ``sum_out``.
        """
        sums = self._sums if sums is None else sums
        found, d_hidden = self._by_triton(sums) if variant == "triton" else self._by_gemms(variant, sums)
        batch = self._batch
        if "weight" in found and batch.weight is not None:
            found["weight"] = found["weight"].view_as(batch.weight)
        has_dots = batch.b_out is not None and "weight" in found
        if has_dots or self._needs["b_in"] or self._needs["b_out"]:
            found |= self._with_biases(found, d_hidden)
        elif "x" in found:
            found["x"] = batch.mixed(found["x"], None)
        return {name: gradient for name, gradient in found.items() if sums.get(name) is None}

    def _with_biases(self, found: dict[str, Tensor], d_hidden: Tensor | None) -> dict[str, Tensor]:
        """Return the gradients of the biases and, with ``perm``, of the tokens.

        Add the second bias's share of the combine weights' gradient to ``found["weight"]``, in place.
        """
        batch, inverse, d_weight = self._batch, self._batch.inverse, found.get("weight")
        if inverse is None and d_weight is not None:
            inverse = torch.arange(batch.num_rows, device=d_weight.device, dtype=torch.int64).unsqueeze(1)
        gradients = calls.bias_gradients(
            *(self._grad, d_hidden, batch.end, batch.perm, batch.flat),
            needs_in=self._needs["b_in"],
            needs_out=self._needs["b_out"],
            inverse_TK=inverse,
            limit=batch.limit,
            d_rows_MD=found.get("x") if batch.inverse is not None else None,
            bias_out_LD=batch.b_out,
            d_weight_TK=d_weight if batch.b_out is not None else None,
        )
        names = ("b_in", "b_out", "x")
        return {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}

    def _by_gemms(self, variant: str, sums: dict[str, Tensor | None]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the gradients of rows, combine weights and matrices by name, and the pre-activations' gradient."""
        batch, needs, d_hidden = self._batch, self._needs, None
        found: dict[str, Tensor | None] = {}
        gemms = Gemms(batch.end, variant, batch.counts)
        d_out = batch.rows(self._grad)
        if self._needs_inner:
            d_active = gemms.backward(d_out, batch.w_out)
            scaled, d_hidden, found["weight"] = calls.activate_backward(
                *(self._hidden, d_active, batch.flat, batch.perm, batch.limit, batch.activation, batch.gated),
                needs_active=needs["w_out"],
                needs_hidden=self._needs_hidden,
                needs_weight=needs["weight"],
            )
            del d_active
            if scaled is not None:
                found["w_out"] = gemms.weights(d_out, scaled, sums["w_out"])
                del scaled
        del d_out
        if d_hidden is not None and needs["w_in"]:
            found["w_in"] = gemms.weights(d_hidden, batch.rows(batch.x), sums["w_in"])
        if d_hidden is not None and needs["x"]:
            found["x"] = gemms.backward(d_hidden, batch.w_in)
        return {name: gradient for name, gradient in found.items() if gradient is not None}, d_hidden

    def _by_triton(self, sums: dict[str, Tensor | None]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the gradients of rows, combine weights and matrices by name, and the pre-activations' gradient."""
        batch, needs, d_hidden = self._batch, self._needs, None
        found: dict[str, Tensor | None] = {}
        gemms = TritonGemms(batch.end, batch.num_rows)
        at = (batch.perm, batch.per)
        if self._needs_inner:
            scaled, d_hidden, found["weight"] = gemms.down_backward(
                *(self._grad, *at, batch.w_out, self._hidden, batch.flat, batch.activation, batch.gated),
                needs_active=needs["w_out"],
                needs_hidden=self._needs_hidden,
                needs_weight=needs["weight"],
            )
            if scaled is not None:
                found["w_out"] = gemms.weights(self._grad, scaled, *at, gathered="left", total=sums["w_out"])
                del scaled
        if d_hidden is not None and needs["w_in"]:
            found["w_in"] = gemms.weights(d_hidden, batch.x, *at, gathered="right", total=sums["w_in"])
        if d_hidden is not None and needs["x"]:
            found["x"] = gemms.up_backward(d_hidden, batch.w_in)
        return {name: gradient for name, gradient in found.items() if gradient is not None}, d_hidden
