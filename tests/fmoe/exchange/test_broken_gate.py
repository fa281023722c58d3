"""An error on one rank before an exchange raises on all ranks, which can go on."""

import pytest
import torch
import torch.distributed as dist
from forks import values

import fmoe

WIDTH, EXPERTS = 16, 4


class BrokenGate(fmoe.gates.NaiveRouter):
    """Fails on the ranks it is told to."""

    def __init__(self, d_model, num_experts, top_k, *, ranks):
        super().__init__(d_model, num_experts, top_k)
        self.ranks = ranks

    def forward(self, x_TD, groups):
        if dist.get_rank() in self.ranks:
            raise ArithmeticError(f"rank {dist.get_rank()} has no router today")
        return super().forward(x_TD, groups)


def with_a_broken_gate(ranks):
    layer = fmoe.FMoE(
        d_model=WIDTH,
        num_experts=EXPERTS,
        d_hidden=20,
        gate=BrokenGate,
        gate_options={"ranks": ranks},
        moe_group=dist.group.WORLD,
    )
    x = torch.ones(4, WIDTH)
    try:
        layer(x)
        raised = None
    except Exception as error:
        raised = (type(error).__name__, str(error))
    layer.gate.ranks = ()
    again = layer(x).isfinite().all().item()  # the exchange is usable
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)  # and so is the group
    return raised, again, total.item()


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_an_error_before_the_exchange_is_an_error_everywhere(two_ranks, ranks):
    found = values(two_ranks.run(with_a_broken_gate, ranks))
    for rank, (raised, again, total) in enumerate(found):
        if rank in ranks:
            assert raised == ("ArithmeticError", f"rank {rank} has no router today")
        else:
            assert raised[0] == "PeerError"
            assert f"rank {ranks[0]} " in raised[1]
            assert f"rank {ranks[0]} has no router today" in raised[1]
        assert again
        assert total == 3.0
