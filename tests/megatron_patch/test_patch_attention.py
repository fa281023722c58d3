"""`SDPAttention` and megatron-core's own attention say the same, with grouped queries and heads of any width."""

import pytest
import torch
from compare import assert_close
from forks import only

CASES = {  # heads, heads of keys and values, their width, masked
    "as many": (4, 4, 8, False),
    "grouped": (4, 2, 8, False),
    "one for all": (4, 1, 8, False),
    "wide heads": (4, 2, 14, False),
    "masked": (4, 2, 6, True),
}


def both(heads, groups, width, masked):
    """(ours, Megatron's): output and gradients of query, key, value."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig
    from tiny_gpt import start

    from megatron_patch.attention import SDPAttention

    start()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=width,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
    )
    torch.manual_seed(0)
    length, batch = 7, 3
    shapes = [(length, batch, h, width) for h in (heads, groups, groups)]
    values = [torch.randn(shape) for shape in shapes]
    d_out = torch.randn(length, batch, heads * width)
    mask = torch.ones(batch, 1, length, length, dtype=torch.bool).triu(1)
    mask[1, :, 3:, :2] = True
    found = []
    for cls in (SDPAttention, DotProductAttention):
        attention = cls(config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
        inputs = [value.clone().requires_grad_() for value in values]
        seen = mask
        if not masked:  # no mask is the causal one, which theirs has to be told
            seen = None if cls is SDPAttention else torch.ones_like(mask).triu(1)
        out = attention(*inputs, seen)
        out.backward(d_out)
        found.append([out.detach(), *(x.grad for x in inputs)])
    return found


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_megatrons(forks, case):
    heads, groups, width, _ = CASES[case]
    ours, theirs = only(forks.run(1, both, *CASES[case]))
    assert ours[0].shape == (7, 3, heads * width) and ours[2].shape == (7, 3, groups, width)
    for name, got, expected in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert_close(got, expected, 1e-5, name)


def biased(dropout):
    """(ours, by hand in float64): output and gradients of query, key, value and bias, with a causal mask."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig
    from tiny_gpt import start

    from megatron_patch.attention import SDPAttention

    start()
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, use_cpu_initialization=True
    )
    torch.manual_seed(0)
    values = [torch.randn(7, 3, 4, 8, dtype=torch.float64) for _ in range(3)] + [torch.randn(1, 4, 7, 7).double()]
    d_out = torch.randn(7, 3, 32, dtype=torch.float64)
    attention = SDPAttention(config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
    if dropout:
        from megatron_patch.dropout import HeadDropout

        attention.attention_dropout = HeadDropout.__new__(HeadDropout)
        torch.nn.Module.__init__(attention.attention_dropout)
        attention.attention_dropout.p = 0.5
        attention.attention_dropout.forward = lambda probabilities: probabilities
    ours = [value.float().requires_grad_() for value in values]
    out = attention(*ours[:3], None, attention_bias=ours[3])
    out.backward(d_out.float())
    theirs = [value.clone().requires_grad_() for value in values]
    q, k, v = (x.permute(1, 2, 0, 3) for x in theirs[:3])
    scores = q @ k.transpose(2, 3) / 8**0.5 + theirs[3]
    scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    expected = (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)
    expected.backward(d_out)
    return [out.detach(), *(x.grad for x in ours)], [expected.detach(), *(x.grad for x in theirs)]


@pytest.mark.parametrize("dropout", [False, True], ids=["fused", "with keyed dropout"])
def test_a_bias_is_added_to_the_scores(forks, dropout):
    ours, expected = only(forks.run(1, biased, dropout))
    for name, got, wanted in zip(("out", "dq", "dk", "dv", "dbias"), ours, expected, strict=True):
        assert_close(got.double(), wanted, 1e-5, name)
