"""All-to-all in two stages: first within the node, then between the ranks that have the same index in their nodes.

A rank sends one message to each node, not one to each rank: fewer and larger messages cross the slow network. This is
the hierarchical all-to-all of HetuMoE (arXiv 2203.14685) and of DeepSpeed-MoE (arXiv 2201.05596 section 5.3). Rows are
sent twice, the first time over the fast links of the node.

Shape letters: N nodes of I ranks each; rank w is on node w // I, with index w % I. Other letters:
`fmoe.exchange.base`.
"""

import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from fmoe.exchange.all_to_all import AllToAllExchange
from fmoe.exchange.collectives import PeerError, all_to_all, timeout_of
from fmoe.exchange.hops import Counts, HopCounts
from fmoe.runtime import launcher

Subgroups = tuple[dist.ProcessGroup, dist.ProcessGroup]  # of the node, and of the ranks of one index

_subgroups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Subgroups]]" = weakref.WeakKeyDictionary()


def node_groups(group: dist.ProcessGroup, node_size: int) -> Subgroups:
    """Return the group of this node's ranks, and the group of the ranks with this rank's index on each node.

    Every rank of ``group`` must call this function. Later calls with the same arguments return the same groups.
    """
    known = _subgroups.setdefault(group, {})
    if node_size not in known:
        ranks, own = dist.get_process_group_ranks(group), group.rank()
        node = ranks[own // node_size * node_size :][:node_size]
        peers = ranks[own % node_size :: node_size]
        timeout = timedelta(seconds=timeout_of(group))
        known[node_size] = (
            dist.new_group(node, timeout, use_local_synchronization=True),
            dist.new_group(peers, timeout, use_local_synchronization=True),
        )
    return known[node_size]


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
        self.node_size, self.num_nodes = node_size, self.ep_size // node_size
        self.node, self.peers = node_groups(group, node_size) if groups is None else groups
        self.groups = (group, self.node, self.peers)
        ranks, first = dist.get_process_group_ranks(group), self.ep_rank // node_size * node_size
        for key, part, expected in (
            ("this node", self.node, ranks[first : first + node_size]),
            ("this rank's index in each node", self.peers, ranks[self.ep_rank % node_size :: node_size]),
        ):
            if (found := dist.get_process_group_ranks(part)) != expected:
                raise UserError(f"exchange_options.groups must have the ranks {expected} for {key}, not {found}")

    def _exchange_counts(self, count_E: Tensor, flag: int) -> tuple[list[Tensor], list[Tensor]]:
        try:
            return self._exchange_in_stages(count_E, flag)
        except PeerError as error:  # only one stage's group knows of it; ranks of the other group wait for this one
            self.post_failure(error)
            raise

    def _exchange_in_stages(self, count_E: Tensor, flag: int) -> tuple[list[Tensor], list[Tensor]]:
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
        return [send, near, far], [near[:, :-1], far[:, :-1]]

    def _hops(self, tensors: list[Tensor], on_host: list[Counts]) -> tuple[list[HopCounts], Counts, Iterable[int]]:
        node_size, num_nodes, num_local = self.node_size, self.num_nodes, self.num_local_experts
        send, near, far = ([row[:-1] for row in rows] for rows in on_host)
        pass_on = [[n for row in near for n in row[m * num_local : (m + 1) * num_local]] for m in range(num_nodes)]
        device = tensors[0].device
        # Rows arrive from rank i of the node sorted by (node m, expert l), and must be sent on sorted by (m, i, l).
        i, m, local = torch.meshgrid(
            *(torch.arange(n, device=device, dtype=torch.int64) for n in (node_size, num_nodes, num_local)),
            indexing="ij",
        )
        near_key = ((m * node_size + i) * num_local + local).flatten(1)
        # Then they arrive from node n sorted by (i, l), and experts need them sorted by l.
        far_key = torch.arange(num_local, device=device, dtype=torch.int64).repeat(num_nodes, node_size)
        hops = [
            HopCounts(self.node, send, near, tensors[1][:, :-1], near_key),
            HopCounts(self.peers, pass_on, far, tensors[2][:, :-1], far_key),
        ]
        order_E = [
            (m * node_size + i) * num_local + local
            for i in range(node_size)
            for m in range(num_nodes)
            for local in range(num_local)
        ]
        return hops, far, order_E

    def describe(self) -> str:
        return f"{super().describe()}(node_size={self.node_size})"
