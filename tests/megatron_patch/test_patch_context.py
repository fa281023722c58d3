"""Attention over slices of the sequences equals one process, in values and gradients, on two and four ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import refusal, values

LENGTH = 12
BATCH = 3
SEED = 7
RATE = 0.3
CASES = {  # context, tensor, heads, heads of keys and values, their width, mask, dropout, precision
    "as many": (2, 1, 4, 4, 8, False, False, "float32"),
    "grouped": (2, 1, 4, 2, 6, False, True, "float32"),
    "one for all": (2, 1, 4, 1, 8, True, False, "float32"),
    "float64": (2, 1, 6, 3, 4, True, True, "float64"),
    "bf16": (2, 1, 4, 2, 8, True, False, "bfloat16"),
    "four ranks": (4, 1, 12, 6, 4, False, True, "float32"),
    "heads of two ranks each": (4, 1, 8, 2, 4, True, False, "float64"),
    "tensor ranks too": (2, 2, 8, 4, 4, True, True, "float32"),
}
LIMITS = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 1e-2}


def start(context, tensor=1):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_patch import cpu

    assert cpu.install()
    parallel_state.initialize_model_parallel(tensor, context_parallel_size=context)
    model_parallel_cuda_manual_seed(11)


def attention_of(context, tensor, heads, groups, width, dropout=False, **options):
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patch.attention import SDPAttention
    from megatron_patch.dropout import HeadDropout

    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * 4,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=width,
        attention_dropout=RATE if dropout else 0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        context_parallel_size=context,
        tensor_model_parallel_size=tensor,
        **options,
    )
    attention = SDPAttention(config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
    if dropout:
        attention.attention_dropout = HeadDropout(RATE, site=5)
    return attention


def attend(context, tensor, heads, groups, width, masked, dropout, precision):
    """Output and gradients of query, key and value: this rank's slice of the tokens, and its tensor rank's heads."""
    from fmoe import random

    start(context, tensor)
    random.set_position(SEED, step=3, first_token=60)
    generator = torch.Generator().manual_seed(0)
    # Uneven values: softmax has sharp peaks, which a wrong position would move.
    whole = [
        torch.randn(LENGTH, BATCH, h, width, dtype=torch.float64, generator=generator) * 2
        for h in (heads, groups, groups)
    ]
    d_out = torch.randn(LENGTH, BATCH, heads, width, dtype=torch.float64, generator=generator)
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask[1, :, 5:, :5] = True  # two documents
    rank = dist.get_rank() % tensor
    slice_ = dist.get_rank() // tensor
    length = LENGTH // context

    def own(x):
        part = x.shape[2] // tensor
        mine = x[slice_ * length : (slice_ + 1) * length, :, rank * part : (rank + 1) * part]
        return mine.to(getattr(torch, precision))

    inputs = [own(x).requires_grad_() for x in whole]
    attention = attention_of(context, tensor, heads, groups, width, dropout)
    out = attention(*inputs, mask if masked else None)
    out.backward(own(d_out).flatten(2))
    return [out.detach().unflatten(2, (-1, width)), *(x.grad for x in inputs)]


@pytest.mark.parametrize("case", CASES)
def test_slices_attend_as_whole_sequences(forks, case):
    context, tensor, *rest = CASES[case]
    *_, precision = rest
    (whole,) = values(forks.run(1, attend, 1, 1, *rest[:-1], "float64"))
    ranks = values(forks.run(context * tensor, attend, *CASES[case]))
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        slices = [
            torch.cat([ranks[number * tensor + rank][index] for rank in range(tensor)], dim=2)
            for number in range(context)
        ]
        assert_close(torch.cat(slices).double(), whole[index], LIMITS[precision], name)


def differentiate_twice():
    from megatron_patch.context import heads_to_sequence, sequence_to_heads

    group = dist.group.WORLD
    x = torch.arange(2 * 3 * 4 * 2.0).view(2, 3, 4, 2).add(100 * dist.get_rank()).double().requires_grad_()
    y = sequence_to_heads(x, group)
    assert y.shape == (4, 3, 2, 2)
    assert torch.equal(heads_to_sequence(y, group), x)
    (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    return torch.equal(dx, 3 * x**2) and torch.equal(ddx, 6 * x)


def test_the_exchange_is_inverted_and_differentiable_twice(forks):
    assert values(forks.run(2, differentiate_twice)) == [True, True]


def refused(context, config_context, dropout=0.0, heads=4, **options):
    start(context)
    dist.barrier()  # a rank that ends breaks the groups that others still make
    attention = attention_of(config_context, 1, heads, heads, 4, **options)
    attention.attention_dropout.p = dropout
    x = torch.ones(2, 1, heads, 4)
    attention(x, x, x, None)


REFUSED = {  # context ranks, context_parallel_size of the config, options, parts of the message
    "another size": ((2, 1), {}, ["context_parallel_size=1", "the size 2"]),
    "heads": ((2, 2), {"heads": 3}, ["context_parallel_size=2", "3 attention heads"]),
    "torch's dropout": ((2, 2), {"dropout": 0.1}, ["context_parallel_size=2", "key_dropout"]),
    "a window of both sides": ((2, 2), {"window_size": (1, 1)}, ["context_parallel_size=2", "window"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_attention_that_slices_do_not_support_is_refused(forks, case):
    arguments, options, parts = REFUSED[case]
    message = refusal(forks.run(2, partial(refused, *arguments, **options)))
    assert all(part in message for part in parts), message


def layer_of(context_parallel_size, **options):
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patch import MegatronMoE

    start(context=2, tensor=2)
    dist.barrier()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=2,
        context_parallel_size=context_parallel_size,
        **options,
    )
    layer = MegatronMoE(config, layer_number=1, num_experts=2)
    return layer.layout.slice_group, dist.get_process_group_ranks(layer.layout.sequence_group)


def test_a_layer_has_the_ranks_of_a_sequence_in_the_order_of_its_tokens(forks):
    """Megatron's ranks: tensor parallel ones are neighbours; each context parallel pair holds a half of the tokens."""
    assert values(forks.run(4, partial(layer_of, sequence_parallel=True), 2)) == [(None, [0, 1, 2, 3])] * 4
    for size, parts in (
        (2, ["context_parallel_size=2", "tensor_model_parallel_size=2", "sequence_parallel=True"]),
        (1, ["context_parallel_size=1", "the size 2"]),
    ):
        message = refusal(forks.run(4, layer_of, size))
        assert all(part in message for part in parts), message
