"""Errors of exchanges, and the bound on the rows of an EP rank."""

import contextlib

import torch
import torch.distributed as dist
from forks import values
from torch import nn

import fmoe
from fmoe.exchange import collectives

WIDTH, EXPERTS = 16, 4


def other_groups():
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    near, far = pairs[rank // 2], pairs[2 + rank % 2]
    messages = []
    for groups in ((near, far), (far, near)):
        try:
            fmoe.exchange.build_exchange(dist.group.WORLD, EXPERTS, "hierarchical", {"groups": groups})
        except fmoe.UserError as error:
            messages.append(str(error))
    return messages


def test_groups_that_are_no_nodes_are_an_error(four_ranks):
    for rank, (message,) in enumerate(values(four_ranks.run(other_groups))):
        wrong, right = ([rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1])
        assert f"groups must have the ranks {right} for this node, not {wrong}" in message


def lend_shards():
    groups = fmoe.parallel.init(ep=2)
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=4, moe_group=groups.moe_group, exchange_options={"shadow": 1})
    model = fmoe.parallel.fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer), groups)
    with contextlib.suppress(StopIteration):
        try:
            model(torch.randn(4, WIDTH))
        except fmoe.UserError as error:
            return str(error)


def test_shards_are_not_lent(four_ranks):
    for message in values(four_ranks.run(lend_shards)):
        assert "shadow=1 is not supported with fully_shard" in message


def through_a_relay():
    """All rows of the first node go to workers of place 0 alone, those of the second one to all."""
    expert = torch.arange(400).unsqueeze(1)
    expert = expert % 2 * 2 if dist.get_rank() < 2 else expert % 4
    layer = fmoe.FMoE(
        d_model=8,
        num_experts=4,
        d_hidden=8,
        gate=lambda x: (expert, torch.ones(len(x), 1)),
        moe_group=dist.group.WORLD,
        exchange="hierarchical",
        exchange_options={"max_rows": 310, "node_size": 2},
        seed=0,
    )
    sizes = []
    start = collectives.all_to_all

    def seen(*args, **kwargs):
        pending = start(*args, **kwargs)
        if pending._result.is_floating_point():
            sizes.append(len(pending._result))
        return pending

    from fmoe.exchange import hops

    hops.all_to_all = seen
    try:
        layer(torch.randn(400, 8))
    finally:
        hops.all_to_all = start
    return max(sizes)


def test_the_bound_holds_for_rows_that_pass_through(four_ranks):
    assert max(values(four_ranks.run(through_a_relay))) <= 310


def lend_other_kinds():
    expert = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    expert += [nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)) for _ in range(2)]
    layer = fmoe.FMoE(
        d_model=WIDTH,
        num_experts=4,
        expert=expert,
        moe_group=dist.group.WORLD,
        exchange_options={"shadow": 1},
        seed=0,
        name="block 3",
    )
    try:
        layer(torch.randn(4, WIDTH))
    except fmoe.UserError as error:
        return str(error)


def test_experts_that_cannot_stand_in_for_others_are_named(two_ranks):
    for message in values(two_ranks.run(lend_other_kinds)):
        assert message.startswith("block 3: expert shapes=[4, 16] torch.float32, [4]")
