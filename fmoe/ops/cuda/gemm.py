"""GEMMs over rows grouped by expert: one call with offsets on the device, or a cuBLAS call an expert.

The one call needs nothing of the host; the loop reads the counts, and may win where experts have many rows each. Which
one is measured once for each size, and kept on disk beside what else is built.

Shape letters: M rows, L experts, I input width, O output width.
"""

import json
import logging
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe.errors import BuildError, UserError
from fmoe.ops.grouped import segments

logger = logging.getLogger("fmoe")

WAYS = ("auto", "grouped", "loop")
_ROUNDS = 3


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

    def forward(self, rows_MI: Tensor, weight_LOI: Tensor) -> Tensor:
        """``rows @ weight[e].T``: [M, O]. Rows past the last end are whatever was in memory."""
        if self._is_grouped:
            return F.grouped_mm(rows_MI, weight_LOI.transpose(1, 2), offs=self._end_L)
        out = rows_MI.new_empty(rows_MI.shape[0], weight_LOI.shape[1])
        for expert, rows in segments(self._counts):
            torch.mm(rows_MI[rows], weight_LOI[expert].t(), out=out[rows])
        return out

    def backward(self, rows_MO: Tensor, weight_LOI: Tensor) -> Tensor:
        """``rows @ weight[e]``: [M, I]."""
        if self._is_grouped:
            return F.grouped_mm(rows_MO, weight_LOI, offs=self._end_L)
        out = rows_MO.new_empty(rows_MO.shape[0], weight_LOI.shape[2])
        for expert, rows in segments(self._counts):
            torch.mm(rows_MO[rows], weight_LOI[expert], out=out[rows])
        return out

    def weights(self, rows_MO: Tensor, rows_MI: Tensor) -> Tensor:
        """``rows_MO.T @ rows_MI`` of each expert: [L, O, I]; zero for one without rows."""
        if self._is_grouped:
            return F.grouped_mm(rows_MO.t(), rows_MI, offs=self._end_L)
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
        UserError: neither is one of `WAYS`.
    """
    if way not in WAYS:
        raise UserError(f"gemm={way!r} is not one of {', '.join(WAYS)}")
    named = os.environ.get("FMOE_GEMM") or "auto"
    if named not in WAYS:
        raise UserError(f"FMOE_GEMM={named!r} is not one of {', '.join(WAYS)}")
    return named if way == "auto" else way


def choose(asked: str, rows_MI: Tensor, weight_LOI: Tensor, end_L: Tensor) -> str:
    """ "grouped" or "loop" for rows and weights like these.

    Args:
        asked: of `WAYS`; "auto" takes what was measured for such sizes, and measures them if need be (the first time on
            a machine; never while a CUDA graph is captured, when it is grouped).
    """
    if not _can_group(rows_MI, weight_LOI):
        return "loop"
    if asked != "auto":
        return asked
    if rows_MI.device.type != "cuda":
        return "grouped"
    key = _key(rows_MI, weight_LOI)
    found = _known().get(key)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            return "grouped"
        found = _known()[key] = _measure(rows_MI, weight_LOI, end_L)
        _save()
    return found


def _can_group(rows: Tensor, weight: Tensor) -> bool:
    """grouped_mm wants rows that begin at multiples of 16 bytes."""
    size = rows.element_size()
    return all(width * size % 16 == 0 for width in weight.shape[1:]) and rows.data_ptr() % 16 == 0


def _key(rows: Tensor, weight: Tensor) -> str:
    """Sizes, rows rounded up to a power of two, and what computes them."""
    name = torch.cuda.get_device_name(rows.device)
    bucket = 1 << max(rows.shape[0] - 1, 0).bit_length()
    sizes = "x".join(map(str, (bucket, *weight.shape)))
    return f"{name}, torch {torch.__version__}, {str(rows.dtype).removeprefix('torch.')}, {sizes}"


def _measure(rows: Tensor, weight: Tensor, end: Tensor) -> str:
    """The faster one of a forward product, what the loop waits for included."""
    milliseconds = {}
    for way in ("grouped", "loop"):
        times = []
        for _ in range(1 + _ROUNDS):
            begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            Gemms(end, way).forward(rows, weight)
            done.record()
            done.synchronize()
            times.append(begin.elapsed_time(done))
        milliseconds[way] = min(times[1:])
    found = min(milliseconds, key=milliseconds.__getitem__)
    told = ", ".join(f"{way} {time:.3f} ms" for way, time in milliseconds.items())
    logger.info("GEMMs of %s: %s (%s)", _key(rows, weight), found, told)
    return found


_choices: dict[str, str] | None = None


def _file() -> Path | None:
    from fmoe.native import cache

    try:
        return cache.writable() / "gemms.json"
    except BuildError:
        return None


def _known() -> dict[str, str]:
    global _choices
    if _choices is None:
        _choices = {}
        path = _file()
        with suppress(OSError, ValueError, AttributeError):
            kept = json.loads(path.read_text(encoding="utf-8"))
            _choices = {str(key): way for key, way in kept.items() if way in WAYS[1:]}
    return _choices


def _save() -> None:
    """What other processes have measured since stays."""
    path = _file()
    if path is None:
        return
    with suppress(OSError, ValueError):
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({**kept, **_known()}, indent=1), encoding="utf-8")
        os.replace(part, path)
