"""The experts' GEMMs by Triton (`fmoe.kernels.cuda.triton_kernels`), with fused gather and activation.

The numbers of rows stay on the device. Triton comes with torch for CUDA, and is imported on first use. If it is
unusable, `why` returns the reason.

Shape letters: T tokens, K experts per token, N = T * K assignments, M rows, L experts, D width, H hidden width, P
output width of the first map (2 H if gated, else H).
"""

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable
from dataclasses import astuple, dataclass
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from fmoe.errors import UserError, one_line
from fmoe.kernels.cuda.tuning import TuningCache, fastest

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Config:
    """Tile configuration of a GEMM.

    Attributes:
        rows, columns: sizes of an output tile, powers of two of at least 16.
        depth: size of a tile along the summed axis, a power of two of at least 16.
        warps: warps per tile, Triton's ``num_warps``.
        stages: loads in flight, Triton's ``num_stages``.
        group: number of consecutive tiles of rows that share weights in the L2 cache.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8


KINDS = ("up", "multiply", "down_backward", "weights")


@functools.cache
def why() -> str | None:
    """Return why Triton is unusable; None if it is usable."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    try:
        _kernels()
    except Exception as error:  # an incompatible installation may raise any class
        return f"import triton failed ({one_line(error, 120, with_type=True)})"
    return None


def version() -> str:
    """Return the version of Triton, for keys of the tuning cache."""
    return "no triton" if why() is not None else f"triton {_kernels().triton.__version__}"


@functools.cache
def _kernels() -> ModuleType:
    from fmoe.kernels.cuda import triton_kernels

    return triton_kernels


def default_config(kind: str, dtype: torch.dtype, rows: int, columns: int, depth: int, gated: bool) -> Config:
    """Return the tile configuration to use without a measurement.

    Args:
        kind: one of `KINDS`.
        rows: rows per expert, on average; for the kind "weights", rows of the output.
        columns: columns of the output.
        depth: size of the summed axis.
    """
    is_wide = dtype == torch.float32
    limit = 64 if is_wide else 128
    tile_rows = _clipped(rows, limit)
    tile_columns = _clipped(columns, limit)
    sums = 1
    if (kind == "up" and gated) or kind == "down_backward":  # two sums, or a sum and two tiles of hidden units
        tile_columns = min(tile_columns, limit // 2)
        sums = 2
    warps = 8 if tile_rows * tile_columns * sums >= limit * limit else 4
    return Config(tile_rows, tile_columns, _clipped(depth, 32 if is_wide else 64), warps, stages=3)


def configs(kind: str, dtype: torch.dtype, rows: int, columns: int, depth: int, gated: bool) -> list[Config]:
    """Return the tile configurations to measure, the default first. All fit into 160 KiB of shared memory."""
    candidates = [default_config(kind, dtype, rows, columns, depth, gated)]
    products = 2 if kind == "up" and gated else 1
    tiles = products
    max_elements = 256 * 128
    if kind == "down_backward":  # beside its sum, it holds the hidden units: of larger tiles, most registers spill
        tiles = 2
        max_elements = 128 * 128
    for tile_rows, tile_columns, tile_depth, stages in itertools.product((64, 128), (64, 128, 256), (32, 64), (3, 4)):
        config = Config(
            _clipped(rows, tile_rows),
            _clipped(columns, tile_columns),
            _clipped(depth, tile_depth),
            8 if tile_rows * tile_columns * tiles >= 128 * 128 else 4,
            stages,
        )
        shared = dtype.itemsize * stages * config.depth * (config.rows + products * config.columns)
        if shared <= 160 * 1024 and config.rows * config.columns * tiles <= max_elements:
            candidates.append(config)
    return list(dict.fromkeys(candidates))


_tuned = TuningCache("triton.json", lambda v: isinstance(v, list) and len(v) == 6 and all(type(n) is int for n in v))


def is_tuning() -> bool:
    """Return whether FMOE_TUNE=1 turns on the measurement of configurations.

    Raises:
        UserError: FMOE_TUNE is neither 0 nor 1.
    """
    value = os.environ.get("FMOE_TUNE", "")
    if value not in ("", "0", "1"):
        raise UserError(f"FMOE_TUNE={value!r} must be 0 or 1 (1 measures configurations of Triton's GEMMs)")
    return value == "1"


def _clipped(extent: int, limit: int) -> int:
    return max(16, min(limit, _power(extent)))


def _power(number: int) -> int:
    """Round up to a power of two."""
    return 1 << max(number - 1, 0).bit_length()


class TritonGemms:
    """The GEMMs of feed-forward experts in forward and backward passes, for one batch of rows.

    Args:
        end_L: int32, end of each expert's rows.
        rows: number of rows. Rows past the last end are neither read nor written.
        tuned: configurations by kind (`KINDS`), instead of measured and default ones.
    """

    def __init__(self, end_L: Tensor, rows: int, tuned: dict[str, Config] | None = None):
        self._end = end_L
        self._rows = rows
        self._tuned = tuned or {}
        self._schedules: dict[int, tuple[Tensor, int]] = {}

    def up(
        self,
        x: Tensor,
        index_M: Tensor | None,
        per: int,
        w_in_LPD: Tensor,
        b_in_LP: Tensor | None,
        activation: int,
        gated: bool,
    ) -> tuple[Tensor, Tensor]:
        """Apply the first linear map and the activation to the rows ``x[index // per]``.

        Args:
            index_M: assignment of each row; None to use the rows of ``x`` themselves.
            per: assignments per token.

        Returns:
            (hidden [M, P], active [M, H]): the results before and after the activation.
        """
        _experts, height, width = w_in_LPD.shape
        hidden = height // 2 if gated else height
        outputs = x.new_empty(self._rows, height), x.new_empty(self._rows, hidden)
        inputs = (x, _or(index_M, x), w_in_LPD, _or(b_in_LP, x))
        flags = {"A": activation, "GATED": gated, "HAS_BIAS": b_in_LP is not None, "IS_GATHERED": index_M is not None}

        def launch(config: Config) -> tuple[Tensor, Tensor]:
            tiles, count = self._tiles(config.rows)
            arguments = (*inputs, *outputs, tiles, self._end, count, width, hidden, per)
            self._start("up", (count * _ceil(hidden, config.columns),), arguments, config, x.dtype, width, **flags)
            return outputs

        return self._with_config(launch, x, "up", self._mean_rows, hidden, width, gated)

    def down(self, active_MH: Tensor, w_out_LDH: Tensor, b_out_LD: Tensor | None) -> Tensor:
        """Return ``active @ w_out[e].T + b_out[e]`` for the rows of each expert e: [M, H] -> [M, D]."""
        return self._multiply(active_MH, w_out_LDH, b_out_LD, transposed=True)

    def up_backward(self, d_hidden_MP: Tensor, w_in_LPD: Tensor) -> Tensor:
        """Return ``d_hidden @ w_in[e]`` for the rows of each expert e: [M, P] -> [M, D]."""
        return self._multiply(d_hidden_MP, w_in_LPD, None, transposed=False)

    def _multiply(self, x: Tensor, w: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
        _experts, height, width = w.shape
        columns, depth = (height, width) if transposed else (width, height)
        strides = (height * width, width, 1) if transposed else (height * width, 1, width)
        out = x.new_empty(self._rows, columns)

        def launch(config: Config) -> Tensor:
            tiles, count = self._tiles(config.rows)
            arguments = (x, w, _or(bias, x), out, tiles, self._end, count, depth, columns, *strides)
            grid = (count * _ceil(columns, config.columns),)
            self._start("multiply", grid, arguments, config, x.dtype, depth, HAS_BIAS=bias is not None)
            return out

        return self._with_config(launch, x, "multiply", self._mean_rows, columns, depth, False)

    def down_backward(
        self,
        grad: Tensor,
        index_M: Tensor | None,
        per: int,
        w_out_LDH: Tensor,
        hidden_MP: Tensor,
        weight_N: Tensor | None,
        activation: int,
        gated: bool,
        *,
        needs_active: bool,
        needs_hidden: bool,
        needs_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute the gradients of the pre-activations and of the combine weights; recompute the activation's result.

        Args:
            grad: gradient of the outputs; the rows' gradients are ``grad[index // per]``.
            index_M, per: as in `up`.
            hidden_MP: pre-activations.

        Returns:
            The activation's result times the combine weights, [M, H]; the gradient of ``hidden_MP``; and the
                gradient of the combine weights, [N]. Each is None if it is not needed.
        """
        _experts, width, hidden = w_out_LDH.shape
        needs_weight = needs_weight and weight_N is not None
        scaled = hidden_MP.new_empty(self._rows, hidden) if needs_active else None
        d_hidden = torch.empty_like(hidden_MP) if needs_hidden else None
        flags = {
            "A": activation,
            "GATED": gated,
            "IS_GATHERED": index_M is not None,
            "HAS_WEIGHT": weight_N is not None,
            "NEEDS_ACTIVE": needs_active,
            "NEEDS_HIDDEN": needs_hidden,
            "NEEDS_WEIGHT": needs_weight,
        }

        def launch(config: Config) -> Tensor | None:
            tiles, count = self._tiles(config.rows)
            columns = _ceil(hidden, config.columns)
            # Zero for dropped assignments.
            dots = weight_N.new_zeros(columns, weight_N.shape[0]) if needs_weight and weight_N is not None else None
            arguments = (
                grad,
                _or(index_M, grad),
                w_out_LDH,
                hidden_MP,
                _or(weight_N, grad),
                _or(scaled, hidden_MP),
                _or(d_hidden, hidden_MP),
                _or(dots, hidden_MP),
                tiles,
                self._end,
                count,
                width,
                hidden,
                per,
                0 if dots is None else dots.shape[1],
            )
            self._start("down_backward", (count * columns,), arguments, config, grad.dtype, width, **flags)
            return None if dots is None else dots.sum(0)

        dot_N = self._with_config(launch, grad, "down_backward", self._mean_rows, hidden, width, gated)
        return scaled, d_hidden, dot_N

    def weights(
        self,
        left: Tensor,
        right: Tensor,
        index_M: Tensor | None = None,
        per: int = 1,
        *,
        gathered: str = "",
        total: Tensor | None = None,
    ) -> Tensor:
        """Return ``left.T @ right`` of the rows of each expert: [L, O, I]; zero for an expert without rows.

        Args:
            gathered: operand to gather, "left" or "right": its row i is row ``index[i] // per`` of the given tensor.
                "" for neither.
            total: float32 [L, O, I]. The products are added to it, and it is returned.
        """
        height = left.shape[1]
        width = right.shape[1]
        experts = self._end.shape[0]
        out = left.new_empty(experts, height, width) if total is None else total
        arguments = (left, right, _or(index_M, left), out, self._end, height, width, per)
        flags = {
            "GATHERS_LEFT": index_M is not None and gathered == "left",
            "GATHERS_RIGHT": index_M is not None and gathered == "right",
            "ADDS": total is not None,
        }

        def launch(config: Config) -> Tensor:
            grid = (_ceil(height, config.rows) * _ceil(width, config.columns), experts)
            self._start("weights", grid, arguments, config, left.dtype, None, **flags)
            return out

        sizes = (height, width, self._mean_rows)
        return self._with_config(launch, left, "weights", *sizes, False, may_tune=total is None)

    @property
    def _mean_rows(self) -> int:
        return max(1, self._rows // max(1, self._end.shape[0]))

    def _with_config(
        self,
        launch: Callable[[Config], T],
        like: Tensor,
        kind: str,
        rows: int,
        columns: int,
        depth: int,
        gated: bool,
        may_tune: bool = True,
    ) -> T:
        """Call ``launch`` with the tile configuration in ``tuned``, else the measured one, else the default one."""
        sizes = (kind, like.dtype, rows, columns, depth, gated)
        if kind in self._tuned:
            return launch(self._tuned[kind])
        if like.device.type != "cuda":
            return launch(default_config(*sizes))
        per_expert = depth if kind == "weights" else rows
        bucket = {"weights": (rows, columns, _power(per_expert))}.get(kind, (_power(per_expert), columns, depth))
        name = torch.cuda.get_device_name(like.device)
        key = f"{name}, {version()}, {kind}, {like.dtype}, {'x'.join(map(str, bucket))}{', gated' if gated else ''}"
        measured = _tuned.get(key)
        if measured is None and may_tune and is_tuning() and not torch.cuda.is_current_stream_capturing():
            best, lasts = fastest(configs(*sizes), launch, key)
            measured = list(astuple(best))
            _tuned.put(key, measured, lasts)
        return launch(default_config(*sizes) if measured is None else Config(*measured))

    def _tiles(self, block: int) -> tuple[Tensor, int]:
        """Return (expert, first row) of each tile of ``block`` rows, int32 [tiles, 2], and a bound on their number."""
        if block not in self._schedules:
            experts = self._end.shape[0]
            count = self._rows // block + min(experts, self._rows)
            tiles = self._end.new_empty(max(1, count), 2)
            _kernels().schedule[(experts + 1,)](
                self._end, tiles, experts, count, BLOCK_M=block, EXPERTS=_power(experts), BLOCK=128
            )
            self._schedules[block] = tiles, count
        return self._schedules[block]

    def _start(
        self,
        kind: str,
        grid: tuple[int, ...],
        arguments: tuple,
        config: Config,
        dtype: torch.dtype,
        depth: int | None,
        **flags,
    ) -> None:
        if depth is not None:
            flags["EVEN"] = depth % config.depth == 0
        is_wide = dtype == torch.float32
        getattr(_kernels(), kind)[grid](
            *arguments,
            **flags,
            # Not `allow_tf32`, which raises if this newer setting was used.
            PRECISION="tf32" if is_wide and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
            BLOCK_M=config.rows,
            BLOCK_N=config.columns,
            BLOCK_K=config.depth,
            GROUP=config.group,
            num_warps=config.warps,
            num_stages=config.stages,
        )


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return ``tensor`` or, if it is None, ``other`` as a placeholder, which the kernel does not read."""
    return other if tensor is None else tensor


def _ceil(number: int, step: int) -> int:
    return -(-number // step)
