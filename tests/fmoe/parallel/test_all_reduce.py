"""All-reduce algorithms equal the library's sum, and send over each link what they promise."""

import pytest
import torch
import torch.distributed as dist
from forks import values
from test_compression import OneBucket
from torch import nn

from bench.traffic import Traffic
from fmoe import UserError
from fmoe.parallel.all_reduce import Grid, Hierarchical, Ring

MAKE = {"ring": Ring, "grid": Grid, "hierarchical": lambda group: Hierarchical(group, 2)}
SIZE = 1200


def averaged(name, over):
    """The mean by an algorithm and by the library, and bytes sent by kind of collective."""
    group = dist.new_group(over) if over else dist.group.WORLD
    if over and dist.get_rank() not in over:
        return None
    reduction = MAKE[name](group)
    bucket = OneBucket([nn.Parameter(torch.zeros(40, 30))], padding=7)
    values_here = torch.randn(SIZE + 7, generator=torch.Generator().manual_seed(dist.get_rank()))
    bucket.buffer().copy_(values_here)
    with Traffic() as traffic:
        reduction(bucket)
    dist.all_reduce(values_here, group=group)
    return bucket.buffer(), values_here / group.size(), dict(traffic.sent_by)


@pytest.mark.by_default("ring-4-None", "grid-4-None", "hierarchical-4-None")
@pytest.mark.parametrize(
    ("name", "ranks", "over"),
    [(name, 4, None) for name in MAKE]
    + [("ring", 3, None), ("grid", 3, None), ("ring", 4, [0, 3]), ("hierarchical", 6, [0, 1, 4, 5]), ("grid", 6, None)],
)
def test_the_mean_is_the_librarys(forks, name, ranks, over):
    found = [result for result in values(forks.run(ranks, averaged, name, over)) if result is not None]
    for mean, expected, _ in found:
        torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(mean, found[0][0])


def test_bytes_over_links_are_those_of_the_algorithms(forks):
    whole = 4 * (SIZE + 8)  # padded to four ranks
    for _, _, sent in values(forks.run(4, averaged, "ring", None)):
        assert sent == {"send": 2 * whole * 3 // 4, "recv": 0}
    for _, _, sent in values(forks.run(4, averaged, "hierarchical", None)):
        # Half of the bytes, twice, within the node; of a half, between nodes, twice a half.
        assert sent == {"reduce_scatter_base": whole // 2, "allreduce": whole // 2, "allgather_base": whole // 2}
    for _, _, sent in values(forks.run(4, averaged, "grid", None)):
        assert sent == {"send": 2 * whole // 2 + 2 * whole // 4, "recv": 0}


def unequal():
    with pytest.raises(UserError, match=r"node_size=2 .*3 data parallel ranks"):
        Hierarchical(dist.group.WORLD, 2)


def test_unequal_nodes_are_refused(forks):
    values(forks.run(3, unequal))
