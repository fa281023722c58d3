"""The CUDA kernels (docs/kernels.md) as functions that take tensors and allocate their outputs, without gradients.

They run asynchronously on torch's current stream. Tests run them on the CPU.

Shape letters: T tokens, E experts, K experts per token, N = T * K assignments, D width, M rows (at most N), L experts
of this rank, H hidden width, P output width of the first map (2 H if gated, else H), G routing groups, B tiles of
tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fmoe.kernels.cuda import launch
from fmoe.kernels.cuda.instances import DTYPES, ROUTE_WIDTHS
from fmoe.kernels.cuda.launch import Argument, Geometry, at_once, by_rows, num_warps

TILE = 2048  # least number of assignments per thread block when sorting
TOKEN_TILES = 512  # approximate number of tiles of tokens of a large batch; small groups may need more


def _start(kernel: str, geometry: Geometry, first: Tensor, *others: Argument) -> None:
    """Launch a kernel on the device of its first argument."""
    launcher = launch.launcher(first.device)
    assert launcher is not None, f"no kernels are loaded for {first.device}"
    arguments = (first, *others)
    assert all(a.is_contiguous() for a in arguments if isinstance(a, Tensor)), kernel
    launcher(f"fmoe::{kernel}", geometry, arguments, first.device)


@dataclass(frozen=True)
class Rule:
    """Routing rule: choose the K experts with the largest ranking values, and weight them by their scores.

    Args:
        is_sigmoid: scores are sigmoids of the logits; by default their softmax.
        by_logits: ranking values are the logits; by default the scores. ``bias_E`` of `route` is added in both cases.
        normalize: divide the weights by their sum over the K chosen experts.
        scale: factor of the weights.
        groups: number of groups into which the experts are divided; 0 for no groups.
        kept_groups: number of groups from which a token's experts are chosen, those with the largest group values.
        best_of: a group value is the sum of the group's ``best_of`` largest ranking values.
    """

    is_sigmoid: bool = False
    by_logits: bool = False
    normalize: bool = True
    scale: float = 1.0
    groups: int = 0
    kept_groups: int = 1
    best_of: int = 1


@dataclass(frozen=True)
class TokenTiles:
    """Split of each routing group (tokens that share expert capacity) into tiles of consecutive tokens.

    Attributes:
        tokens: number of tokens.
        group_size: number of tokens per routing group.
        sequences, sequence_length: memory layout of the tokens, as in `fmoe.kernels.gates.memory_shape`.
    """

    tokens: int
    group_size: int
    sequences: int = 1
    sequence_length: int = 1

    @property
    def groups(self) -> int:
        """Number of routing groups."""
        return -(-self.tokens // self.group_size)

    @property
    def tile(self) -> int:
        """Number of tokens per tile, a multiple of 8."""
        return 8 * max(1, -(-self.tokens // (8 * TOKEN_TILES)))

    @property
    def per_group(self) -> int:
        """Number of tiles per group."""
        return -(-self._most // self.tile)

    @property
    def _most(self) -> int:
        # If the group size exceeds the number of tokens, missing tokens must not get tiles, which cost memory and time.
        return max(1, min(self.group_size, self.tokens))

    @property
    def count(self) -> int:
        """Number of tiles."""
        return max(1, self.groups) * self.per_group

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(tokens per group, sequences, their length, tokens per tile), as the kernels take them."""
        return self._most, self.sequences, self.sequence_length, self.tile


@dataclass(frozen=True)
class Counted:
    """Counts and sums over each tile of tokens, from `route_counted` or `count_choices`; the input of `queue`.

    Attributes:
        count_BCE: number of assignments by tile and expert, int32. C is K if each choice is counted separately, else 1.
        sum_BE: sums of the router's probabilities; None from `count_choices`.
        sum_B3: three sums over the tile's routed tokens: of logsumexp^2, of the entropy, and of 1 (their number). From
            `count_choices`, the first two are 0.
        ticket: number of finished thread blocks of the kernel ``queue``, int32 [1]; None from `count_choices`.
    """

    tiles: TokenTiles
    count_BCE: Tensor
    sum_BE: Tensor | None
    sum_B3: Tensor
    ticket: Tensor | None


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

    Without an index, ``index[i]`` is i. Without a scale, the factor is 1. Rows with a negative index, and rows from
    ``limit`` on, are zero.

    Args:
        per: number of indices per row of ``x``: K if the indices are assignments and ``x`` has a row per token.
        limit: number of rows to gather, [1] on the device; None for all.
        dtype: dtype of the result; None for the dtype of ``x``.
    """
    out = x.new_empty(rows, x.shape[1], dtype=dtype or x.dtype)
    name = f"gather<{DTYPES[x.dtype]}, {DTYPES[out.dtype]}>"
    geometry = by_rows(rows, x.shape[1], at_once(x, out))
    _start(name, geometry, x, index_M, per, scale, limit, rows, x.shape[1], out)
    return out


def combine(
    rows_MD: Tensor,
    inverse_TK: Tensor,
    weight_TK: Tensor | None = None,
    limit: Tensor | None = None,
    bias_LD: Tensor | None = None,
    end_L: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of each token's rows, ``sum_k weight_tk * rows[inverse_tk]``: [M, D] -> [T, D].

    Sums are in float32. Indices below 0, past the rows, or from ``limit`` on are skipped.

    Args:
        weight_TK: None for weights of 1.
        limit: number of kept rows, [1] on the device; None for all.
        bias_LD: bias of each expert, added to its rows first. It needs ``limit`` and ``end_L``.
        end_L: end of each expert's rows.
    """
    num_rows, width = rows_MD.shape
    tokens, top_k = inverse_TK.shape
    experts = 0 if end_L is None else end_L.shape[0]
    sizes = (experts, tokens, top_k, num_rows, width)
    out_TD = rows_MD.new_empty(tokens, width)
    name = f"combine<{DTYPES[rows_MD.dtype]}>"
    geometry = by_rows(tokens, width, at_once(rows_MD))
    _start(name, geometry, rows_MD, inverse_TK, weight_TK, limit, bias_LD, end_L, *sizes, out_TD)
    return out_TD


def jitter(
    x_TD: Tensor,
    key: int,
    first_group: int,
    half_width: float,
    tiles: TokenTiles,
    addend_TD: Tensor | None = None,
    change_TD: Tensor | None = None,
) -> Tensor:
    """Return ``x * noise + addend``, with the noise of `fmoe.kernels.cuda.router.Jitter`.

    Args:
        change_TD: output for ``x * (noise - 1)``; None to leave it out.
    """
    out_TD = torch.empty_like(x_TD)
    sizes = (float(half_width), *x_TD.shape, *tiles.sizes[:3])
    geometry = by_rows(*x_TD.shape, at_once(x_TD))
    name = f"jitter<{DTYPES[x_TD.dtype]}>"
    _start(name, geometry, x_TD, addend_TD, key, first_group, *sizes, out_TD, change_TD)
    return out_TD


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
    """Return the gradients of ``rows_MD`` and ``weight_TK``, two arguments of `combine`; each None if not needed.

    The gradient of ``weight_TK`` is in float32.
    """
    tokens, width = d_out_TD.shape
    d_rows_MD = torch.empty_like(rows_MD) if needs_rows else None
    d_weight_TK = torch.empty_like(inverse_TK, dtype=torch.float32) if needs_weight else None
    name = f"combine_backward<{DTYPES[rows_MD.dtype]}>"
    geometry = by_rows(tokens, width, at_once(rows_MD), 4)
    sizes = (*inverse_TK.shape, *rows_MD.shape)
    _start(name, geometry, d_out_TD, rows_MD, inverse_TK, weight_TK, limit, *sizes, d_rows_MD, d_weight_TK)
    return d_rows_MD, d_weight_TK


def add_bias(rows_MD: Tensor, bias_LD: Tensor, end_L: Tensor) -> None:
    """Add each expert's bias to its rows, in place; set the rows after the last expert's to zero."""
    geometry = by_rows(*rows_MD.shape, at_once(rows_MD))
    sizes = (bias_LD.shape[0], *rows_MD.shape)
    _start(f"add_bias<{DTYPES[rows_MD.dtype]}>", geometry, rows_MD, bias_LD, end_L, *sizes, rows_MD)


def bias_gradients(
    d_out: Tensor,
    d_hidden_MP: Tensor | None,
    end_L: Tensor,
    perm_M: Tensor | None,
    weight_N: Tensor | None,
    *,
    needs_in: bool,
    needs_out: bool,
    inverse_TK: Tensor | None = None,
    limit: Tensor | None = None,
    d_rows_MD: Tensor | None = None,
    bias_out_LD: Tensor | None = None,
    d_weight_TK: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of the experts' first and second biases, and of the tokens.

    A token's gradient is the sum of ``d_rows_MD`` over its assignments. ``d_weight_TK``, if given, is completed in
    place: for each kept assignment, the dot product of ``d_out`` and the expert's second bias is added.

    Args:
        d_out: gradient of the outputs, [T, D]; without ``perm_M``, [M, D].
        d_hidden_MP: gradient of the pre-activations; required with ``needs_in``.
        perm_M: assignment of each row; None if the inputs and outputs are rows, not tokens.
        weight_N: combine weights; None for weights of 1.
        inverse_TK: row of each assignment; required with ``d_rows_MD`` or ``d_weight_TK``.
        limit: number of kept rows, [1] on the device; None for all.
        d_rows_MD: gradients of the rows; None to compute no gradient of the tokens.
        bias_out_LD: second bias; required with ``d_weight_TK``.
        d_weight_TK: gradients of the combine weights without the second bias's share; None to add nothing.

    Returns:
        Gradients of the first bias, the second bias and the tokens, each None if it is not needed.
    """
    experts = end_L.shape[0]
    width = d_out.shape[1]
    height = 0 if d_hidden_MP is None else d_hidden_MP.shape[1]
    rows = 0 if d_rows_MD is None else d_rows_MD.shape[0]
    tokens, top_k = (0, 1) if inverse_TK is None else inverse_TK.shape
    d_bias_in_LP = d_out.new_empty(experts, height) if needs_in else None
    d_bias_out_LD = d_out.new_empty(experts, width) if needs_out else None
    d_x_TD = None if d_rows_MD is None else torch.empty_like(d_out)
    over_tokens = by_rows(tokens, width, at_once(d_out))
    blocks = experts * (-(-height // 32) * needs_in + -(-width // 32) * needs_out)
    if d_rows_MD is not None or d_weight_TK is not None:
        blocks += over_tokens.grid[0]
    _start(
        f"bias_gradients<{DTYPES[d_out.dtype]}>",
        Geometry((max(1, blocks), 1, 1), over_tokens.block, 4 * 256),
        d_out,
        perm_M,
        weight_N,
        d_hidden_MP,
        end_L,
        experts,
        width,
        height,
        d_bias_in_LP,
        d_bias_out_LD,
        inverse_TK,
        limit,
        tokens,
        top_k,
        rows,
        d_rows_MD,
        d_x_TD,
        bias_out_LD,
        d_weight_TK,
    )
    return d_bias_in_LP, d_bias_out_LD, d_x_TD


def activate(
    before_MP: Tensor,
    bias_LP: Tensor | None,
    end_L: Tensor,
    limit: Tensor | None,
    code: int,
    gated: bool,
) -> Tensor:
    """Return the activation of ``before + bias``: [M, P] -> [M, H]. Also add the bias to ``before`` in place.

    Args:
        code: index in `fmoe.kernels.backends.ACTIVATIONS`.
    """
    rows, height = before_MP.shape
    hidden = height // 2 if gated else height
    active_MH = before_MP.new_empty(rows, hidden)
    name = f"activate<{DTYPES[before_MP.dtype]}, {code}, {str(gated).lower()}>"
    geometry = by_rows(rows, hidden, at_once(before_MP))
    hidden_MP = None if bias_LP is None else before_MP
    _start(name, geometry, before_MP, bias_LP, end_L, end_L.shape[0], limit, rows, hidden, hidden_MP, active_MH)
    return active_MH


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
    """Compute the gradients of the pre-activations and of the combine weights; recompute the activation's result.

    Args:
        d_active_MH: gradient of the activation's result, not yet multiplied by the combine weights.
        code: index in `fmoe.kernels.backends.ACTIVATIONS`.

    Returns:
        The activation's result times the combine weights; the gradient of the pre-activations ``hidden_MP``; and the
            gradient of the combine weights, which is zero for dropped assignments. Each is None if it is not needed.
    """
    rows, hidden = d_active_MH.shape
    scaled_MH = torch.empty_like(d_active_MH) if needs_active else None
    d_hidden_MP = torch.empty_like(hidden_MP) if needs_hidden else None
    d_weight_N = None
    if needs_weight and weight_N is not None:
        # The kernel writes only assignments that have a row.
        d_weight_N = torch.empty_like(weight_N) if weight_N.numel() == rows else torch.zeros_like(weight_N)
    outputs = (scaled_MH, d_hidden_MP, d_weight_N)
    name = f"activate_backward<{DTYPES[hidden_MP.dtype]}, {code}, {str(gated).lower()}>"
    geometry = by_rows(rows, hidden, at_once(hidden_MP), 4)
    _start(name, geometry, hidden_MP, d_active_MH, weight_N, perm_M, limit, rows, hidden, *outputs)
    return outputs


def plan_tile(assignments: int, experts: int) -> int:
    """Return the tile size of `place`: the number of assignments that one thread block sorts."""
    # The cost of `place` is quadratic in the number of tiles.
    most_tiles = max(1, math.isqrt((1 << 24) // (experts + 1)))
    return TILE * max(1, -(-assignments // (TILE * most_tiles)))


def tile_count_shape(assignments: int, experts: int) -> tuple[int, int]:
    """Return the shape of ``tile_count``, an argument of `place`."""
    return max(1, -(-assignments // plan_tile(assignments, experts))), experts + 1


def place(
    expert_N: Tensor, experts: int, tile_count: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sort assignments by expert, stably, with dropped ones (-1) last.

    Args:
        expert_N: expert of each assignment, -1 if dropped.
        tile_count: number of assignments by tile (`plan_tile`) and expert, from `drop_over_capacity`; None to count
            them.

    Returns:
        The fields of a `fmoe.kernels.rows.DispatchPlan`: (perm_N, inverse_N, kept_N, count_E, end_E, num_kept).
    """
    assignments = expert_N.numel()
    tile = plan_tile(assignments, experts)
    tiles, bins = tile_count_shape(assignments, experts)
    sizes = (assignments, experts, tile)
    if tiles == 1:
        tile_count = None
    elif tile_count is None:
        tile_count = expert_N.new_empty(tiles, bins, dtype=torch.int32)
        _start("count_tiles", Geometry((tiles, 1, 1), (256, 1, 1), 4 * bins), expert_N, *sizes, tile_count)
    outputs = (
        torch.empty_like(expert_N),
        torch.empty_like(expert_N),
        torch.empty_like(expert_N, dtype=torch.bool),
        expert_N.new_empty(experts),
        expert_N.new_empty(experts, dtype=torch.int32),
        expert_N.new_empty(1),
    )
    warps = num_warps(8 * bins, 4 * (bins + 1))
    geometry = Geometry((tiles, 1, 1), (32 * warps, 1, 1), 4 * ((warps + 2) * bins + warps))
    _start("place", geometry, expert_N, *sizes, tile_count, *outputs)
    return outputs


def count_choices(expert_TK: Tensor, mask_T: Tensor | None, experts: int, tiles: TokenTiles) -> Counted:
    """Count the assignments of each expert in each tile, separately for the first choices, the second choices, ..."""
    tokens, top_k = expert_TK.shape
    count_BKE = expert_TK.new_empty(tiles.count, top_k, experts, dtype=torch.int32)
    sum_B3 = expert_TK.new_empty(tiles.count, 3, dtype=torch.float32)
    geometry = Geometry((tiles.count, top_k, 1), (256, 1, 1), 4 * (experts + 1))
    sizes = (tokens, top_k, experts, *tiles.sizes)
    _start("count_choices", geometry, expert_TK, mask_T, *sizes, count_BKE, sum_B3)
    return Counted(tiles, count_BKE, None, sum_B3, None)


@dataclass(frozen=True)
class RouterSums:
    """Losses and statistics of a router.

    Attributes:
        fraction_GE: each expert's share of a routing group's assignments, those over capacity included.
        stats: `fmoe.routing.RoutingStats.sums` with the losses balance and z.
        balance, z: load balancing loss and router z-loss, scalars.
    """

    fraction_GE: Tensor
    stats: Tensor
    balance: Tensor
    z: Tensor


@dataclass(frozen=True)
class Queued:
    """Result of `queue`.

    Attributes:
        limit_G: maximum number of assignments per expert in each group, int64; 2^31 - 1 without a capacity factor.
        tile_count: counters that `drop_over_capacity` increments, initially zero; None without a capacity factor.
        sums: the router's losses and statistics; None if `queue` got its counts from `count_choices`.
    """

    limit_G: Tensor
    tile_count: Tensor | None
    sums: RouterSums | None


def queue(counted: Counted, top_k: int, factor: float | None) -> Queued:
    """Add up the counts and sums of all tiles, and compute capacities, losses and statistics from them.

    The assignments to an expert in a routing group form a queue, first choices before second choices. With a capacity
    factor, each count in ``count_BCE`` is overwritten by the queue position of the tile's first assignment.

    Args:
        factor: capacity factor; None for no limit.
    """
    tiles = counted.tiles
    _, choices, experts = counted.count_BCE.shape
    groups = max(1, tiles.groups)
    chunks = -(-experts // 32)
    new = counted.sum_B3.new_empty
    limit_G = new(groups, dtype=torch.int64)
    tile_count = None
    if factor:
        tile_count = new(*tile_count_shape(tiles.tokens * top_k, experts), dtype=torch.int32)
    sums = None
    of_losses: tuple[Argument, ...] = (None,) * 7
    if counted.sum_BE is not None:
        sums = RouterSums(new(groups, experts), new(experts + 5), new(()), new(()))
        kept_GE = new(groups, experts, dtype=torch.int64)
        part_GX = new(groups, chunks, 2, dtype=torch.float64)
        of_losses = (sums.fraction_GE, kept_GE, part_GX, counted.ticket, sums.stats, sums.balance, sums.z)
    _start(
        "queue",
        Geometry((groups, chunks, 1), (32, 16, 1), 12 * 32 * 16),
        counted.count_BCE,
        counted.sum_BE,
        counted.sum_B3,
        groups,
        tiles.per_group,
        choices,
        experts,
        top_k,
        float(factor or 0.0),
        limit_G,
        tile_count,
        0 if tile_count is None else tile_count.numel(),
        *of_losses,
    )
    return Queued(limit_G, tile_count, sums)


def drop_over_capacity(expert_TK: Tensor, counted: Counted, queued: Queued) -> tuple[Tensor, Tensor]:
    """Drop the assignments over capacity.

    Returns:
        ``expert_TK``, with -1 for assignments over the expert's capacity in the routing group; and ``tile_count`` for
            `place`.
    """
    tokens, top_k = expert_TK.shape
    experts = counted.count_BCE.shape[2]
    tiles = counted.tiles
    assert queued.tile_count is not None
    kept_TK = torch.empty_like(expert_TK)
    warps = min(num_warps(0, 4 * experts), top_k)
    geometry = Geometry((tiles.count, 1, 1), (32 * warps, 1, 1), 4 * warps * experts)
    sizes = (tokens, top_k, experts, *tiles.sizes)
    tile = plan_tile(tokens * top_k, experts)
    outputs = (kept_TK, queued.tile_count)
    _start("drop_over_capacity", geometry, expert_TK, *sizes, counted.count_BCE, queued.limit_G, tile, *outputs)
    return outputs


def segment_order(receive_S: Tensor, order_S: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation that brings segments of rows into the order ``order_S``, and its inverse.

    Args:
        receive_S: number of rows of each segment.
        order_S: indices of the segments in the order of the result.
        rows: total number of rows.
    """
    segments = len(receive_S)
    order_R = receive_S.new_empty(rows)
    inverse_R = torch.empty_like(order_R)
    geometry = Geometry((max(1, -(-rows // 256)), 1, 1), (256, 1, 1), 4 * (3 * segments + 2 + 8))
    _start("segment_order", geometry, receive_S, order_S, segments, rows, order_R, inverse_R)
    return order_R, inverse_R


def route(
    logits_TE: Tensor, bias_E: Tensor | None, mask_T: Tensor | None, top_k: int, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Choose the experts of each token, and compute their combine weights, by a rule.

    Returns:
        (expert_TK, weight_TK, score_TE, logsumexp_T, entropy_T).
    """
    tokens = logits_TE.shape[0]
    score_TE = torch.empty_like(logits_TE, dtype=torch.float32)
    entropy_T = logits_TE.new_empty(tokens, dtype=torch.float32)
    tiles = TokenTiles(tokens, max(1, tokens))
    expert_TK, weight_TK, logsumexp_T = _route(
        logits_TE, bias_E, mask_T, top_k, rule, tiles, False, score_TE, entropy_T, None
    )
    return expert_TK, weight_TK, score_TE, logsumexp_T, entropy_T


def route_counted(
    logits_TE: Tensor, mask_T: Tensor | None, top_k: int, rule: Rule, tiles: TokenTiles, *, by_choice: bool
) -> tuple[Tensor, Tensor, Tensor, Counted]:
    """Route by the softmax of the logits as `route` does, and count assignments by tile.

    Args:
        by_choice: count the first choices, the second choices, ... separately.

    Returns:
        (expert_TK, weight_TK, logsumexp_T, counts and sums by tile).
    """
    experts = logits_TE.shape[1]
    new = logits_TE.new_empty
    counted = Counted(
        tiles,
        count_BCE=new(tiles.count, top_k if by_choice else 1, experts, dtype=torch.int32),
        sum_BE=new(tiles.count, experts, dtype=torch.float32),
        sum_B3=new(tiles.count, 3, dtype=torch.float32),
        ticket=new(1, dtype=torch.int32),
    )
    return *_route(logits_TE, None, mask_T, top_k, rule, tiles, by_choice, None, None, counted), counted


def _route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    mask_T: Tensor | None,
    top_k: int,
    rule: Rule,
    tiles: TokenTiles,
    by_choice: bool,
    score_TE: Tensor | None,
    entropy_T: Tensor | None,
    counted: Counted | None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = logits_TE.shape
    new = logits_TE.new_empty
    outputs = (
        new(tokens, top_k, dtype=torch.int64),
        new(tokens, top_k, dtype=torch.float32),
        new(tokens, dtype=torch.float32),
    )
    expert_TK, weight_TK, logsumexp_T = outputs
    counts: tuple[Argument, ...] = (None,) * 4
    if counted is not None:
        counts = (counted.count_BCE, counted.sum_BE, counted.sum_B3, counted.ticket)
    width, of_block, of_warp = route_words(experts, top_k, rule.groups, counted is not None, by_choice)
    warps = num_warps(4 * of_block, 4 * of_warp)
    _start(
        f"route<{DTYPES[logits_TE.dtype]}, {width}>",
        Geometry((tiles.count, 1, 1), (32 * warps, 1, 1), 4 * (of_block + warps * of_warp)),
        logits_TE,
        bias_E,
        mask_T,
        tokens,
        experts,
        top_k,
        rule.is_sigmoid,
        rule.by_logits,
        rule.normalize,
        float(rule.scale),
        rule.groups,
        rule.kept_groups,
        rule.best_of,
        *tiles.sizes,
        by_choice,
        expert_TK,
        weight_TK,
        score_TE,
        logsumexp_T,
        entropy_T,
        *counts,
    )
    return outputs


def route_words(experts: int, top_k: int, groups: int, counted: bool, by_choice: bool) -> tuple[int, int, int]:
    """Return (experts per lane, words per block, words per warp) of the CUDA kernel ``route``.

    Words are 4 bytes of shared memory. The first number is 0 for more than 256 experts.
    """
    width = next((width for width in ROUTE_WIDTHS if 32 * width >= experts), 0)
    of_block = counted * experts * (top_k if by_choice else 1)
    of_warp = top_k + groups + 3 + counted * experts + (width == 0) * experts
    return width, of_block, of_warp


@dataclass(frozen=True)
class LossGradients:
    """Gradients of the two losses that `queue` computes, and the tensors for the backward pass of these losses.

    Attributes:
        d_balance, d_z: gradients of the losses, scalars; None if a loss has no gradient.
        fraction_GE, stats: as in `RouterSums`.
    """

    d_balance: Tensor | None
    d_z: Tensor | None
    fraction_GE: Tensor
    stats: Tensor
    mask_T: Tensor | None
    tiles: TokenTiles


def route_backward(
    logits_TE: Tensor,
    expert_TK: Tensor,
    logsumexp_T: Tensor,
    d_weight_TK: Tensor | None,
    d_score_TE: Tensor | None,
    d_logsumexp_T: Tensor | None,
    losses: LossGradients | None = None,
    *,
    is_sigmoid: bool,
    normalize: bool,
    scale: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the gradient of the logits.

    Args:
        dtype: dtype of the result; None for the dtype of the logits.
    """
    tokens, experts = logits_TE.shape
    d_logits_TE = torch.empty_like(logits_TE, dtype=dtype)
    of_losses: tuple[Argument, ...] = (None,) * 5
    tiles = TokenTiles(tokens, max(1, tokens))
    if losses is not None:
        routed = losses.stats[experts + 2 : experts + 3]
        of_losses = (losses.mask_T, losses.d_balance, losses.d_z, losses.fraction_GE, routed)
        tiles = losses.tiles
    warps = num_warps(0, 4 * experts)
    _start(
        f"route_backward<{DTYPES[logits_TE.dtype]}, {DTYPES[d_logits_TE.dtype]}>",
        Geometry((max(1, -(-tokens // warps)), 1, 1), (32 * warps, 1, 1), 4 * warps * experts),
        logits_TE,
        expert_TK,
        logsumexp_T,
        d_weight_TK,
        d_score_TE,
        d_logsumexp_T,
        *of_losses,
        tokens,
        experts,
        expert_TK.shape[1],
        is_sigmoid,
        normalize,
        float(scale),
        *tiles.sizes[:3],
        d_logits_TE,
    )
    return d_logits_TE
