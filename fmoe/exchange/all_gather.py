"""Expert parallelism by all-gather: every rank gets all tokens, and computes the share of its experts in each output.

This suits small groups and large K. A token is sent once to each rank instead of once to each of its K experts. Each
rank returns one sum per token instead of a row per expert. The bytes grow with W (docs/parallelism.md), and every rank
holds the tokens of all ranks.

Shape letters: T tokens of this rank, T' of the rank with the most tokens, others as in `fmoe.exchange.base`.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.exchange.base import Forward, GroupExchange, grad_flag
from fmoe.exchange.collectives import all_gather, all_to_all
from fmoe.exchange.hops import join_graph, tie
from fmoe.experts.call import ExpertCall
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing


class AllGatherExchange(GroupExchange):
    """Exchange that gathers all tokens on every rank, for small groups and large ``top_k``.

    Each rank computes its experts' share of every output. The shares are summed in float32 or wider, even if
    ``wire_dtype`` is narrower.

    Args:
        group, num_experts, wire_dtype: see `GroupExchange`.
    """

    def plan(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return the chosen experts [T, K], and the number of assignments of each expert [E]."""
        expert_N = routing.expert_TK.reshape(-1) + 1
        count_E = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=expert_N.device)
        return routing.expert_TK, count_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))[1:]

    def open(self, plan: tuple[Tensor, Tensor], needs_grad: bool) -> Forward:
        expert_TK, count_E = plan
        device = expert_TK.device
        head = torch.tensor([0, *expert_TK.shape, grad_flag(needs_grad)], dtype=torch.int64, device="cpu")
        heads = self.exchange_heads(torch.cat([head.to(device), count_E]), None)
        longest = max(row[1] for row in heads)
        top_k = max(row[2] for row in heads)
        padded = torch.full((longest, top_k), -1, dtype=torch.int64, device=device)
        padded[: expert_TK.shape[0], : expert_TK.shape[1]] = expert_TK
        everyones = all_gather(self.group, padded, "gathering of choices").wait()
        first = self.ep_rank * self.num_local_experts
        local = everyones - first
        local = torch.where((local >= 0) & (local < self.num_local_experts), local, -1)
        counts = [sum(row[4 + first + e] for row in heads) for e in range(self.num_local_experts)]
        local_plan = DispatchPlan.from_routing(Routing(local, local), self.num_local_experts).kept_only(counts)
        needs_grad = self.needs_grad_on_any(needs_grad, [row[3] for row in heads])
        return functools.partial(self._run, local_plan, (longest, top_k), needs_grad)

    def abort(self, error: Exception, device: torch.device) -> None:
        head = torch.zeros(4 + self.num_experts, dtype=torch.int64, device=device)
        head[0] = 1
        self.exchange_heads(head, error)

    def _run(
        self,
        plan: DispatchPlan,
        shape: tuple[int, int],
        needs_grad: bool,
        inputs: list[Tensor],
        weight_TK: Tensor,
        experts: ExpertCall,
    ) -> list[Tensor]:
        # 1. Gather the tokens and weights of all ranks, each padded to the largest number of tokens and choices.
        longest, top_k = shape
        tokens = []
        for x in inputs:
            wire_dtype = self.wire_dtype if x.is_floating_point() else None
            tokens.append(_GatherPadded.apply(join_graph(x, needs_grad), longest, self.group, wire_dtype))
        padded_TK = torch.nn.functional.pad(join_graph(weight_TK, needs_grad), (0, top_k - weight_TK.shape[1]))
        weights = _GatherPadded.apply(padded_TK, longest, self.group, None)
        # 2. Compute the share of this rank's experts in the outputs of all tokens.
        shares = tie(experts.combined(tokens, weights, plan), [*tokens, weights], needs_grad)
        # 3. Sum the shares of all ranks, each for its own tokens.
        return [_SumScatter.apply(share, weight_TK.shape[0], self.group, self.wire_dtype) for share in shares]


def _gather(x: Tensor, longest: int, group: dist.ProcessGroup, wire: torch.dtype | None) -> Tensor:
    sent = x if wire is None else x.to(wire)
    if x.shape[0] < longest:
        sent = torch.cat([sent, sent.new_zeros(longest - x.shape[0], *x.shape[1:])])
    return all_gather(group, sent).wait().to(x.dtype)


def _sum_scatter(x: Tensor, length: int, group: dist.ProcessGroup, wire: torch.dtype | None) -> Tensor:
    """Sum ``x`` over ranks, and return the first ``length`` rows of this rank's part; all parts are equally long."""
    received = all_to_all(group, x if wire is None else x.to(wire), what="scattering of sums").wait()
    parts = received.view(group.size(), -1, *x.shape[1:])[:, :length]
    return parts.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


class _GatherPadded(torch.autograd.Function):
    """Gather ``x`` of all ranks, padded with zeros to ``longest`` rows per rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, longest: int, group: dist.ProcessGroup, wire: torch.dtype | None) -> Tensor:
        ctx.length = x.shape[0]
        ctx.group = group
        ctx.wire = wire
        return _gather(x, longest, group, wire)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _SumScatter.apply(grad, ctx.length, ctx.group, ctx.wire), None, None, None


class _SumScatter(torch.autograd.Function):
    """Differentiable `_sum_scatter`, the adjoint of `_GatherPadded`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int, group: dist.ProcessGroup, wire: torch.dtype | None) -> Tensor:
        ctx.longest = x.shape[0] // group.size()
        ctx.group = group
        ctx.wire = wire
        return _sum_scatter(x, length, group, wire)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _GatherPadded.apply(grad, ctx.longest, ctx.group, ctx.wire), None, None, None
