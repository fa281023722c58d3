"""Choice of GEMMs over rows grouped by expert: torch's grouped_mm, a loop of cuBLAS calls, or Triton's.

In bfloat16 from sm_90 on, grouped_mm does not synchronize; otherwise it is itself a loop. The cuBLAS loop reads the
counts on the host, but may be faster for many rows per expert. Triton's GEMMs (`fmoe.kernels.cuda.triton_gemm`) fuse
gather and activation into some products.

Shape letters: M rows, L experts, I input width, O output width.
"""

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
    """The GEMMs of the experts' linear maps in forward and backward pass, for one batch of rows sorted by expert.

    Args:
        end_L: int32, end of each expert's rows.
        variant: "grouped" for torch's grouped_mm, "loop" for one GEMM after the other.
        counts: number of rows of each expert, on the host. With None, "loop" copies ``end_L`` to the host, which
            synchronizes.
    """

    def __init__(self, end_L: Tensor, variant: str, counts: list[int] | None = None):
        self._end_L = end_L
        self._is_grouped = variant == "grouped"
        if not self._is_grouped and counts is None:
            ends = end_L.tolist()
            counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        self._counts: list[int] = counts or []  # grouped_mm does not need them

    @property
    def adds_bias(self) -> bool:
        """Whether `forward` accepts a bias, which it adds before rounding. False for grouped_mm (torch 2.13)."""
        return not self._is_grouped

    def forward(self, rows_MI: Tensor, weight_LOI: Tensor, bias_LO: Tensor | None = None) -> Tensor:
        """Return ``rows @ weight[e].T + bias[e]`` for the rows of each expert e: [M, I] -> [M, O].

        Rows past the last expert's end are undefined. ``bias_LO`` must be None unless `adds_bias` is True.
        """
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
        """Return ``rows @ weight[e]``, the gradient of the input rows: [M, O] -> [M, I]."""
        if self._is_grouped:
            return F.grouped_mm(rows_MO, weight_LOI, offs=self._end_L)
        out = rows_MO.new_empty(rows_MO.shape[0], weight_LOI.shape[2])
        for expert, rows in segments(self._counts):
            torch.mm(rows_MO[rows], weight_LOI[expert], out=out[rows])
        return out

    def weights(self, rows_MO: Tensor, rows_MI: Tensor, total: Tensor | None = None) -> Tensor:
        """Return ``rows_MO.T @ rows_MI`` of each expert, the gradient of its matrix: [L, O, I].

        It is zero for an expert without rows.

        Args:
            total: float32 [L, O, I]. The products are added to it, and it is returned.
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
    """Return ``gemm``, or the value of FMOE_GEMM if ``gemm`` is "auto".

    Raises:
        UserError: ``gemm`` or FMOE_GEMM is not in `VARIANTS`, or "triton" is requested and unusable.
    """
    if gemm not in VARIANTS:
        raise UserError(f"gemm={gemm!r} is not one of {', '.join(VARIANTS)}")
    named = os.environ.get("FMOE_GEMM") or "auto"
    if named not in VARIANTS:
        raise UserError(f"FMOE_GEMM={named!r} is not one of {', '.join(VARIANTS)}")
    chosen = named if gemm == "auto" else gemm
    missing = triton_gemm.why() if chosen == "triton" else None
    if missing is not None:
        raise UserError(f"{'gemm' if gemm == chosen else 'FMOE_GEMM'}='triton' is unavailable: {missing}")
    return chosen


def choose(
    requested: str,
    step: str,
    x: Tensor,
    num_rows: int,
    w_in_LPD: Tensor,
    w_out_LDH: Tensor,
    run: Callable[[str], object],
) -> str:
    """Return the GEMM variant to use for rows and weights of these sizes: "grouped", "loop" or "triton".

    For "auto", it is the fastest, which is measured once per machine. Where grouped_mm does not accept the rows, "loop"
    replaces "grouped".

    Nothing is measured during the capture of a CUDA graph. Without an earlier measurement, "auto" then gives "grouped".
    It gives "triton" instead if both of these hold:

    * grouped_mm would synchronize, or does not accept the rows;
    * Triton has passed its self-check.

    Args:
        requested: one of `VARIANTS`.
        step: "forward", "backward", or "backward to main_grad" for Megatron's gradient buffers; each is measured
            separately.
        run: function that runs the step with a given variant, for the measurement.

    Raises:
        UserError: "triton" is requested, but is not installed or fails its self-check on this device.
    """
    device = x.device
    if requested == "triton":
        wrong = _wrong_with_triton(device)
        if wrong is not None:
            raise UserError(f"gemm='triton' (or FMOE_GEMM=triton) is unavailable on {device}: {wrong}")
        return requested
    # grouped_mm requires rows that begin at multiples of 16 bytes.
    widths = (*w_in_LPD.shape[1:], *w_out_LDH.shape[1:])
    is_aligned = all(width * x.element_size() % 16 == 0 for width in widths) and x.data_ptr() % 16 == 0
    first = "grouped" if is_aligned else "loop"
    if requested != "auto":
        return "loop" if requested == "loop" else first
    if device.type != "cuda":
        return first
    key = tuning.cache_key(x, num_rows, w_in_LPD, w_out_LDH, triton_gemm.version())
    key = f"{key}, {step}{'' if first == 'grouped' else ', not grouped'}"
    fastest = _tuned.get(key)
    is_capturing = torch.cuda.is_current_stream_capturing()
    if fastest == "triton" and device not in _checked and is_capturing:
        return first  # the self-check waits for the device, which a capture forbids
    if fastest is not None and (fastest != "triton" or _wrong_with_triton(device) is None):
        return fastest
    if is_capturing:  # grouped_mm falls back to a loop except in bfloat16 from sm_90 on
        synchronizes = first == "loop" or x.dtype != torch.bfloat16 or _architecture(device) < 9
        return "triton" if synchronizes and _checked.get(device, "") is None else first
    variants = ["grouped", "loop"] if first == "grouped" else ["loop"]
    if _wrong_with_triton(device) is None:
        variants.append("triton")
    fastest, lasts = tuning.fastest(variants, run, key) if len(variants) > 1 else (first, True)
    _tuned.put(key, fastest, lasts)
    return fastest


def _architecture(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


_checked: dict[torch.device, str | None] = {}


def _wrong_with_triton(device: torch.device) -> str | None:
    """Return why Triton's GEMMs must not run on a device, or None. The first call runs a self-check."""
    missing = triton_gemm.why()
    if missing is not None:
        return missing
    if device not in _checked:
        _checked[device] = None  # allows the check itself to run them
        wrong = tuning.failure(device, gemm="triton")
        if wrong is not None:
            _checked[device] = f"its kernels fail a self-check ({wrong})"
            logger.warning("Triton's GEMMs are off on %s: they fail a self-check (%s)", device, wrong)
    return _checked[device]
