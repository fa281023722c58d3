"""GEMMs over rows grouped by expert: one call with offsets on the device, a cuBLAS call an expert, or Triton's.

The one call needs nothing of the host; the loop reads the counts, and may win where experts have many rows each;
Triton's (`fmoe.kernels.cuda.triton_gemm`) spare a pass over the rows before each product and one after it. Which one is
measured once for each size, forward and backward, and kept on disk beside what else is built.

Shape letters: M rows, L experts, I input width, O output width.
"""

import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe.errors import UserError
from fmoe.kernels.cuda import triton_gemm
from fmoe.kernels.cuda.tuning import Choices
from fmoe.kernels.grouped import segments

logger = logging.getLogger("fmoe")

WAYS = ("auto", "grouped", "loop", "triton")
_ROUNDS = 3
_choices = Choices("gemms.json", lambda way: way in WAYS[1:])


class Gemms:
    """The three products of a linear map, for one batch of rows.

    Args:
        end_L: int32, where the rows of each expert end.
        way: "grouped" or "loop".
        counts: rows of each expert, where the host knows them; else the loop asks the device, which waits for it.
    """

    def __init__(self, end_L: Tensor, way: str, counts: list[int] | None = None):
        self._end_L, self._is_grouped = end_L, way == "grouped"
        if not self._is_grouped and counts is None:
            ends = end_L.tolist()
            counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        self._counts = counts

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


def asked_way(way: str) -> str:
    """``way``, or what the variable FMOE_GEMM has instead of "auto".

    Raises:
        UserError: neither is one of `WAYS`, or it is "triton" where there is none.
    """
    if way not in WAYS:
        raise UserError(f"gemm={way!r} is not one of {', '.join(WAYS)}")
    named = os.environ.get("FMOE_GEMM") or "auto"
    if named not in WAYS:
        raise UserError(f"FMOE_GEMM={named!r} is not one of {', '.join(WAYS)}")
    asked = named if way == "auto" else way
    if asked == "triton" and (missing := triton_gemm.why()) is not None:
        raise UserError(f"{'gemm' if way == asked else 'FMOE_GEMM'}='triton' cannot be: {missing}")
    return asked


def choose(
    asked: str,
    step: str,
    x: Tensor,
    num_rows: int,
    w_in_LPD: Tensor,
    w_out_LDH: Tensor,
    run: Callable[[str], object],
) -> str:
    """ "grouped", "loop" or "triton" for rows and weights like these.

    Args:
        asked: of `WAYS`; "auto" takes what was measured for such sizes, and measures them if need be (the first time on
            a machine; never while a CUDA graph is captured, when it is grouped).
        step: "forward" or "backward".
        run: does the step in a way, for the measurement.

    Raises:
        UserError: "triton" is asked for and fails a trial on this device.
    """
    if asked == "triton":
        if (wrong := _wrong_with_triton(x.device)) is not None:
            raise UserError(f"gemm='triton' cannot be on {x.device}: {wrong}")
        return asked
    first = "grouped" if _can_group(x, w_in_LPD, w_out_LDH) else "loop"
    if asked != "auto":
        return "loop" if asked == "loop" else first
    if x.device.type != "cuda":
        return first
    key = f"{_key(x, num_rows, w_in_LPD, w_out_LDH)}, {step}"
    found = _choices.get(key)
    if found is None or (found == "triton" and _wrong_with_triton(x.device) is not None):
        if torch.cuda.is_current_stream_capturing():
            return first
        ways = ["grouped", "loop"] if first == "grouped" else ["loop"]
        if _wrong_with_triton(x.device) is None:
            ways.append("triton")
        found = _fastest(ways, run, key) if len(ways) > 1 else first
        _choices.put(key, found)
    return found


def _can_group(x: Tensor, *weights: Tensor) -> bool:
    """grouped_mm wants rows that begin at multiples of 16 bytes."""
    size = x.element_size()
    return all(width * size % 16 == 0 for w in weights for width in w.shape[1:]) and x.data_ptr() % 16 == 0


_tried: dict[torch.device, str | None] = {}


def _wrong_with_triton(device: torch.device) -> str | None:
    """Why Triton's GEMMs are not to be used on a device; None where they compute what they should. Tried out once, with
    a line on the logger where they are there and do not."""
    missing = triton_gemm.why()
    if missing is not None or device.type != "cuda":  # elsewhere it is Triton's interpreter, in tests
        return missing
    if device not in _tried:
        from fmoe.kernels.cuda import selfcheck

        _tried[device] = None  # for the trial itself
        try:
            with torch.enable_grad(), torch.autocast("cuda", enabled=False):
                wrong = selfcheck.failure(device, gemm="triton")
        except Exception as error:  # of Triton's compiler, of the driver
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if wrong is not None:
            _tried[device] = f"its kernels fail a trial ({wrong})"
            logger.warning("no GEMMs by Triton on %s: they fail a trial (%s)", device, wrong)
    return _tried[device]


def _key(x: Tensor, num_rows: int, w_in: Tensor, w_out: Tensor) -> str:
    """Sizes, rows rounded up to a power of two, and what computes them."""
    name = torch.cuda.get_device_name(x.device)
    bucket = 1 << max(num_rows - 1, 0).bit_length()
    sizes = "x".join(map(str, (bucket, *w_in.shape, w_out.shape[2])))
    versions = f"torch {torch.__version__}, {triton_gemm.version()}"
    return f"{name}, {versions}, {str(x.dtype).removeprefix('torch.')}, {sizes}"


def _fastest(ways: list[str], run: Callable[[str], object], key: str) -> str:
    """Of a whole step each, what is waited for included."""
    milliseconds = {}
    for way in ways:
        times = []
        for _ in range(1 + _ROUNDS):
            begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(way)
            done.record()
            done.synchronize()
            times.append(begin.elapsed_time(done))
        milliseconds[way] = min(times[1:])
    found = min(milliseconds, key=milliseconds.__getitem__)
    told = ", ".join(f"{way} {time:.3f} ms" for way, time in milliseconds.items())
    logger.info("GEMMs of %s: %s (%s)", key, found, told)
    return found
