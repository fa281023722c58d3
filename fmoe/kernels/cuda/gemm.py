"""GEMMs over rows grouped by expert: one call with offsets on the device, a cuBLAS call an expert, or Triton's.

The one call does not wait for the host; the loop reads the counts, and may win where experts have many rows each;
Triton's (`fmoe.kernels.cuda.triton_gemm`) spare a pass over the rows before each product and one after it. Which one is
measured once for each size, forward and backward, and kept in the cache folder.

Shape letters: M rows, L experts, I input width, O output width.
"""

import functools
import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe.errors import UserError
from fmoe.kernels.cuda import triton_gemm, tuning
from fmoe.kernels.ffn import segments

logger = logging.getLogger("fmoe")

VARIANTS = ("auto", "grouped", "loop", "triton")
_tuned = tuning.TuningCache("gemms.json", lambda variant: variant in VARIANTS[1:])


class Gemms:
    """The three products of a linear map, for one batch of rows.

    Args:
        end_L: int32, where the rows of each expert end.
        variant: "grouped" or "loop".
        counts: rows of each expert, where the host knows them; else the loop asks the device, which waits for it.
    """

    def __init__(self, end_L: Tensor, variant: str, counts: list[int] | None = None):
        self._end_L, self._is_grouped = end_L, variant == "grouped"
        if not self._is_grouped and counts is None:
            ends = end_L.tolist()
            counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        self._counts: list[int] = counts or []  # of no use to the one call

    @property
    def adds_bias(self) -> bool:
        """True if `forward` can add a bias before it rounds, which grouped_mm cannot (torch 2.13)."""
        return not self._is_grouped

    def forward(self, rows_MI: Tensor, weight_LOI: Tensor, bias_LO: Tensor | None = None) -> Tensor:
        """``rows @ weight[e].T + bias[e]``: [M, O]. Rows past the last end are uninitialized."""
        if self._is_grouped:
            return F.grouped_mm(rows_MI, weight_LOI.transpose(1, 2), offs=self._end_L)
        out = rows_MI.new_empty(rows_MI.shape[0], weight_LOI.shape[1])
        for expert, rows in segments(self._counts):
            if bias_LO is None:
                torch.mm(rows_MI[rows], weight_LOI[expert].t(), out=out[rows])
            else:
                torch.addmm(bias_LO[expert], rows_MI[rows], weight_LOI[expert].t(), out=out[rows])
        return out

    def backward(self, rows_MO: Tensor, weight_LOI: Tensor) -> Tensor:
        """``rows @ weight[e]``: [M, I]."""
        if self._is_grouped:
            return F.grouped_mm(rows_MO, weight_LOI, offs=self._end_L)
        out = rows_MO.new_empty(rows_MO.shape[0], weight_LOI.shape[2])
        for expert, rows in segments(self._counts):
            torch.mm(rows_MO[rows], weight_LOI[expert], out=out[rows])
        return out

    def weights(self, rows_MO: Tensor, rows_MI: Tensor, total: Tensor | None = None) -> Tensor:
        """``rows_MO.T @ rows_MI`` of each expert: [L, O, I]; zero for one without rows.

        Args:
            total: float32 [L, O, I], which the products are added to and which is returned.
        """
        if self._is_grouped:
            out = F.grouped_mm(rows_MO.t(), rows_MI, offs=self._end_L)
            return out if total is None else total.add_(out)
        if total is not None:
            for expert, rows in segments(self._counts):
                if rows_MO.dtype == total.dtype:
                    total[expert].addmm_(rows_MO[rows].t(), rows_MI[rows])
                else:
                    total[expert].add_(rows_MO[rows].t() @ rows_MI[rows])
            return total
        out = rows_MO.new_empty(len(self._counts), rows_MO.shape[1], rows_MI.shape[1])
        for expert, count in enumerate(self._counts):
            if not count:
                out[expert].zero_()
        for expert, rows in segments(self._counts):
            torch.mm(rows_MO[rows].t(), rows_MI[rows], out=out[expert])
        return out


def requested(gemm: str) -> str:
    """``gemm``, or the value of the variable FMOE_GEMM instead of "auto".

    Raises:
        UserError: neither is one of `VARIANTS`, or it is "triton" where Triton is missing.
    """
    if gemm not in VARIANTS:
        raise UserError(f"gemm={gemm!r} is not one of {', '.join(VARIANTS)}")
    named = os.environ.get("FMOE_GEMM") or "auto"
    if named not in VARIANTS:
        raise UserError(f"FMOE_GEMM={named!r} is not one of {', '.join(VARIANTS)}")
    found = named if gemm == "auto" else gemm
    if found == "triton" and (missing := triton_gemm.why()) is not None:
        raise UserError(f"{'gemm' if gemm == found else 'FMOE_GEMM'}='triton' cannot be: {missing}")
    return found


def choose(
    requested: str,
    step: str,
    x: Tensor,
    num_rows: int,
    w_in_LPD: Tensor,
    w_out_LDH: Tensor,
    run: Callable[[str], object],
) -> str:
    """ "grouped", "loop" or "triton" for rows and weights like these.

    Args:
        requested: of `VARIANTS`; "auto" takes what was measured for such sizes, and measures them if need be (the first
            time on a machine; never while a CUDA graph is captured, when it is grouped).
        step: "forward" or "backward".
        run: does the step by a variant, for the measurement.

    Raises:
        UserError: "triton" is requested and fails a self-check on this device.
    """
    if requested == "triton":
        if (wrong := _wrong_with_triton(x.device)) is not None:
            raise UserError(f"gemm='triton' cannot be on {x.device}: {wrong}")
        return requested
    first = "grouped" if _can_group(x, w_in_LPD, w_out_LDH) else "loop"
    if requested != "auto":
        return "loop" if requested == "loop" else first
    if x.device.type != "cuda":
        return first
    key = f"{_key(x, num_rows, w_in_LPD, w_out_LDH)}, {step}"
    found = _tuned.get(key)
    if found is None or (found == "triton" and _wrong_with_triton(x.device) is not None):
        if torch.cuda.is_current_stream_capturing():
            return first
        variants = ["grouped", "loop"] if first == "grouped" else ["loop"]
        if _wrong_with_triton(x.device) is None:
            variants.append("triton")
        found = _fastest(variants, run, key) if len(variants) > 1 else first
        _tuned.put(key, found)
    return found


def _can_group(x: Tensor, *weights: Tensor) -> bool:
    """Return whether rows begin at multiples of 16 bytes, which grouped_mm requires."""
    size = x.element_size()
    return all(width * size % 16 == 0 for w in weights for width in w.shape[1:]) and x.data_ptr() % 16 == 0


_checked: dict[torch.device, str | None] = {}


def _wrong_with_triton(device: torch.device) -> str | None:
    """Why Triton's GEMMs are not to be used on a device; None where their results are right. Checked once, with a
    line on the logger where they are installed and wrong."""
    missing = triton_gemm.why()
    if missing is not None or device.type != "cuda":  # elsewhere it is Triton's interpreter, in tests
        return missing
    if device not in _checked:
        _checked[device] = None  # for the check itself
        wrong = tuning.failure(device, gemm="triton")
        if wrong is not None:
            _checked[device] = f"its kernels fail a self-check ({wrong})"
            logger.warning("no GEMMs by Triton on %s: they fail a self-check (%s)", device, wrong)
    return _checked[device]


def _key(x: Tensor, num_rows: int, w_in: Tensor, w_out: Tensor) -> str:
    """Sizes, rows rounded up to a power of two, and what computes them."""
    name = torch.cuda.get_device_name(x.device)
    bucket = 1 << max(num_rows - 1, 0).bit_length()
    sizes = "x".join(map(str, (bucket, *w_in.shape, w_out.shape[2])))
    versions = f"torch {torch.__version__}, {triton_gemm.version()}"
    return f"{name}, {versions}, {str(x.dtype).removeprefix('torch.')}, {sizes}"


def _fastest(variants: list[str], run: Callable[[str], object], key: str) -> str:
    times = {variant: tuning.milliseconds(functools.partial(run, variant)) for variant in variants}
    found = min(times, key=times.__getitem__)
    logger.info("GEMMs of %s: %s (%s)", key, found, ", ".join(f"{name} {time:.3f} ms" for name, time in times.items()))
    return found
