"""`SDPAttention` with windows and sinks: against megatron-core's own attention, a plain loop, and at two splits."""

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import only, values
from test_patch_context import BATCH, LENGTH, RATE, SEED, attention_of, start

HEADS, GROUPS, WIDTH = 8, 4, 6
WINDOW = {"window_size": (3, 0), "window_attn_skip_freq": [1]}
SINKS = {"softmax_type": "learnable"}
OPTIONS = {"window": WINDOW, "sinks": SINKS, "both": WINDOW | SINKS}
NAMES = ("out", "query", "key", "value", "sinks")


def drawn():
    g = torch.Generator().manual_seed(0)
    shapes = [(LENGTH, BATCH, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)] + [(HEADS,)]
    inputs = [torch.randn(shape, dtype=torch.float64, generator=g) * 2 for shape in shapes]
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask[1, :, 5:, :5] = True  # two documents
    return inputs, torch.randn(LENGTH, BATCH, HEADS, WIDTH, dtype=torch.float64, generator=g), mask


def results(attention, inputs, d_out, mask, sinks):
    inputs = [x.clone().requires_grad_() for x in inputs]
    found = []
    if getattr(attention, "softmax_offset", None) is not None:
        with torch.no_grad():
            attention.softmax_offset.copy_(sinks)
        found = [attention.softmax_offset]
    out = attention(*inputs, mask)
    out.backward(d_out.flatten(2))
    return [out.detach(), *(x.grad for x in (*inputs, *found))]


def beside_megatrons(name):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    start(1)
    (*inputs, sinks), d_out, _ = drawn()
    ours = attention_of(1, 1, HEADS, GROUPS, WIDTH, params_dtype=torch.float64, **OPTIONS[name])
    theirs = DotProductAttention(ours.config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
    causal = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return results(ours, inputs, d_out, None, sinks), results(theirs, inputs, d_out, causal, sinks)


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_megatrons(forks, name):
    ours, theirs = only(forks.run(1, beside_megatrons, name))
    assert len(ours) == len(theirs) == (4 if name == "window" else 5)
    for part, got, expected in zip(NAMES, ours, theirs, strict=False):
        assert_close(got, expected, 1e-12, part)


def attend(context, tensor, name, dropout):
    """Output and gradients of this rank's tokens and heads, with documents."""
    from fmoe import random

    start(context, tensor)
    random.set_position(SEED, step=3, first_token=60)
    (*inputs, sinks), d_out, mask = drawn()
    rank, slice_ = dist.get_rank() % tensor, dist.get_rank() // tensor
    length = LENGTH // context

    def own(x):
        return x[slice_ * length : (slice_ + 1) * length].chunk(tensor, 2)[rank]

    options = {"params_dtype": torch.float64, **OPTIONS[name]}
    attention = attention_of(context, tensor, HEADS, GROUPS, WIDTH, dropout, **options)
    if name == "sinks":
        assert attention.softmax_offset.tensor_model_parallel and not attention.softmax_offset.any()
    found = results(attention, list(map(own, inputs)), own(d_out), mask, sinks.chunk(tensor)[rank])
    return [found[0].unflatten(2, (-1, WIDTH)), *found[1:]]


def by_hand(name):
    """The same without dropout, from all scores at once."""
    (*inputs, sinks), d_out, mask = drawn()
    leaves = [x.clone().requires_grad_() for x in (*inputs, sinks)]
    query, key, value = (x.permute(1, 2, 0, 3) for x in leaves[:3])
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    position = torch.arange(LENGTH)
    far = (position.unsqueeze(1) - position > 3) if name != "sinks" else torch.zeros(LENGTH, LENGTH).bool()
    scores = (query @ key.transpose(2, 3) / WIDTH**0.5).masked_fill(mask | far, -torch.inf)
    if name != "window":
        scores = torch.cat([scores, leaves[3].view(1, -1, 1, 1).expand(BATCH, HEADS, LENGTH, 1)], -1)
    out = (scores.softmax(-1)[..., :LENGTH] @ value).permute(2, 0, 1, 3)
    out.backward(d_out)
    return [out.detach(), *(x.grad for x in leaves)]


SPLITS = {"one": (1, 1), "TP2": (1, 2), "CP2": (2, 1), "CP2 TP2": (2, 2)}


@pytest.mark.by_default("one-both-False", "CP2 TP2-both-False", "CP2-both-True")
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("split", SPLITS)
def test_splits_and_masks(forks, split, name, dropout):
    context, tensor = SPLITS[split]
    # With dropout, the same elements are dropped as by one process.
    expected = only(forks.run(1, attend, 1, 1, name, True)) if dropout else by_hand(name)
    ranks = values(forks.run(context * tensor, attend, context, tensor, name, dropout))
    for index, part in enumerate(NAMES[: len(ranks[0])]):
        if part == "sinks":  # context parallel ranks have partial sums, which data parallelism adds
            sums = [sum(ranks[n * tensor + rank][index] for n in range(context)) for rank in range(tensor)]
            whole = torch.cat(sums)
        else:
            slices = [torch.cat([ranks[n * tensor + r][index] for r in range(tensor)], 2) for n in range(context)]
            whole = torch.cat(slices)
        assert_close(whole, expected[index], 1e-12, part)


def dropped_by_hand():
    """With keyed dropout, and every probability from one call of the dropout's module."""
    start(1)
    (*inputs, sinks), d_out, mask = drawn()
    attention = attention_of(1, 1, HEADS, GROUPS, WIDTH, True, params_dtype=torch.float64, **OPTIONS["both"])
    attention.attention_dropout.forward = lambda probabilities: probabilities
    assert attention.attention_dropout.p == RATE
    out, *rest = results(attention, inputs, d_out, mask, sinks)
    return [out.unflatten(2, (HEADS, WIDTH)), *rest]


def test_keyed_dropout_takes_the_same_probabilities(forks):
    found = only(forks.run(1, dropped_by_hand))
    for part, got, expected in zip(NAMES, found, by_hand("both"), strict=True):
        assert_close(got, expected, 1e-6, part)  # its softmax is in float32
