"""Triton kernels of GEMMs over rows grouped by expert, with fused gather and activation.

Importing this module needs triton. `up`, `multiply` and `down_backward` read the tiles of each expert from the output
of `schedule`, on the device. One program computes a tile. It sums in float32, in a fixed order, without atomics.

Shape letters: M rows, L experts, D, N, O and I widths of a product, H hidden width, P = 2 H if gated, else H.
"""

import triton
import triton.language as tl


@triton.jit
def schedule(end_ptr, tile_ptr, experts, tiles, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the expert and the first row of each tile of BLOCK_M rows, int32 [tiles, 2]; expert -1 for unused tiles.

    Launch one program per expert, and one for unused tiles. EXPERTS is ``experts`` rounded up to a power of two.
    """
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    end = tl.load(end_ptr + index, mask=index < experts, other=0)
    begin = tl.load(end_ptr + index - 1, mask=(index > 0) & (index < experts), other=0)
    count = tl.where(index < experts, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    before = tl.sum(tl.where(index < expert, count, 0), 0)
    first_row = tl.sum(tl.where(index == expert, begin, 0), 0)
    own_tiles = tl.sum(tl.where(index == expert, count, 0), 0)
    if expert == experts:
        own_tiles = tiles - before
    name = tl.where(expert == experts, -1, expert)
    for first in range(0, own_tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        at = tile_ptr + 2 * (before + tile)
        tl.store(at, tl.zeros([BLOCK], tl.int32) + name, mask=tile < own_tiles)
        tl.store(at + 1, first_row + tile * BLOCK_M, mask=tile < own_tiles)


@triton.jit
def _place(tiles, columns, GROUP: tl.constexpr):
    """Return the row and column of this program's tile in the grid of output tiles."""
    # Consecutive programs process GROUP rows of tiles, column by column, to share the weights in the L2 cache.
    program = tl.program_id(0)
    group = program // (GROUP * columns)
    height = tl.minimum(tiles - group * GROUP, GROUP)
    inside = program % (GROUP * columns)
    return group * GROUP + inside % height, inside // height


@triton.jit
def _accumulate(
    total, x_ptr, w_ptr, width, stride_k, EVEN: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr
):
    """Return total + x [rows, width] @ w [width, columns], given pointers to their first blocks."""
    step = tl.arange(0, BLOCK_K)
    for k in range(0, width, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptr)
            w = tl.load(w_ptr)
        else:
            x = tl.load(x_ptr, mask=(k + step < width)[None, :], other=0.0)
            w = tl.load(w_ptr, mask=(k + step < width)[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
        x_ptr += BLOCK_K
        w_ptr += BLOCK_K * stride_k
    return total


@triton.jit
def _activation(x, A: tl.constexpr):
    """Return value and derivative at x of activation number A, an index in `fmoe.kernels.backends.ACTIVATIONS`."""
    if A == 0:
        phi = 0.5 * (1.0 + tl.math.erf(0.70710678118654752 * x))
        value = x * phi
        slope = phi + x * 0.39894228040143268 * tl.exp(-0.5 * x * x)
    elif A == 1:
        half = 1.0 / (1.0 + tl.exp(-2.0 * 0.79788456080286536 * (x + 0.044715 * x * x * x)))
        value = x * half
        slope = half + x * 2.0 * half * (1.0 - half) * 0.79788456080286536 * (1.0 + 3.0 * 0.044715 * x * x)
    elif A == 2:
        value = tl.where(x < 0.0, 0.0, x)
        slope = tl.where(x > 0.0, 1.0, 0.0)
    elif A == 3:
        half = 1.0 / (1.0 + tl.exp(-x))
        value = x * half
        slope = half + value * (1.0 - half)
    else:
        clamped = tl.where(x > 7.0, 7.0, x)
        half = 1.0 / (1.0 + tl.exp(-1.702 * clamped))
        value = clamped * half
        slope = tl.where(x <= 7.0, half + 1.702 * value * (1.0 - half), 0.0)
    return value, slope


@triton.jit
def _second(x, A: tl.constexpr):
    """Return a gated expert's second factor and its derivative, given x, the second half of the pre-activations."""
    value = x
    slope = 1.0
    if A == 4:
        value = tl.where(x < -7.0, -7.0, tl.where(x > 7.0, 7.0, x)) + 1.0
        slope = tl.where((x >= -7.0) & (x <= 7.0), 1.0, 0.0)
    return value, slope


@triton.jit
def _rows_of(first_row, end, x_ptr, index_ptr, width, per, IS_GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the row indices of a tile, their assignments, and pointers to their data."""
    # Past the expert's end, assignments and pointers repeat the first row's.
    row = first_row + tl.arange(0, BLOCK)
    valid = tl.where(row < end, row, first_row)
    index = valid.to(tl.int64)
    source = index
    if IS_GATHERED:
        index = tl.load(index_ptr + valid)
        source = index // per
    return row, index, x_ptr + source * width


@triton.jit
def up(
    x_ptr,
    index_ptr,
    w_ptr,
    bias_ptr,
    hidden_ptr,
    active_ptr,
    tile_ptr,
    end_ptr,
    tiles,
    width,
    hidden,
    per,
    A: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATHERED: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute hidden [M, P] = x[index // per] @ w[e].T + bias[e], and its activation active [M, H].

    If gated, active is act(first half) * `_second`(second half). w is [L, P, D]. The activation is computed from
    ``hidden`` after rounding to its dtype, as in the backward pass.
    """
    tile, column = _place(tiles, tl.cdiv(hidden, BLOCK_N), GROUP)
    expert = tl.load(tile_ptr + 2 * tile)
    if expert >= 0:
        first_row = tl.load(tile_ptr + 2 * tile + 1)
        end = tl.load(end_ptr + expert)
        row, _index, x_row = _rows_of(first_row, end, x_ptr, index_ptr, width, per, IS_GATHERED, BLOCK_M)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = n % hidden
        k = tl.arange(0, BLOCK_K)
        height = 2 * hidden if GATED else hidden
        x = x_row[:, None] + k[None, :]
        w = w_ptr + expert.to(tl.int64) * height * width + valid.to(tl.int64)[None, :] * width + k[:, None]
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        first = zero
        if GATED:
            second = zero
            w_second = w + hidden.to(tl.int64) * width
            for begin in range(0, width, BLOCK_K):
                if EVEN:
                    rows = tl.load(x)
                    one = tl.load(w)
                    other = tl.load(w_second)
                else:
                    rows = tl.load(x, mask=(begin + k < width)[None, :], other=0.0)
                    one = tl.load(w, mask=(begin + k < width)[:, None], other=0.0)
                    other = tl.load(w_second, mask=(begin + k < width)[:, None], other=0.0)
                first = tl.dot(rows, one, first, input_precision=PRECISION)
                second = tl.dot(rows, other, second, input_precision=PRECISION)
                x += BLOCK_K
                w += BLOCK_K
                w_second += BLOCK_K
        else:
            first = _accumulate(first, x, w, width, 1, EVEN, BLOCK_K, PRECISION)
        kind = active_ptr.dtype.element_ty
        bias = bias_ptr + expert.to(tl.int64) * height + valid
        if HAS_BIAS:
            first += tl.load(bias)[None, :].to(tl.float32)
        is_inside = (row < end)[:, None] & (n < hidden)[None, :]
        at = hidden_ptr + row.to(tl.int64)[:, None] * height + n[None, :]
        rounded = first.to(kind)
        tl.store(at, rounded, mask=is_inside)
        active, _slope = _activation(rounded.to(tl.float32), A)
        if GATED:
            if HAS_BIAS:
                second += tl.load(bias + hidden)[None, :].to(tl.float32)
            rounded = second.to(kind)
            tl.store(at + hidden, rounded, mask=is_inside)
            factor, _slope = _second(rounded.to(tl.float32), A)
            active *= factor
        tl.store(active_ptr + row.to(tl.int64)[:, None] * hidden + n[None, :], active.to(kind), mask=is_inside)


@triton.jit
def multiply(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    tile_ptr,
    end_ptr,
    tiles,
    width,
    columns,
    stride_e,
    stride_n,
    stride_k,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute out [M, N] = x [M, D] @ w[e] + bias[e].

    w[e] is [D, N] with the strides (stride_k, stride_n).
    """
    tile, column = _place(tiles, tl.cdiv(columns, BLOCK_N), GROUP)
    expert = tl.load(tile_ptr + 2 * tile)
    if expert >= 0:
        first_row = tl.load(tile_ptr + 2 * tile + 1)
        end = tl.load(end_ptr + expert)
        row, _index, x_row = _rows_of(first_row, end, x_ptr, x_ptr, width, 1, False, BLOCK_M)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = n % columns
        k = tl.arange(0, BLOCK_K).to(tl.int64)
        x = x_row[:, None] + k[None, :]
        w = w_ptr + expert.to(tl.int64) * stride_e + valid.to(tl.int64)[None, :] * stride_n + k[:, None] * stride_k
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        total = _accumulate(total, x, w, width, stride_k, EVEN, BLOCK_K, PRECISION)
        if HAS_BIAS:
            total += tl.load(bias_ptr + expert.to(tl.int64) * columns + valid)[None, :].to(tl.float32)
        is_inside = (row < end)[:, None] & (n < columns)[None, :]
        out = out_ptr + row.to(tl.int64)[:, None] * columns + n[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def down_backward(
    grad_ptr,
    index_ptr,
    w_ptr,
    hidden_ptr,
    weight_ptr,
    scaled_ptr,
    d_hidden_ptr,
    dot_ptr,
    tile_ptr,
    end_ptr,
    tiles,
    width,
    hidden,
    per,
    assignments,
    A: tl.constexpr,
    GATED: tl.constexpr,
    IS_GATHERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_ACTIVE: tl.constexpr,
    NEEDS_HIDDEN: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute gradients from d_active = grad[index // per] @ w[e], which is not stored. w is [L, D, H].

    Here, weight is each row's combine weight, and active is the activation of hidden, as in `up`. The kernel writes

    * d_hidden [M, P], the gradient of hidden: weight * d_active times the derivatives of active,
    * scaled [M, H] = weight * active,
    * dot [tiles of columns, assignments], partial sums of the dot products of active and d_active.
    """
    tile, column = _place(tiles, tl.cdiv(hidden, BLOCK_N), GROUP)
    expert = tl.load(tile_ptr + 2 * tile)
    if expert >= 0:
        first_row = tl.load(tile_ptr + 2 * tile + 1)
        end = tl.load(end_ptr + expert)
        row, index, grad_row = _rows_of(first_row, end, grad_ptr, index_ptr, width, per, IS_GATHERED, BLOCK_M)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = n % hidden
        k = tl.arange(0, BLOCK_K).to(tl.int64)
        grad = grad_row[:, None] + k[None, :]
        w = w_ptr + expert.to(tl.int64) * width * hidden + k[:, None] * hidden + valid[None, :]
        d_active = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        d_active = _accumulate(d_active, grad, w, width, hidden, EVEN, BLOCK_K, PRECISION)
        is_inside = (row < end)[:, None] & (n < hidden)[None, :]
        height = 2 * hidden if GATED else hidden
        at = row.to(tl.int64)[:, None] * height + n[None, :]
        value, slope = _activation(tl.load(hidden_ptr + at, mask=is_inside, other=0.0).to(tl.float32), A)
        active = value
        if GATED:
            second, second_slope = _second(
                tl.load(hidden_ptr + at + hidden, mask=is_inside, other=0.0).to(tl.float32), A
            )
            active = value * second
        if NEEDS_WEIGHT:
            dot = tl.sum(tl.where(is_inside, active * d_active, 0.0), 1)
            tl.store(dot_ptr + column.to(tl.int64) * assignments + index, dot, mask=row < end)
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + index)[:, None]
            active *= weight
            d_active *= weight
        kind = hidden_ptr.dtype.element_ty
        if NEEDS_ACTIVE:
            tl.store(scaled_ptr + row.to(tl.int64)[:, None] * hidden + n[None, :], active.to(kind), mask=is_inside)
        if NEEDS_HIDDEN:
            d_first = d_active * slope
            if GATED:
                d_first *= second
                tl.store(d_hidden_ptr + at + hidden, (d_active * value * second_slope).to(kind), mask=is_inside)
            tl.store(d_hidden_ptr + at, d_first.to(kind), mask=is_inside)


@triton.jit
def weights(
    left_ptr,
    right_ptr,
    index_ptr,
    out_ptr,
    end_ptr,
    height,
    width,
    per,
    GATHERS_LEFT: tl.constexpr,
    GATHERS_RIGHT: tl.constexpr,
    ADDS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute out [L, O, I] = left [M, O].T @ right [M, I] over the rows of each expert.

    With ADDS, add to out. Row i of a gathered operand is row index[i] // per of the given tensor.
    """
    o, i = _place(tl.cdiv(height, BLOCK_M), tl.cdiv(width, BLOCK_N), GROUP)
    expert = tl.program_id(1)
    begin = tl.load(end_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(end_ptr + expert)
    m = o * BLOCK_M + tl.arange(0, BLOCK_M)
    n = i * BLOCK_N + tl.arange(0, BLOCK_N)
    left_column = (m % height)[:, None]
    right_column = (n % width)[None, :]
    step = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(begin, end, BLOCK_K):
        row = first + step
        is_inside = row < end
        row64 = row.to(tl.int64)
        source = row64
        if GATHERS_LEFT or GATHERS_RIGHT:
            source = tl.load(index_ptr + row, mask=is_inside, other=0) // per
        left_row = source if GATHERS_LEFT else row64
        right_row = source if GATHERS_RIGHT else row64
        left = tl.load(left_ptr + left_row[None, :] * height + left_column, mask=is_inside[None, :], other=0.0)
        right = tl.load(right_ptr + right_row[:, None] * width + right_column, mask=is_inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    is_out = (m < height)[:, None] & (n < width)[None, :]
    out = out_ptr + (expert.to(tl.int64) * height + m[:, None]) * width + n[None, :]
    if ADDS:
        total += tl.load(out, mask=is_out, other=0.0)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_out)
