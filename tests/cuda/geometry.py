"""Blocks of each launch, as docs/kernels.md has the formulas. Not a test itself."""

SHARED = 48 * 1024


def rows(num_rows: int, width: int, at_once: int, shared_a_warp: int = 0) -> tuple:
    """Grid, block, shared bytes of kernels that take a row by some threads."""
    vectors = -(-width // at_once)
    bx = 32
    while bx < 256 and 4 * bx < vectors:
        bx *= 2
    by = 256 // bx
    return max(1, -(-num_rows // by)), (bx, by), shared_a_warp * by * bx // 32


def bias_gradients(columns: list[int], num_experts: int, num_tokens: int, width: int, at_once: int) -> tuple:
    """``columns``: the widths of the biases whose gradients are taken."""
    of_tokens, block, _ = rows(num_tokens, width, at_once)
    return num_experts * sum(-(-n // 32) for n in columns) + of_tokens, block, 4 * 256


def warps(fixed: int, each: int) -> int:
    """Return the number of warps that fit into shared memory."""
    return max(1, min(8, (SHARED - fixed) // max(each, 1)))


def route_items(num_experts: int) -> int:
    """I: an instance for so many experts a lane, 0 for any number."""
    return next((items for items in (1, 2, 4, 8) if 32 * items >= num_experts), 0)


def tiles(num_tokens: int, group_size: int, tile: int) -> int:
    """Tiles of the tokens of routing groups."""
    return max(1, -(-num_tokens // group_size)) * -(-group_size // tile)


def route(
    num_tokens: int, num_experts: int, top_k: int, groups: int, items: int, num_tiles: int = 1, counted: int = 0
) -> tuple:
    """``counted``: the choices that are counted apart, 0 for none."""
    each = 4 * (top_k + groups + 3 + (num_experts if counted else 0) + (0 if items else num_experts))
    fixed = 4 * num_experts * counted
    w = warps(fixed, each)
    return num_tiles, 32 * w, fixed + w * each


def route_backward(num_tokens: int, num_experts: int) -> tuple:
    w = warps(0, 4 * num_experts)
    return max(1, -(-num_tokens // w)), 32 * w, 4 * w * num_experts


def place(num_tiles: int, num_experts: int) -> tuple:
    w = warps(8 * (num_experts + 1), 4 * (num_experts + 2))
    return num_tiles, 32 * w, 4 * ((w + 2) * (num_experts + 1) + w)


def count_choices(num_tiles: int, top_k: int, num_experts: int) -> tuple:
    return (num_tiles, top_k), 256, 4 * (num_experts + 1)


def queue(num_groups: int, num_experts: int) -> tuple:
    return (max(1, num_groups), -(-num_experts // 32)), (32, 16), 12 * 32 * 16


def drop(num_tiles: int, top_k: int, num_experts: int) -> tuple:
    w = min(warps(0, 4 * num_experts), top_k)
    return num_tiles, 32 * w, 4 * w * num_experts


def segment_order(num_segments: int, num_rows: int) -> tuple:
    return max(1, -(-num_rows // 256)), 256, 4 * (3 * num_segments + 2 + 8)
