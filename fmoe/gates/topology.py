"""A gate that prefers experts of the same node, for clusters whose network between nodes is slow."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fmoe.errors import UserError
from fmoe.gates.router import Choice, Scores, TopKRouter
from fmoe.routing import RoutingGroups
from fmoe.runtime import launcher

_LADDER = (0.125, 0.25, 0.5, 1.0)


class TopologyRouter(TopKRouter):
    """Top-k routing with a logit bonus for experts on the token's node (FasterMoE's topology-aware gate, PPoPP'22).

    Experts are chosen by ``logit + bonus * [expert is on the token's node]``. Each routing group
    (`fmoe.routing.RoutingGroups`) gets the largest of the bonuses ``bonus * {1, 1/2, 1/4, 1/8, 0}`` that keeps every
    expert's load within a limit. The limit is ``skew`` times the even share of the group's assignments, or the largest
    load without a bonus if that is more.

    Weights are the softmax over the logits of the chosen experts, without the bonus. The gate has the balance and z
    losses of the gate "naive", and equals it on a single node. Choices depend on the node of a token, and therefore on
    how the job is split over nodes. Do not compare runs on different clusters with this gate.

    Args:
        d_model, num_experts, top_k, options: see `TopKRouter`.
        bonus: largest bonus, in units of logits.
        skew: bound on an expert's load, as a multiple of the even share; at least 1.
        node_size: ranks per node; None for the environment variable LOCAL_WORLD_SIZE. If that is unset or larger than
            the expert parallel group, all ranks of the group count as one node.
        num_nodes: number of nodes, over which the experts are spread evenly; None to derive it from ``node_size``.
        node_of: function of the `RoutingGroups` that returns the node of each group, int64 [G]; None for this rank's
            node.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        bonus: float = 2.0,
        skew: float = 2.0,
        node_size: int | None = None,
        num_nodes: int | None = None,
        node_of: Callable[[RoutingGroups], Tensor] | None = None,
        **options: Any,
    ):
        super().__init__(d_model, num_experts, top_k, **options)
        if not (bonus >= 0 and math.isfinite(bonus)):
            raise UserError(f"bonus={bonus} must be finite and at least 0")
        if not skew >= 1:
            raise UserError(f"skew={skew} must be at least 1 (1 allows only equal loads)")
        if node_size is not None and node_size < 1:
            raise UserError(f"node_size={node_size} is not positive")
        if num_nodes is not None and (num_nodes < 1 or num_experts % num_nodes):
            raise UserError(f"num_nodes={num_nodes} does not divide num_experts={num_experts}")
        self.bonus = bonus
        self.skew = skew
        self.node_size = node_size
        self.node_of = node_of
        self.num_nodes = num_nodes or 1
        self.node = 0
        self._is_placed = num_nodes is not None

    def set_ep_rank(self, rank: int, ep_size: int) -> None:
        """Set this rank's index in the expert parallel group, and the group's size. The layer calls this.

        Raises:
            UserError: the number of ranks per node does not divide ``ep_size``, and ``num_nodes`` was not given.
        """
        size = self.node_size or launcher.number("LOCAL_WORLD_SIZE", ep_size)
        size = min(size, ep_size)
        if not self._is_placed:
            if ep_size % size:
                name = "LOCAL_WORLD_SIZE" if self.node_size is None else "node_size"
                raise UserError(
                    f"{name}={size} does not divide the {ep_size} ranks of moe_group: set node_size or num_nodes"
                )
            self.num_nodes = ep_size // size
        self.node = rank * self.num_nodes // ep_size

    def choose(self, scores: Scores, groups: RoutingGroups) -> Choice:
        with torch.no_grad():
            expert_TK = self.prefer(scores.logits_TE.detach(), groups)
        return Choice(expert_TK, scores.logits_TE.gather(-1, expert_TK).softmax(-1))

    def prefer(self, logits_TE: Tensor, groups: RoutingGroups) -> Tensor:
        """Return the experts of each token, int64 [T, K], best first."""
        if self.num_nodes == 1:
            return logits_TE.topk(self.top_k).indices
        logits_GSE = groups.split(logits_TE)
        num_groups, _, num_experts = logits_GSE.shape
        device = logits_TE.device
        if self.node_of is None:
            nodes_G = torch.full((num_groups,), self.node, device=device, dtype=torch.int64)
        else:
            nodes_G = self.node_of(groups)
        node_E = torch.arange(num_experts, device=device, dtype=torch.int64) // (num_experts // self.num_nodes)
        near_GE = (node_E == nodes_G.to(device).view(-1, 1)).to(logits_TE.dtype)
        valid_GS1 = groups.valid(device).unsqueeze(-1)
        share_G = valid_GS1.sum((1, 2)).to(logits_TE.dtype) * self.top_k / num_experts

        def best(scores_GSE: Tensor) -> tuple[Tensor, Tensor]:
            # The K best experts of each token, and the largest load in each group.
            best_GSK = scores_GSE.topk(self.top_k).indices
            load_GE = torch.zeros(num_groups, num_experts, dtype=torch.int64, device=device)
            load_GE.scatter_add_(1, best_GSK.flatten(1), valid_GS1.expand_as(best_GSK).flatten(1).long())
            return best_GSK, load_GE.amax(1)

        chosen_GSK, max_load_G = best(logits_GSE)
        limit_G = torch.maximum(max_load_G.to(share_G.dtype), self.skew * share_G)
        for step in _LADDER:  # a larger bonus replaces a smaller one if it keeps the limit
            best_GSK, max_load_G = best(logits_GSE + self.bonus * step * near_GE.unsqueeze(1))
            chosen_GSK = torch.where((max_load_G <= limit_G).view(-1, 1, 1), best_GSK, chosen_GSK)
        return groups.join(chosen_GSK)
