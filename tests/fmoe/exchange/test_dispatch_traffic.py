"""Bytes that an exchange says it sent, against the collectives that were seen."""

import pytest
import torch
import torch.distributed as dist
from forks import values

import fmoe
from bench.traffic import Traffic
from fmoe.exchange import Cost

EXPERTS = 4
WIDTH = 8
TOKENS = 24
# Of no cost that pays: all that may be shadowed is.
FREE = Cost(row_seconds=1.0, row_bytes=1.0, expert_bytes=0.0, bandwidth=1.0)
CASES = {
    "all_to_all": {},
    "all_to_all in chunks": {"chunks": 3},
    "all_to_all, bounded": {"max_rows": 2 * EXPERTS},
    "all_to_all in bfloat16": {"wire_dtype": torch.bfloat16},
    "padded": {},
    "all_gather": {},
    "hierarchical": {"node_size": 1},
}


def two_layers(name, options):
    """(said, seen) bytes of a step of two layers, and what each layer said: the first has twice the rows."""
    layers = [
        fmoe.FMoE(
            d_model=WIDTH,
            num_experts=EXPERTS,
            d_hidden=16,
            top_k=2,
            exchange=name.split(" ")[0].rstrip(","),
            exchange_options=options,
            moe_group=dist.group.WORLD,
            seed=3,
            name=f"layer {n}",
        )
        for n in range(2)
    ]
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step():
        inputs = x.clone().requires_grad_()
        (layers[0](inputs).sum() + layers[1](inputs[: TOKENS // 2]).sum()).backward()

    step()  # what is agreed on once
    before = [layer.exchange.traffic.sent for layer in layers]
    with Traffic() as seen:
        step()
    said = [layer.exchange.traffic.sent - was for layer, was in zip(layers, before, strict=True)]
    return said, seen.sent, before


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_what_its_collectives_were(two_ranks, case):
    for said, seen, before in values(two_ranks.run(two_layers, case, CASES[case])):
        assert sum(said) == seen > 0
        assert said[0] > said[1] > 0, "each layer has its own, in the backward pass too"
        assert before == said, "the first step has no more than the others"


def lend(shadow):
    layer = fmoe.FMoE(
        d_model=WIDTH,
        num_experts=EXPERTS,
        d_hidden=16,
        moe_group=dist.group.WORLD,
        exchange_options={"shadow": shadow, "cost": FREE},
        seed=3,
    )
    layer(torch.randn(TOKENS, WIDTH)).sum().backward()
    return layer.exchange.traffic.sent, sum(p.numel() for p in layer.experts.parameters()) * 4


def test_lent_experts_count_for_who_sends_them(two_ranks):
    """All four are lent: no row travels. Each worker sends its two experts, and the gradients of the other's two."""
    for sent, experts in values(two_ranks.run(lend, EXPERTS)):
        counts = sent - 2 * experts
        assert 0 < counts < 200, "what is left are the counts"


def test_one_worker_sends_nothing():
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, d_hidden=16)
    layer(torch.randn(TOKENS, WIDTH)).sum().backward()
    assert layer.exchange.traffic.sent == 0
