"""Dispatchers of tokens to time against each other: our exchanges, and megatron-core's token dispatchers.

All get the same rows, choices and combine weights, each in its own format, call the same experts, and return the output
and the gradients of rows and weights. Shape letters: T tokens of a rank, K choices, D width, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe.exchange import build_exchange
from fmoe.experts.call import ExpertCall
from fmoe.routing import Routing

Experts = Callable[[Tensor, list[int]], Tensor]  # rows sorted by expert, and rows per expert, to outputs
Result = tuple[Tensor, Tensor, Tensor]  # output [T, D], gradients of rows [T, D] and weights [T, K]


@dataclass(frozen=True)
class Batch:
    """A rank's tokens, their choices of experts, and the gradient of the outputs.

    Attributes:
        most: upper bound on the rows that an expert gets from any rank, as a gate with a capacity provides it. The
            padded exchange sends this number of rows to every expert, and drops none.
    """

    num_experts: int
    x_TD: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    grad_TD: Tensor
    most: int

    @classmethod
    def random(cls, tokens: int, d_model: int, num_experts: int, top_k: int, skew: float, seed: int) -> "Batch":
        """Return a batch in which expert 0 gets exactly ``skew`` times the even share; the others share the rest at
        random.
        """
        generator = torch.Generator().manual_seed(seed)
        score_TE = torch.rand(tokens, num_experts, generator=generator)
        score_TE[:, 0] = -1
        hot = round(tokens * top_k / num_experts * skew)
        score_TE[torch.randperm(tokens, generator=generator)[:hot], 0] = 2
        weight_TK = torch.rand(tokens, top_k, generator=generator) + 0.1
        x_TD, grad_TD = torch.randn(2, tokens, d_model, generator=generator)
        expert_TK = score_TE.topk(top_k).indices
        most = expert_TK.flatten().bincount(minlength=num_experts).max()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return cls(num_experts, x_TD, expert_TK, weight_TK / weight_TK.sum(-1, keepdim=True), grad_TD, int(most))


def identity(rows: Tensor, counts) -> Tensor:
    """Experts that return their rows unchanged, so that only the exchange is timed."""
    return rows


class _Module(nn.Module):
    """A function wrapped as experts."""

    def __init__(self, experts: Experts):
        super().__init__()
        self.forward = experts


def ours(batch: Batch, exchange: str, **options) -> Callable[[Experts], Result]:
    """Return a step with one of `fmoe.exchange.EXCHANGES`."""
    travel = build_exchange(dist.group.WORLD, batch.num_experts, exchange, options)

    def step(experts: Experts = identity) -> Result:
        x_TD = batch.x_TD.detach().requires_grad_()
        weight_TK = batch.weight_TK.detach().requires_grad_()
        module = _Module(experts)
        routing = Routing(batch.expert_TK, weight_TK, max_load=batch.most)
        with travel.session("bench", lambda x: {"name": "bench", "d_model": x.shape[1]}, module, x_TD) as session:
            (y_TD,) = session.run(routing, weight_TK, [x_TD], ExpertCall(module, "bench", x_TD, training=True))
        y_TD.backward(batch.grad_TD)
        return y_TD.detach(), x_TD.grad, weight_TK.grad

    return step


def start_megatron() -> None:
    """Create megatron-core's process groups, with experts over all ranks."""
    from megatron_patch import cpu

    cpu.install()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )


def megatron(batch: Batch, dispatcher: str) -> Callable[[Experts], Result]:
    """Return a step with megatron-core's token dispatcher "alltoall" or "allgather".

    The dispatcher takes choices as a map [T, E] and weights as probabilities [T, E], made beforehand. In megatron-core
    the experts, not the combination, multiply rows by their weights, and so do the experts here.
    """
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.transformer_config import TransformerConfig

    kinds = {
        "alltoall": token_dispatcher.MoEAlltoAllTokenDispatcher,
        "allgather": token_dispatcher.MoEAllGatherTokenDispatcher,
    }
    size = dist.get_world_size()
    rank = dist.get_rank()
    tokens, top_k = batch.expert_TK.shape
    num_local = batch.num_experts // size
    config = TransformerConfig(
        num_layers=1,
        hidden_size=batch.x_TD.shape[1],
        num_attention_heads=1,
        num_moe_experts=batch.num_experts,
        moe_router_topk=top_k,
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=size,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    local = list(range(rank * num_local, (rank + 1) * num_local))
    travel = kinds[dispatcher](num_local, local, config, get_default_pg_collection())
    map_TE = torch.zeros(tokens, batch.num_experts, dtype=torch.bool).scatter_(1, batch.expert_TK, True)
    probs_TE = torch.zeros(tokens, batch.num_experts).scatter_(1, batch.expert_TK, batch.weight_TK)

    def step(experts: Experts = identity) -> Result:
        x_TD = batch.x_TD.detach().requires_grad_()
        weight_TE = probs_TE.detach().requires_grad_()
        rows, weights = travel.dispatch_preprocess(x_TD.unsqueeze(1), map_TE, weight_TE)
        rows, counts, weights = travel.dispatch_postprocess(*travel.token_dispatch(rows, weights))
        out = travel.combine_preprocess(experts(rows, counts) * weights.unsqueeze(1))
        y_TD = travel.combine_postprocess(travel.token_combine(out)).squeeze(1)
        y_TD.backward(batch.grad_TD)
        return y_TD.detach(), x_TD.grad, weight_TE.grad.gather(1, batch.expert_TK)

    return step
