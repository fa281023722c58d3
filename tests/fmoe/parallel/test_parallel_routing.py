"""Gates of ranks that hold slices of the same sequences decide as one process does: routing groups are not cut, losses
and statistics count once, noise is every token's own. Experts whole, spread, and cut along their hidden units."""

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import values

import fmoe
from fmoe.gates import GATES
from fmoe.routing import RoutingGroups
from fmoe.shards import TokenShards

LENGTH, BATCH, WIDTH, EXPERTS = 8, 3, 16, 4
OPTIONS = {  # noise, capacity, groups of a sequence's length and of another that no slice is a multiple of
    "switch": {"capacity_factor": 1.0, "jitter": 0.3},
    "gshard": {"capacity_factor": 1.0},
    "naive": {"capacity_factor": 0.75},
    "noisy": {"capacity_factor": 1.0},
}
SPREADS = {
    "whole": {},
    "spread": {"moe_group": "world"},
    "cut": {"expert_tensor_group": "world"},
    "spread, chunked": {"moe_group": "world", "exchange_options": {"chunks": 2}},
}


def build(gate, group_size, expert, **groups):
    layer = fmoe.FMoE(
        d_model=WIDTH,
        num_experts=EXPERTS,
        d_hidden=12,
        top_k=2 if gate in ("switch", "naive", "hash") else None,
        gate=gate,
        gate_options=OPTIONS.get(gate, {}),
        expert=expert,
        # A shared expert's dropout is torch's, which knows no tokens.
        expert_options={"dropout": 0.2 if group_size else 0.0},
        shared_expert=None if group_size else 8,
        loss_weights={"balance": 1.0, "z": 0.1, "importance": 0.5, "load": 0.5},
        group_size=group_size,
        sequence_first=True,
        seed=3,
        **groups,
    ).double()
    with torch.no_grad():
        if hasattr(layer.gate, "weight"):
            layer.gate.weight.mul_(6)
    return layer


def run(layer, x, ids, mask):
    fmoe.random.set_position(seed=1, step=5, first_token=6 * LENGTH)
    x = x.clone().requires_grad_()
    y = layer(x, mask, token_ids=ids)
    (y * torch.linspace(-1, 1, WIDTH, dtype=y.dtype)).square().sum().backward()
    return y.detach(), x.grad, layer.metrics.sums()


def sliced(gate, how, spread, group_size, expert):
    world, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(LENGTH, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 50, (LENGTH, BATCH), generator=generator)
    mask = torch.rand(LENGTH, BATCH, generator=generator) > 0.2
    groups = {name: world if value == "world" else value for name, value in SPREADS[spread].items()}
    layer = build(gate, group_size, expert, **groups, **{f"{how}_group": world})
    mine = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
    here = slice(None) if how == "slice" else mine
    y, dx, sums = run(layer, x[here], ids[here], mask[here])
    alone = build(gate, group_size, expert)
    expected_y, expected_dx, expected_sums = run(alone, x, ids, mask)
    assert_close(y, expected_y[here], 1e-10, "output")
    assert_close(dx, expected_dx[here], 1e-10, "gradient of the input")
    assert_close(sums, expected_sums, 1e-6, "statistics")
    for (name, p), q in zip(layer.named_parameters(), alone.parameters(), strict=True):
        grad, expected = p.grad, q.grad
        assert (grad is None) == (expected is None), name
        if grad is None:
            continue
        if name.startswith("experts.") and spread.startswith("spread"):
            expected = expected[layer.first_expert : layer.first_expert + layer.num_local_experts]
        elif name.startswith("experts.") and spread == "cut":
            expected = torch.stack([layer.experts.own_part(name.removeprefix("experts."), e) for e in expected])
        else:
            dist.all_reduce(grad)
        assert_close(grad, expected, 1e-10, name)
    return True


@pytest.mark.cover(1)
@pytest.mark.parametrize("how", ["slice", "sequence"])
@pytest.mark.parametrize("gate", sorted(set(GATES) - {"topology"}))
def test_every_gate_decides_over_the_whole(two_ranks, gate, how):
    assert values(two_ranks.run(sliced, gate, how, "spread", None, "ffn")) == [True] * 2


@pytest.mark.cover(2)
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("how", ["slice", "sequence"])
def test_wherever_experts_are(two_ranks, how, spread, expert):
    assert values(two_ranks.run(sliced, "switch", how, spread, 6, expert)) == [True] * 2


class Rank:
    """As much of a process group as a split needs."""

    def __init__(self, rank):
        self.rank, self.size = (lambda: rank), (lambda: 2)


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize(
    ("entries", "sequences", "length", "sequence_first"),
    [(6, 1, 6, False), (1, 1, 6, False), (4, 4, 4, False), (6, 3, 6, True)],
    ids=["[T]", "[1, S]", "[B, S]", "[S, B]"],
)
def test_a_rank_draws_the_noise_of_its_tokens(entries, sequences, length, sequence_first, size):
    def noise(shards=None):
        groups = RoutingGroups(
            sequences, length, size=size, sequence_first=sequence_first, noise_key=lambda: 7, shards=shards
        )
        return groups.local_uniform16(3, "noise", torch.device("cpu"))

    for rank in range(2):
        shards = TokenShards.of_slices(entries, Rank(rank))
        assert torch.equal(noise(shards), shards.local(noise(), sequences * length // entries))


def wrong():
    world = dist.group.WORLD
    cases = {
        "both": {"slice_group": world, "sequence_group": world},
        "hidden": {"expert_tensor_group": world, "d_hidden": 13},
        "modules": {"expert_tensor_group": world, "expert": torch.nn.Linear},
        "rows": {"expert_tensor_group": world, "exchange_options": {"max_rows": 64}},
    }
    said = {}
    for name, options in cases.items():
        try:
            fmoe.FMoE(**{"d_model": WIDTH, "num_experts": EXPERTS, "d_hidden": 12, **options})
        except fmoe.UserError as error:
            said[name] = str(error)
    return said


def test_what_cannot_be_is_said(two_ranks):
    for said in values(two_ranks.run(wrong)):
        assert "slice_group" in said["both"] and "sequence_group" in said["both"]
        assert "d_hidden=13" in said["hidden"] and "2 ranks" in said["hidden"]
        assert "expert_tensor_group" in said["modules"]
        assert "max_rows" in said["rows"] and "expert_tensor_group" in said["rows"]
