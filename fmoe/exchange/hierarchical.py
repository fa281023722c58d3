"""All-to-all in two stages: first within the node, then between the ranks that have the same index in their nodes.

A rank sends one message to each node, not one to each rank: fewer and larger messages cross the slow network. This is
the hierarchical all-to-all of HetuMoE (arXiv 2203.14685) and of DeepSpeed-MoE (arXiv 2201.05596 section 5.3). Rows are
sent twice, the first time over the fast links of the node.

Shape letters: N nodes of I ranks each; rank w is on node w // I, with index w % I. Other letters:
`fmoe.exchange.base`.
"""

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from fmoe.exchange.all_to_all import AllToAllExchange, without_last
from fmoe.exchange.collectives import all_to_all
from fmoe.exchange.hops import Counts, HopCounts
from fmoe.exchange.monitor import PeerError, timeout_of
from fmoe.runtime import launcher

Subgroups = tuple[dist.ProcessGroup, dist.ProcessGroup]  # of the node, and of the ranks of one index

_subgroups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Subgroups]]" = weakref.WeakKeyDictionary()


def node_groups(group: dist.ProcessGroup, node_size: int) -> Subgroups:
    """Return the group of this node's ranks, and the group of the ranks with this rank's index on each node.

    Every rank of ``group`` must call this function. Later calls with the same arguments return the same groups.
    """
    made = _subgroups.setdefault(group, {})
    if node_size not in made:
        timeout = timedelta(seconds=timeout_of(group))
        node, peers = (
            dist.new_group(ranks, timeout, use_local_synchronization=True) for ranks in _ranks_of(group, node_size)
        )
        made[node_size] = (node, peers)
    return made[node_size]


def _ranks_of(group: dist.ProcessGroup, node_size: int) -> tuple[list[int], list[int]]:
    """Return the ranks of this node, and the ranks with this rank's index on each node."""
    ranks = dist.get_process_group_ranks(group)
    first = group.rank() // node_size * node_size
    return ranks[first : first + node_size], ranks[group.rank() % node_size :: node_size]


class HierarchicalExchange(AllToAllExchange):
    """All-to-all in two stages: within the node, then between nodes (arXiv 2203.14685; 2201.05596 section 5.3).

    Args:
        group, num_experts, options: see `AllToAllExchange`.
        node_size: number of ranks of ``group`` on a node. None for torchrun's LOCAL_WORLD_SIZE, or for the group's
            size if the variable is unset or larger.
        groups: existing groups, as `node_groups` returns them, which then determine ``node_size``; None to make them.

    Raises:
        UserError: ``node_size`` does not divide the number of ranks, ``groups`` has the wrong ranks, or another option
            is invalid.
    """

    compared = (*AllToAllExchange.compared, "node_size")

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        *,
        node_size: int | None = None,
        groups: Subgroups | None = None,
        **options: Any,
    ):
        super().__init__(group, num_experts, **options)
        if groups is not None:
            node_size = groups[0].size()
        elif node_size is None:
            node_size = min(launcher.number("LOCAL_WORLD_SIZE", self.ep_size), self.ep_size)
        if not isinstance(node_size, int) or node_size < 1 or self.ep_size % node_size:
            raise UserError(
                f"exchange_options.node_size={node_size!r} does not divide the {self.ep_size} ranks of moe_group "
                "(default: LOCAL_WORLD_SIZE)"
            )
        self.node_size = node_size
        self.num_nodes = self.ep_size // node_size
        self.node, self.peers = node_groups(group, node_size) if groups is None else groups
        self.groups = (group, self.node, self.peers)
        names = ("this node", "this rank's index in each node")
        for name, part, expected in zip(names, self.groups[1:], _ranks_of(group, node_size), strict=True):
            ranks = dist.get_process_group_ranks(part)
            if ranks != expected:
                raise UserError(f"exchange_options.groups must have the ranks {expected} for {name}, not {ranks}")
        # A rank sends rows sorted by (i, m, l): to rank i of its node, for expert l of rank i of node m.
        ids_NIL = torch.arange(num_experts, device="cpu", dtype=torch.int64).view(self.num_nodes, node_size, -1)
        self.order_E = ids_NIL.transpose(0, 1).flatten().tolist()

    def _exchange_counts(self, count_E: Tensor, flag: int) -> list[Tensor]:
        try:
            return self._exchange_in_stages(count_E, flag)
        except PeerError as error:  # only one stage's group knows of it; ranks of the other group wait for this one
            self.post_failure(error)
            raise

    def _exchange_in_stages(self, count_E: Tensor, flag: int) -> list[Tensor]:
        # [I, N * L + 1]: for each rank of the node, the counts for the ranks with its index, and the flag. The second
        # stage passes on the node's largest flag, so that every rank gets the largest of each node.
        shape = (self.num_nodes, self.node_size, self.num_local_experts)
        flag_I1 = torch.full_like(count_E[:1], flag).expand(self.node_size, 1)
        send = torch.cat([count_E.view(shape).transpose(0, 1).flatten(1), flag_I1], 1)
        near = all_to_all(self.node, send, what="exchange of counts in the node").wait()
        count_INL = near[:, :-1].view(self.node_size, self.num_nodes, self.num_local_experts)
        flag_N1 = near[:, -1].max().expand(self.num_nodes, 1)
        pass_on = torch.cat([count_INL.transpose(0, 1).flatten(1), flag_N1], 1)
        far = all_to_all(self.peers, pass_on, what="exchange of counts between nodes").wait(for_host=True)
        return [send, near, far]

    def _hops(self, tensors: list[Tensor], on_host: list[Counts]) -> list[HopCounts]:
        node_size = self.node_size
        num_nodes = self.num_nodes
        num_local = self.num_local_experts
        send, near, far = (without_last(counts) for counts in on_host)
        # Row m of the second stage's counts: for each rank of the node, its counts for node m.
        near_INL = torch.tensor(near, dtype=torch.int64, device="cpu").view(node_size, num_nodes, num_local)
        pass_on = near_INL.transpose(0, 1).flatten(1).tolist()
        device = tensors[0].device
        # Rows arrive from rank i of the node sorted by (node m, expert l), and must be sent on sorted by (m, i, l).
        ids_NIL = torch.arange(self.num_experts, device=device, dtype=torch.int64).view(num_nodes, node_size, num_local)
        near_key = ids_NIL.transpose(0, 1).flatten(1)
        # Then they arrive from node n sorted by (i, l), and experts need them sorted by l.
        far_key = torch.arange(num_local, device=device, dtype=torch.int64).repeat(num_nodes, node_size)
        return [
            HopCounts(self.node, send, near, tensors[1][:, :-1], near_key),
            HopCounts(self.peers, pass_on, far, tensors[2][:, :-1], far_key),
        ]
