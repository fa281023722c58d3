"""`SDPAttention` against megatron-core's own attention, all scores at once by hand, and itself at other splits."""

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import only, values
from test_patch_context import BATCH, LENGTH, RATE, SEED, attention_of, start

HEADS = 8
GROUPS = 4
WIDTH = 6
WINDOW = {"window_size": (3, 0), "window_attn_skip_freq": [1]}
SINKS = {"softmax_type": "learnable"}
OPTIONS = {"window": WINDOW, "sinks": SINKS, "both": WINDOW | SINKS}
NAMES = ("out", "query", "key", "value", "sinks")
CASES = {  # heads, heads of keys and values, their width, masked, options
    "as many": (4, 4, 8, False, {}),
    "grouped": (4, 2, 8, False, {}),
    "one for all": (4, 1, 8, False, {}),
    "wide heads": (4, 2, 14, False, {}),
    "masked": (4, 2, 6, True, {}),
    **{name: (HEADS, GROUPS, WIDTH, False, options) for name, options in OPTIONS.items()},
}


def drawn(heads=HEADS, groups=GROUPS, width=WIDTH):
    """Query, key, value and sinks; the gradient of the output; a causal mask with two documents in one sequence."""
    g = torch.Generator().manual_seed(0)
    shapes = [*((LENGTH, BATCH, count, width) for count in (heads, groups, groups)), (heads,)]
    inputs = [torch.randn(shape, dtype=torch.float64, generator=g) * 2 for shape in shapes]
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask[1, :, 5:, :5] = True
    return inputs, torch.randn(LENGTH, BATCH, heads, width, dtype=torch.float64, generator=g), mask


def results(attention, inputs, d_out, mask, sinks=None, **options):
    """Output, and gradients of the inputs, of an attention bias and of the sinks."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    options = {name: x.clone().requires_grad_() for name, x in options.items()}
    leaves = [*inputs, *options.values()]
    if getattr(attention, "softmax_offset", None) is not None:
        with torch.no_grad():
            attention.softmax_offset.copy_(sinks)
        leaves.append(attention.softmax_offset)
    out = attention(*inputs, mask, **options)
    out.backward(d_out.flatten(2))
    return [out.detach().unflatten(2, d_out.shape[2:]), *(x.grad for x in leaves)]


def beside_megatrons(heads, groups, width, masked, options):
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    start(1)
    (*inputs, sinks), d_out, mask = drawn(heads, groups, width)
    ours = attention_of(1, 1, heads, groups, width, params_dtype=torch.float64, **options)
    theirs = DotProductAttention(ours.config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
    causal = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    # Without a mask, ours is causal; theirs needs the mask.
    found = results(ours, inputs, d_out, mask if masked else None, sinks)
    return found, results(theirs, inputs, d_out, mask if masked else causal, sinks)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_megatrons(forks, case):
    ours, theirs = only(forks.run(1, beside_megatrons, *CASES[case]))
    assert len(ours) == len(theirs) == (5 if case in ("sinks", "both") else 4)
    for part, got, expected in zip(NAMES, ours, theirs, strict=False):
        assert_close(got, expected, 1e-12, part)


def by_hand(window=False, has_sinks=False, mask=None, bias=None):
    """Results without dropout, from all scores at once."""
    inputs, d_out, documents = drawn()
    leaves = [x.clone().requires_grad_() for x in inputs]
    query, key, value = (x.permute(1, 2, 0, 3) for x in leaves[:3])
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) / WIDTH**0.5
    if bias is not None:
        leaves[3] = bias.clone().requires_grad_()
        scores = scores + leaves[3]
    hidden = documents if mask is None else mask
    if window:
        position = torch.arange(LENGTH)
        hidden = hidden | (position.unsqueeze(1) - position > 3)
    scores = scores.masked_fill(hidden, -torch.inf)
    if has_sinks:
        scores = torch.cat([scores, leaves[3].view(1, -1, 1, 1).expand(BATCH, HEADS, LENGTH, 1)], -1)
    out = (scores.softmax(-1)[..., :LENGTH] @ value).permute(2, 0, 1, 3)
    out.backward(d_out)
    return [out.detach(), *(x.grad for x in leaves)]


def without_drops(attention):
    """Keep the path of dropout, but drop nothing."""
    assert attention.attention_dropout.p == RATE
    attention.attention_dropout.forward = lambda probabilities: probabilities
    return attention


def biased(dropout):
    start(1)
    (*inputs, _), d_out, _ = drawn()
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)).double()
    attention = attention_of(1, 1, HEADS, GROUPS, WIDTH, dropout)
    if dropout:
        without_drops(attention)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return results(attention, inputs, d_out, None, attention_bias=bias), by_hand(mask=causal, bias=bias)


@pytest.mark.parametrize("dropout", [False, True], ids=["fused", "with keyed dropout"])
def test_a_bias_is_added_to_the_scores(forks, dropout):
    ours, expected = only(forks.run(1, biased, dropout))
    for name, got, wanted in zip((*NAMES[:4], "bias"), ours, expected, strict=True):
        assert_close(got, wanted, 1e-6, name)  # the softmax before dropout is in float32


def attend(context, tensor, name, dropout):
    """Output and gradients of this rank's tokens and heads, with documents."""
    from fmoe import random

    start(context, tensor)
    random.set_position(SEED, step=3, first_token=60)
    (*inputs, sinks), d_out, mask = drawn()
    rank = dist.get_rank() % tensor
    begin = dist.get_rank() // tensor * (LENGTH // context)

    def own(x):
        return x[begin : begin + LENGTH // context].chunk(tensor, 2)[rank]

    options = {"params_dtype": torch.float64, **OPTIONS[name]}
    attention = attention_of(context, tensor, HEADS, GROUPS, WIDTH, dropout, **options)
    if name == "sinks":
        assert attention.softmax_offset.tensor_model_parallel and not attention.softmax_offset.any()
    return results(attention, list(map(own, inputs)), own(d_out), mask, sinks.chunk(tensor)[rank])


SPLITS = {"one": (1, 1), "TP2": (1, 2), "CP2": (2, 1), "CP2 TP2": (2, 2)}


@pytest.mark.by_default("one-both-False", "CP2 TP2-both-False", "CP2-both-True")
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("split", SPLITS)
def test_splits_and_masks(forks, split, name, dropout):
    context, tensor = SPLITS[split]
    # With dropout, the same elements are dropped as by one process.
    expected = by_hand(name != "sinks", name != "window")
    if dropout:
        expected = only(forks.run(1, attend, 1, 1, name, True))
    ranks = values(forks.run(context * tensor, attend, context, tensor, name, dropout))
    for index, part in enumerate(NAMES[: len(ranks[0])]):
        of_slices = [[ranks[number * tensor + rank][index] for rank in range(tensor)] for number in range(context)]
        if part == "sinks":  # context parallel ranks have partial sums, which data parallelism adds
            whole = sum(torch.cat(parts) for parts in of_slices)
        else:
            whole = torch.cat([torch.cat(parts, 2) for parts in of_slices])
        assert_close(whole, expected[index], 1e-12, part)


def undropped():
    start(1)
    (*inputs, sinks), d_out, mask = drawn()
    options = {"params_dtype": torch.float64, **OPTIONS["both"]}
    attention = without_drops(attention_of(1, 1, HEADS, GROUPS, WIDTH, True, **options))
    return results(attention, inputs, d_out, mask, sinks)


def test_keyed_dropout_takes_the_same_probabilities(forks):
    for part, got, expected in zip(NAMES, only(forks.run(1, undropped)), by_hand(True, True), strict=True):
        assert_close(got, expected, 1e-6, part)  # its softmax is in float32
