"""Causal attention by torch's `scaled_dot_product_attention`, optionally with a sliding window and sinks.

With a window of W tokens and no key cache, queries run in blocks of W. A block sees at most 2 W keys, so time and
memory grow linearly with the sequence length. With a stride of N, a query also sees every N-th key before its window,
at the positions N - 1, 2 N - 1, ... (the pattern "fixed" of sparse transformers, arXiv 1904.10509).

A sink is a score in the softmax that has no value (arXiv 2309.17453): ``exp(s_j) / (exp(sink) + sum_k exp(s_k))``.
GPT-OSS learns one sink per head (arXiv 2508.10925). Here the sink is an additional first key, whose value is zero.
Eight elements appended to each query and key give it its score. Fused kernels with a causal mask thus remain usable.

Shape letters: B sequences, S queries, K keys, H query heads, G key/value heads, d width of a key, v width of a value, W
window.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_FURTHER = 8  # elements appended to a head; fused kernels for GPUs need a head width that is a multiple of eight


def causal_attention(
    query_BHSd: Tensor,
    key_BGKd: Tensor,
    value_BGKv: Tensor,
    *,
    scale: float,
    window: int | None = None,
    stride: int | None = None,
    sinks_H: Tensor | None = None,
    seen: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the attention outputs [B, H, S, v]. The last query is at the position of the last key.

    Args:
        scale: factor of the scores.
        window: number of keys that a query sees, up to and including its own; None for all of them.
        stride: with a window, distance of the keys before it that a query sees, too; None for none.
        sinks_H: logit of each head's attention sink; None for no sinks.
        seen: boolean mask, broadcast to [B, 1, S, K], False where a query must not see a key. The mask must itself be
            causal. With None, each query sees all keys up to its own position. ``window`` applies in both cases.
        dropout: dropout rate of the attention probabilities.
    """
    queries = query_BHSd.shape[2]
    keys = key_BGKd.shape[2]
    # With a key cache: drop keys before the first query's window.
    if window is not None and stride is None and queries < keys:
        first = max(0, keys - queries - window + 1)
        key_BGKd = key_BGKd[:, :, first:]
        value_BGKv = value_BGKv[:, :, first:]
        keys = keys - first
        seen = None if seen is None else seen[..., first:]
    options: dict[str, Any] = {"scale": scale, "sinks_H": sinks_H, "dropout": dropout}
    if window is None or keys <= window or (queries == 1 and stride is None):
        if seen is None and 1 < queries < keys:
            seen = visible(queries, keys, window, query_BHSd.device, stride)
        return _attend(query_BHSd, key_BGKd, value_BGKv, seen, **options)
    if queries < keys:
        near = visible(queries, keys, window, query_BHSd.device, stride)
        return _attend(query_BHSd, key_BGKd, value_BGKv, near if seen is None else near & seen, **options)
    if stride is not None:
        return _by_blocks_with_stride(query_BHSd, key_BGKd, value_BGKv, window, stride, seen, **options)
    return _by_blocks(query_BHSd, key_BGKd, value_BGKv, window, seen, **options)


def visible(queries: int, keys: int, window: int | None, device: torch.device, stride: int | None = None) -> Tensor:
    """Return the causal mask [queries, keys], True where a query sees a key.

    The last query is at the position of the last key.

    Args:
        window: number of keys that a query sees, up to and including its own; None for all of them.
        stride: see `causal_attention`.
    """
    position_K = torch.arange(keys, dtype=torch.int64, device=device)
    return _visible(position_K[keys - queries :], position_K, window, stride)


def _visible(query_S: Tensor, key_K: Tensor, window: int | None, stride: int | None) -> Tensor:
    """Return the mask [S, K] for queries and keys at these positions."""
    distance_SK = query_S.unsqueeze(1) - key_K
    is_earlier = distance_SK >= 0
    if window is None:
        return is_earlier
    is_near = distance_SK < window
    return is_earlier & (is_near if stride is None else is_near | (key_K % stride == stride - 1))


def _by_blocks(query: Tensor, key: Tensor, value: Tensor, window: int, seen: Tensor | None, **options: Any) -> Tensor:
    """Compute sliding-window attention in blocks of ``window`` queries. Needs as many keys as queries."""
    # A block of queries sees keys of its own block and of the previous one.
    keys = key.split(window, dim=2)  # slices would have gradients of full size
    values = value.split(window, dim=2)
    near = visible(window, 2 * window, window, query.device)
    outputs: list[Tensor] = []
    for index, block in enumerate(query.split(window, dim=2)):
        begin = index * window
        count = block.shape[2]
        first = max(0, begin - window)
        mask = None if index == 0 else near[:count, : window + count]
        if seen is not None:
            seen_block = seen[..., begin : begin + count, first : begin + count]
            mask = seen_block if mask is None else mask & seen_block
        both = slice(max(0, index - 1), index + 1)
        block_keys = torch.cat(keys[both], dim=2)
        block_values = torch.cat(values[both], dim=2)
        outputs.append(_attend(block, block_keys, block_values, mask, **options))
    return torch.cat(outputs, dim=2)


def _by_blocks_with_stride(
    query: Tensor, key: Tensor, value: Tensor, window: int, stride: int, seen: Tensor | None, **options: Any
) -> Tensor:
    """As `_by_blocks`, for blocks that also see every ``stride``-th key before the previous block."""
    position = torch.arange(key.shape[2], dtype=torch.int64, device=key.device)
    keys = key.split(window, dim=2)
    values = value.split(window, dim=2)
    far_keys = key[:, :, stride - 1 :: stride]
    far_values = value[:, :, stride - 1 :: stride]
    outputs: list[Tensor] = []
    for index, block in enumerate(query.split(window, dim=2)):
        begin = index * window
        end = begin + block.shape[2]
        first = max(0, begin - window)
        count = first // stride
        both = slice(max(0, index - 1), index + 1)
        block_keys = torch.cat([far_keys[:, :, :count], *keys[both]], dim=2)
        block_values = torch.cat([far_values[:, :, :count], *values[both]], dim=2)
        at = torch.cat([position[stride - 1 : first : stride], position[first:end]])
        mask = _visible(position[begin:end], at, window, stride)
        if seen is not None:
            mask = mask & seen[..., begin:end, :].index_select(-1, at)
        outputs.append(_attend(block, block_keys, block_values, mask, **options))
    return torch.cat(outputs, dim=2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    *,
    scale: float,
    sinks_H: Tensor | None,
    dropout: float,
) -> Tensor:
    """Return the attention outputs.

    Args:
        seen: mask, False where a query must not see a key. None for causal attention; a single query then sees all
            keys.
    """
    is_causal = seen is None and query.shape[2] > 1
    width = value.shape[-1]
    if sinks_H is not None:
        query, key, value = _with_sinks(query, key, value, sinks_H, scale, is_causal)
        seen = None if seen is None else F.pad(seen, (1, 0), value=True)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=seen,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out if sinks_H is None else out[:, :, int(is_causal) :, :width]


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value with the attention sink as an additional first key; if causal, also a dummy query."""
    # The dummy is the first query, which sees only the sink. Its output is not used.
    score_H = sinks_H.to(torch.promote_types(sinks_H.dtype, torch.float32)) / scale
    high_H = score_H.to(query.dtype)
    low_H = (score_H - high_H).to(query.dtype)  # rounding error of the first term in 16 bits
    sink_H2 = torch.stack([high_H, low_H], dim=1)
    batch, heads, length, _ = query.shape
    query = torch.cat([query, sink_H2.view(1, heads, 1, 2).expand(batch, heads, length, 2)], dim=-1)
    query = F.pad(query, (0, _FURTHER - 2, int(is_causal), 0))
    width = key.shape[-1]
    sink_key = key.new_zeros(width + _FURTHER)
    sink_key[width : width + 2] = 1
    key = torch.cat([sink_key.expand(*key.shape[:2], 1, -1), F.pad(key, (0, _FURTHER))], dim=2)
    # Fused kernels for CPUs need values as wide as keys.
    return query, key, F.pad(value, (0, key.shape[-1] - value.shape[-1], 1, 0))


def sinusoids(count: int, width: int, device: torch.device | str) -> Tensor:
    """Return Transformer-XL's sinusoidal encodings of the distances ``count - 1`` down to 0: sines, then cosines.

    Returns:
        float32 [count, width].
    """
    distances = torch.arange(count - 1, -1, -1, dtype=torch.float32, device=device)
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angles = distances.unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def relative_shift(scores: Tensor) -> Tensor:
    """Shift scores from columns indexed by distance to columns indexed by key (arXiv 1901.02860, appendix B).

    Args:
        scores: [..., S, K]; column c belongs to the distance K - 1 - c.

    Returns:
        [..., S, K]; column j of row i belongs to key j, at the distance i + K - S - j. Columns of later keys are
        undefined.
    """
    queries, keys = scores.shape[-2:]
    padded = F.pad(scores, (1, 0)).flatten(-2)  # read with K columns, each row shifts by one more
    return padded[..., queries:].unflatten(-1, (queries, keys))
