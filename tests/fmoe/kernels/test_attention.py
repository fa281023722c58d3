"""Attention with windows and sinks against all scores at once in float64: values and gradients."""

import pytest
import torch
from compare import assert_close

from fmoe.kernels.attention import causal_attention, visible

SIZES = {"whole": (37, 37), "one after a cache": (1, 37), "five after a cache": (5, 37), "one": (1, 1), "short": (6, 6)}
NAMES = ("out", "query", "key", "value", "sinks")


def plain(query, key, value, sinks, *, scale, window, seen, stride=None):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    position = torch.arange(key.shape[2])
    distance = position[-query.shape[2] :].unsqueeze(1) - position
    hidden = distance >= (window or key.shape[2])
    if stride is not None:
        hidden &= (position + 1) % stride != 0
    hidden |= distance < 0
    scores = scores.masked_fill(hidden if seen is None else hidden | ~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value


def inputs(queries, keys, has_sinks, dtype=torch.float64):
    g = torch.Generator().manual_seed(queries + keys)
    shapes = [(2, 4, queries, 6), (2, 2, keys, 6), (2, 2, keys, 5), *([(4,)] if has_sinks else [])]
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def results(function, leaves, **options):
    out = function(*leaves[:3], leaves[3] if len(leaves) > 3 else None, **options)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


def ours(query, key, value, sinks, **options):
    return causal_attention(query, key, value, sinks_H=sinks, **options)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("has_documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("stride", [None, 3])
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients(size, stride, has_documents, has_sinks):
    queries, keys = SIZES[size]
    for window in (None, 1, 4, 16, 36, 37, 50):
        if window is None and stride is not None:
            continue
        seen = None
        if has_documents:  # of 7 tokens each
            document = torch.arange(keys) // 7
            seen = (document[-queries:].unsqueeze(1) == document) & visible(queries, keys, None, document.device)
            seen = seen.expand(2, 1, queries, keys)
        options = {"scale": 0.3, "window": window, "seen": seen, "stride": stride}
        found, expected = (results(run, inputs(queries, keys, has_sinks), **options) for run in (ours, plain))
        for name, got, wanted in zip(NAMES, found, expected, strict=False):
            assert_close(got, wanted, 1e-13, f"{name}, window {window}")


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_precisions(dtype, limit, window):
    """A sink is as exact as in float32: a scale that is no power of two rounds nothing away."""
    leaves = inputs(37, 37, True, dtype)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    options = {"scale": 0.3, "window": window, "seen": None}
    for name, got, wanted in zip(NAMES, results(ours, leaves, **options), results(plain, wide, **options), strict=True):
        assert got.dtype == dtype
        assert_close(got, wanted, limit, name)


def test_a_window_costs_its_own_keys(monkeypatch):
    """No call has more than twice the window's keys, and all keys are given out twice at most."""
    from torch.nn import functional as F

    sizes = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *x, **o: sizes.append((x[0].shape[2], x[1].shape[2])) or attend(*x, **o),
    )
    query, key, value = (x.detach() for x in inputs(37, 37, False))
    causal_attention(query, key, value, scale=1.0, window=8)
    assert sizes == [(8, 8), (8, 16), (8, 16), (8, 16), (5, 13)]
    sizes.clear()
    causal_attention(query[:, :, :1], key, value, scale=1.0, window=8)
    assert sizes == [(1, 8)]


def test_dropout_keeps_the_mean():
    """Dropped probabilities are zero, and the others are divided by the rate of those kept; sinks stay."""
    g = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 4, 8, generator=g) for _ in range(2))
    value = torch.eye(4).view(1, 1, 4, 4)  # outputs are the probabilities
    options = {"scale": 0.5, "sinks_H": torch.tensor([0.7])}
    torch.manual_seed(0)
    kept = causal_attention(query, key, value, **options)
    dropped = torch.stack([causal_attention(query, key, value, dropout=0.25, **options) for _ in range(40)])
    is_zero = dropped == 0
    torch.testing.assert_close(dropped, torch.where(is_zero, 0.0, kept / 0.75))
    seen = visible(4, 4, None, query.device).expand_as(dropped)
    assert 0.15 < is_zero[seen].float().mean() < 0.35
