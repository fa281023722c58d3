"""The CUDA kernels (docs/kernels.md) as functions of tensors that allocate their outputs, without gradients.

The kernels run asynchronously on torch's current stream; tests run them on the CPU.

Shape letters: T tokens, E experts, K choices, N = T * K assignments, D width, M rows (N at most), L experts of this
rank, H hidden width, P height of the first map (2 H if gated, else H), G routing groups.
"""

import math

import torch
from torch import Tensor

from fmoe.kernels.cuda import launch
from fmoe.kernels.cuda.instances import DTYPES, ROUTE_WIDTHS
from fmoe.kernels.cuda.launch import Argument, Geometry, at_once, by_rows, num_warps

TILE = 2048  # assignments per thread block when sorting


def _start(kernel: str, geometry: Geometry, like: Tensor, *arguments: Argument) -> None:
    launcher = launch.launcher(like.device)
    assert launcher is not None, f"no kernels are loaded for {like.device}"
    assert all(a.is_contiguous() for a in arguments if isinstance(a, Tensor)), kernel
    launcher(f"fmoe::{kernel}", geometry, arguments, like.device)


def gather(
    x: Tensor,
    index_M: Tensor | None,
    per: int,
    rows: int,
    *,
    scale: Tensor | None = None,
    limit: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``out[i] = scale[index[i]] * x[index[i] // per]``, [rows, width of x].

    Rows with a negative index, and rows from ``limit`` on, are zero. Without an index, ``index[i]`` is i.
    """
    out = x.new_empty(rows, x.shape[1], dtype=dtype or x.dtype)
    name = f"gather<{DTYPES[x.dtype]}, {DTYPES[out.dtype]}>"
    geometry = by_rows(rows, x.shape[1], at_once(x, out))
    _start(name, geometry, x, x, index_M, per, scale, limit, rows, x.shape[1], out)
    return out


def combine(
    rows_MD: Tensor, inverse_TK: Tensor, weight_TK: Tensor | None = None, limit: Tensor | None = None
) -> Tensor:
    """Return ``sum_k weight_tk * rows[inverse_tk]``, summed in float32: [T, D].

    Indices past the rows, or from ``limit`` on, are skipped. Without weights, each is 1.
    """
    (num_rows, width), (tokens, top_k) = rows_MD.shape, inverse_TK.shape
    out = rows_MD.new_empty(tokens, width)
    name = f"combine<{DTYPES[rows_MD.dtype]}>"
    geometry = by_rows(tokens, width, at_once(rows_MD))
    _start(name, geometry, rows_MD, rows_MD, inverse_TK, weight_TK, limit, tokens, top_k, num_rows, width, out)
    return out


def combine_backward(
    d_out_TD: Tensor,
    rows_MD: Tensor,
    inverse_TK: Tensor,
    weight_TK: Tensor | None,
    limit: Tensor | None = None,
    *,
    needs_rows: bool = True,
    needs_weight: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the rows and of the weights."""
    (num_rows, width), (tokens, top_k) = rows_MD.shape, inverse_TK.shape
    d_rows = torch.empty_like(rows_MD) if needs_rows else None
    d_weight = rows_MD.new_empty(tokens, top_k, dtype=torch.float32) if needs_weight else None
    name = f"combine_backward<{DTYPES[rows_MD.dtype]}>"
    geometry = by_rows(tokens, width, at_once(rows_MD), 4)
    sizes = (tokens, top_k, num_rows, width)
    _start(name, geometry, rows_MD, d_out_TD, rows_MD, inverse_TK, weight_TK, limit, *sizes, d_rows, d_weight)
    return d_rows, d_weight


def add_bias(rows_MD: Tensor, bias_LD: Tensor, end_L: Tensor) -> None:
    """Add each expert's bias to its rows, in place; set rows past the last end to zero."""
    rows, width = rows_MD.shape
    geometry = by_rows(rows, width, at_once(rows_MD))
    arguments = (rows_MD, bias_LD, end_L, bias_LD.shape[0], rows, width, rows_MD)
    _start(f"add_bias<{DTYPES[rows_MD.dtype]}>", geometry, rows_MD, *arguments)


def column_sums(
    rows_MD: Tensor, end_L: Tensor, dtype: torch.dtype, scale: Tensor | None = None, index_M: Tensor | None = None
) -> Tensor:
    """Return ``sum of scale[index[i]] * rows[i]`` over the rows i of each expert: [L, D]."""
    experts, width = end_L.shape[0], rows_MD.shape[1]
    out = rows_MD.new_empty(experts, width, dtype=dtype)
    geometry = Geometry((max(1, -(-width // 32)), max(1, experts), 1), (32, 32, 1), 4 * 33 * 32)
    name = f"column_sums<{DTYPES[rows_MD.dtype]}, {DTYPES[dtype]}>"
    _start(name, geometry, rows_MD, rows_MD, scale, index_M, end_L, experts, width, out)
    return out


def activate(
    before_MP: Tensor,
    bias_LP: Tensor | None,
    end_L: Tensor,
    limit: Tensor | None,
    code: int,
    gated: bool,
) -> Tensor:
    """Return the activation of ``before + bias``, [M, H]; add the bias to ``before`` in place."""
    rows, height = before_MP.shape
    hidden = height // 2 if gated else height
    active = before_MP.new_empty(rows, hidden)
    name = f"activate<{DTYPES[before_MP.dtype]}, {code}, {'true' if gated else 'false'}>"
    geometry = by_rows(rows, hidden, at_once(before_MP))
    out = None if bias_LP is None else before_MP
    arguments = (before_MP, bias_LP, end_L, end_L.shape[0], limit, rows, hidden, out, active)
    _start(name, geometry, before_MP, *arguments)
    return active


def activate_backward(
    hidden_MP: Tensor,
    d_active_MH: Tensor,
    weight_N: Tensor | None,
    perm_M: Tensor | None,
    limit: Tensor | None,
    code: int,
    gated: bool,
    *,
    needs_active: bool = True,
    needs_hidden: bool = True,
    needs_weight: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute gradients of the activation from ``d_active``, the gradient of its outputs before their weights.

    Returns:
        ``weight * active``; the gradient of the pre-activations; and <active, d_active> of each assignment, zero for
        dropped ones. Each is None if it is not needed.
    """
    rows, hidden = d_active_MH.shape
    scaled = torch.empty_like(d_active_MH) if needs_active else None
    d_hidden = torch.empty_like(hidden_MP) if needs_hidden else None
    d_weight = None
    if needs_weight and weight_N is not None:
        d_weight = torch.zeros_like(weight_N)
    name = f"activate_backward<{DTYPES[hidden_MP.dtype]}, {code}, {'true' if gated else 'false'}>"
    geometry = by_rows(rows, hidden, at_once(hidden_MP), 4)
    arguments = (hidden_MP, d_active_MH, weight_N, perm_M, limit, rows, hidden, scaled, d_hidden, d_weight)
    _start(name, geometry, hidden_MP, *arguments)
    return scaled, d_hidden, d_weight


def place(expert_N: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sort assignments by expert, stably, with dropped ones (-1) last.

    Returns:
        (perm_N, inverse_N, kept_N, count_E, end_E in int32, number of kept rows [1]).
    """
    assignments = expert_N.numel()
    tiles = max(1, math.ceil(assignments / TILE))
    tile_count = total = None
    if tiles > 1:
        tile_count = expert_N.new_empty(experts + 1, tiles, dtype=torch.int32)
        total = expert_N.new_empty(experts + 1, dtype=torch.int32)
        counting = Geometry((tiles, 1, 1), (256, 1, 1), 4 * (experts + 1))
        _start("count_tiles", counting, expert_N, expert_N, assignments, experts, TILE, tile_count)
        _start("scan_tiles", Geometry((experts + 1, 1, 1), (256, 1, 1), 32), expert_N, tile_count, tiles, total)
    order, places = torch.empty_like(expert_N), torch.empty_like(expert_N)
    kept = torch.empty_like(expert_N, dtype=torch.bool)
    count, end = expert_N.new_empty(experts), expert_N.new_empty(experts, dtype=torch.int32)
    num_kept = expert_N.new_empty(1)
    warps = num_warps(4 * (experts + 1), 4 * (experts + 2))
    geometry = Geometry((tiles, 1, 1), (32 * warps, 1, 1), 4 * ((warps + 1) * (experts + 1) + warps))
    outputs = (order, places, kept, count, end, num_kept)
    _start("place", geometry, expert_N, expert_N, assignments, experts, TILE, tile_count, total, *outputs)
    return outputs


def drop_over_capacity(
    expert_TK: Tensor,
    mask_T: Tensor | None,
    experts: int,
    group_size: int,
    sequences: int,
    sequence_length: int,
    factor: float,
) -> Tensor:
    """Return ``expert_TK`` with -1 where the expert is full in the token's routing group."""
    tokens, top_k = expert_TK.shape
    kept = torch.empty_like(expert_TK)
    warps = num_warps(0, 4 * (experts + 1))
    geometry = Geometry((max(1, -(-tokens // group_size)), 1, 1), (32 * warps, 1, 1), 4 * warps * (experts + 1))
    sizes = (tokens, top_k, experts, group_size, sequences, sequence_length, float(factor))
    _start("drop_over_capacity", geometry, expert_TK, expert_TK, mask_T, *sizes, kept, None)
    return kept


def segment_order(receive_S: Tensor, order_S: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation that reorders segments of rows into the order ``order_S``, and its inverse."""
    segments, order = len(receive_S), receive_S.new_empty(rows)
    inverse = torch.empty_like(order)
    geometry = Geometry((max(1, -(-rows // 256)), 1, 1), (256, 1, 1), 4 * (3 * segments + 2 + 8))
    _start("segment_order", geometry, receive_S, receive_S, order_S, segments, rows, order, inverse)
    return order, inverse


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    mask_T: Tensor | None,
    top_k: int,
    *,
    is_sigmoid: bool = False,
    by_logits: bool = False,
    normalize: bool = True,
    scale: float = 1.0,
    groups: int = 0,
    kept_groups: int = 1,
    best_of: int = 1,
    with_scores: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Return (expert_TK, weight_TK, score_TE, logsumexp_T, entropy_T), with scores only on request."""
    tokens, experts = logits_TE.shape
    new = logits_TE.new_empty
    expert_TK, weight_TK = new(tokens, top_k, dtype=torch.int64), new(tokens, top_k, dtype=torch.float32)
    score_TE = new(tokens, experts, dtype=torch.float32) if with_scores else None
    logsumexp_T, entropy_T = new(tokens, dtype=torch.float32), new(tokens, dtype=torch.float32)
    width = next((width for width in ROUTE_WIDTHS if 32 * width >= experts), 0)
    of_warp = 4 * (top_k + groups + (experts if width == 0 else 0))
    warps = num_warps(4 * experts, of_warp)
    grid = max(1, min(-(-tokens // warps), 1024))
    geometry = Geometry((grid, 1, 1), (32 * warps, 1, 1), 4 * experts + warps * of_warp)
    flags = (is_sigmoid, by_logits, normalize, float(scale), groups, kept_groups, best_of)
    outputs = (expert_TK, weight_TK, score_TE, logsumexp_T, entropy_T)
    name = f"route<{DTYPES[logits_TE.dtype]}, {width}>"
    _start(name, geometry, logits_TE, logits_TE, bias_E, mask_T, tokens, experts, top_k, *flags, *outputs, None)
    return outputs


def route_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    logsumexp_T: Tensor,
    d_weight_TK: Tensor | None,
    d_score_TE: Tensor | None,
    d_logsumexp_T: Tensor | None,
    *,
    is_sigmoid: bool,
    normalize: bool,
    scale: float,
) -> Tensor:
    """Return the gradient of the logits."""
    (tokens, experts), top_k = logits_TE.shape, expert_TK.shape[1]
    out = torch.empty_like(logits_TE)
    warps = num_warps(0, 4 * experts)
    geometry = Geometry((max(1, -(-tokens // warps)), 1, 1), (32 * warps, 1, 1), 4 * warps * experts)
    given = (logits_TE, expert_TK, logsumexp_T, d_weight_TK, d_score_TE, d_logsumexp_T)
    sizes = (tokens, experts, top_k, is_sigmoid, normalize, float(scale))
    _start(f"route_backward<{DTYPES[logits_TE.dtype]}>", geometry, logits_TE, *given, *sizes, out)
    return out
