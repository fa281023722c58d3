"""Tensor parallel ranks that hold the same tokens split them, with experts spread within, across and over all of them:
equal to one process, losses and noise included."""

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import values

import fmoe

BATCH, LENGTH, WIDTH, EXPERTS = 6, 5, 16, 4
GROUPS = {  # of four ranks: experts are spread over the ranks of a list
    "alone": [[0], [1], [2], [3]],
    "within": [[0, 1], [2, 3]],
    "across": [[0, 2], [1, 3]],
    "over all": [[0, 1, 2, 3]],
}
GATES = {
    "naive": ("naive", {}),
    "capacity and noise": ("switch", {"jitter": 0.2, "capacity_factor": 1.0}),
}


def build(gate, **groups):
    torch.manual_seed(0)
    name, options = GATES[gate]
    layer = fmoe.FMoE(
        d_model=WIDTH,
        num_experts=EXPERTS,
        d_hidden=12,
        gate=name,
        gate_options=options,
        shared_expert=8,
        loss_weights={"balance": 1.0, "z": 0.1},
        seed=3,
        **groups,
    )
    with torch.no_grad():
        layer.gate.weight.mul_(6)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), layer, torch.nn.Linear(WIDTH, WIDTH)).double()


def run(model, x, first_sequence):
    fmoe.random.set_position(seed=1, step=5, first_token=first_sequence * LENGTH)
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return y, x.grad


def sliced(split, gate, batch):
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # the same tokens within a pair
    spread = [dist.new_group(ranks) for ranks in GROUPS[split]]
    copies = {"alone": [[0, 1, 2, 3]], "within": GROUPS["across"], "across": GROUPS["within"], "over all": None}[split]
    copies = [dist.new_group(ranks) for ranks in copies] if copies else []

    def mine(groups):
        return next((g for g in groups if rank in dist.get_process_group_ranks(g)), None)

    pair, moe_group, copy_group = mine(pairs), mine(spread), mine(copies)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2 * batch, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    first = rank // 2 * batch
    model = build(gate, slice_group=pair, moe_group=moe_group)
    y, dx = run(model, x[first : first + batch], first)
    alone = build(gate)
    expected_y, expected_dx = run(alone, x, 0)
    assert_close(y, expected_y[first : first + batch], 1e-10, "output")
    assert_close(dx / 2, expected_dx[first : first + batch], 1e-10, "gradient of the input")
    layer = model[1]
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        grad, expected = p.grad, q.grad
        if name.startswith("1.experts."):  # of the tokens that came here: over its copies, every pair's once
            expected = expected[layer.first_expert : layer.first_expert + layer.num_local_experts]
            if copy_group is not None:
                dist.all_reduce(grad, group=copy_group)
        else:  # the layer's others are of this rank's slice; around it, a pair has computed the same twice
            dist.all_reduce(grad)
            grad = grad if name.startswith("1.") else grad / 2
        assert_close(grad / 2, expected, 1e-10, name)
    return True


@pytest.mark.cover(2)
@pytest.mark.parametrize("batch", [4, 3, 1])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("split", GROUPS)
def test_slices_and_spread_experts(four_ranks, split, gate, batch):
    assert values(four_ranks.run(sliced, split, gate, batch)) == [True] * 4


def as_it_comes():
    """Sequence parallel input: each rank has its part of every sequence and no slice_group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4 * size, 2, WIDTH, generator=generator, dtype=torch.float64)  # [S, B, D]
    options = {"group_size": 4, "sequence_first": True}  # a routing group lies within a part
    y, dx = run(build_with(dist.group.WORLD, options), x[4 * rank : 4 * rank + 4], 0)
    expected_y, expected_dx = run(build_with(None, options), x, 0)
    assert_close(y, expected_y[4 * rank : 4 * rank + 4], 1e-10, "output")
    assert_close(dx / size, expected_dx[4 * rank : 4 * rank + 4], 1e-10, "gradient of the input")
    return True


def build_with(moe_group, options):
    options |= {
        "gate": "switch",
        "gate_options": {"capacity_factor": 1.0, "jitter": 0},
        "loss_weights": {"balance": 1.0},
    }
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, d_hidden=12, moe_group=moe_group, seed=3, **options)
    return layer.double()


def test_sequence_parallel_input_is_taken_as_it_comes(four_ranks):
    assert values(four_ranks.run(as_it_comes)) == [True] * 4


def second_derivatives_of_parts():
    """A penalty on gradients that crossed ranks: against all rows in one process."""
    from fmoe.shards import TokenShards

    group, rank = dist.group.WORLD, dist.get_rank()
    parts = TokenShards(group, (2, 3))
    g = torch.Generator().manual_seed(0)
    x, other = torch.randn(5, 4, dtype=torch.float64, generator=g), torch.randn(5, 4, dtype=torch.float64, generator=g)
    whole = x.clone().requires_grad_()
    mixed = (whole.tanh() @ other.t()).square()
    (first,) = torch.autograd.grad(mixed.sin().sum(), whole, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), whole)
    found = []
    for alike in (True, False):
        own = parts.local(x).clone().requires_grad_()
        rows = parts.gather(own, alike=alike)
        # Alike: each rank computes all that is made of the rows. Else each computes some columns of it.
        mine = other if alike else parts.local(other)
        mixed = (rows.tanh() @ mine.t()).square()
        (mine_first,) = torch.autograd.grad(mixed.sin().sum(), own, create_graph=True)
        (mine_second,) = torch.autograd.grad(mine_first.square().sum(), own)
        found += [mine_first - parts.local(first), mine_second - parts.local(second)]
    # Summed over ranks, then cut.
    terms = torch.randn(2, 5, 4, dtype=torch.float64, generator=g).requires_grad_()
    total = terms.sum(0).tanh().pow(3).sum()
    (first,) = torch.autograd.grad(total, terms, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), terms)
    own = terms.detach()[rank].clone().requires_grad_()
    (mine_first,) = torch.autograd.grad(parts.reduce_scatter(own).tanh().pow(3).sum(), own, create_graph=True)
    (mine_second,) = torch.autograd.grad(mine_first.square().sum(), own)
    found += [mine_first - first[rank], mine_second - second[rank]]
    return [difference.abs().max().item() for difference in found]


def test_second_derivatives_cross_ranks(two_ranks):
    for differences in values(two_ranks.run(second_derivatives_of_parts)):
        assert max(differences) < 1e-12, differences


def empty_batches(group):
    for shape in ((4, 0, WIDTH), (0, 3, WIDTH), (0, WIDTH), (1, 3, WIDTH)):
        for sequence_first in (True, False):
            options = {"sequence_first": sequence_first, group: dist.group.WORLD}
            layer = fmoe.MoE.build(d_model=WIDTH, num_experts=4, d_hidden=8, seed=0, **options)
            x = torch.zeros(shape, requires_grad=True)
            y = layer(x)
            y.sum().backward()
            assert y.shape == shape and x.grad.shape == shape
    return True


@pytest.mark.parametrize("group", ["slice_group", "sequence_group"])
def test_a_batch_may_be_empty(two_ranks, group):
    assert values(two_ranks.run(empty_batches, group)) == [True] * 2


def wrong_masks(group):
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=EXPERTS, d_hidden=12, seed=0, **{group: dist.group.WORLD})
    said = []
    for length in (3, 5):
        try:
            layer(torch.zeros(4, 2, WIDTH), torch.ones(length, 2, dtype=torch.bool))
        except fmoe.UserError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("group", ["slice_group", "sequence_group"])
def test_a_mask_that_is_too_short_or_too_long_says_so(two_ranks, group):
    for said in values(two_ranks.run(wrong_masks, group)):
        assert ["mask" in line and "(4, 2)" in line for line in said] == [True] * 2
