"""The Mixture-of-Experts layer: gate -> plan -> dispatch -> experts -> combine, and nothing else.

Shape letters: T tokens on this rank, D model width, E experts in all, L experts on this rank, K experts a token,
M assignments kept, R rows that this rank's experts get.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe import random
from fmoe.dispatch import DispatchPlan, build_exchange
from fmoe.errors import UserError
from fmoe.experts import FFNExperts
from fmoe.gates import Gate, build_gate
from fmoe.losses import DEFAULT_LOSS_SCALE, attach_loss
from fmoe.metrics import LayerMetrics
from fmoe.ops import combine, permute
from fmoe.routing import Routing, tokens_of

DEFAULT_LOSS_WEIGHTS = {"balance": 1e-2, "z": 1e-3}


class FMoE(nn.Module):
    """A Mixture-of-Experts layer in the place of a feed-forward block (FastMoE, arXiv 2103.13262).

    ``y = sum over the K experts that the gate picks of weight * expert(x)``. With ``moe_group`` the experts are spread
    over its workers; the result is that of one worker holding all of them.

    Args:
        d_model: D, the width of tokens.
        num_experts: E, in all; every worker holds ``E / workers`` of them.
        d_hidden: hidden width of an expert; None for ``4 * d_model``.
        top_k: K; None for the gate's own default.
        gate: a name of `fmoe.gates.GATES`, a class, or a ready instance (`fmoe.gates`).
        gate_options: keywords for a gate given by name or class, e.g. ``{"capacity_factor": 1.0}``.
        expert: ``"ffn"``, or a factory called as ``expert(num_local_experts, d_model, d_hidden, first_expert=...,
            seed=..., **expert_options)`` whose modules map (rows, counts) to rows.
        expert_options: keywords for the experts, e.g. ``{"activation": "relu", "bias": False}``.
        moe_group: process group over which the experts are spread; None for one worker.
        loss_weights: factor of each auxiliary loss by name; what is left out keeps its default (balance 1e-2, the
            value of Switch; z 1e-3, that of ST-MoE); 0 turns one off.
        loss_scale: gives the factor between auxiliary losses and the backward pass; None for `fmoe.set_loss_scale`.
        group_size: tokens of a routing group (`fmoe.routing.RoutingGroups`); None for one sequence.
        sequence_first: 3-D inputs are [S, B, D] instead of [B, S, D].
        seed: key of this layer's weights and noise; None draws one from torch's default generator, which is the same
            on every rank if they were seeded alike and build the same layers.

    Attributes:
        metrics: routing statistics since they were last reset (`fmoe.metrics`).

    Raises:
        UserError: an argument that cannot be, with its name, value and limit.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        d_hidden: int | None = None,
        *,
        top_k: int | None = None,
        gate: str | type[nn.Module] | Gate = "naive",
        gate_options: Mapping[str, Any] | None = None,
        expert: str | Callable[..., nn.Module] = "ffn",
        expert_options: Mapping[str, Any] | None = None,
        moe_group: dist.ProcessGroup | None = None,
        loss_weights: Mapping[str, float] | None = None,
        loss_scale: Callable[[], float | Tensor] | None = None,
        group_size: int | None = None,
        sequence_first: bool = False,
        seed: int | None = None,
    ):
        super().__init__()
        for name, value in (("d_model", d_model), ("num_experts", num_experts), ("group_size", group_size)):
            if value is not None and value < 1:
                raise UserError(f"{name}={value} is not positive")
        self.d_model, self.num_experts = d_model, num_experts
        self.group_size, self.sequence_first = group_size, sequence_first
        self.seed = int(torch.randint(1 << 62, (), device="cpu")) if seed is None else seed
        self.exchange = build_exchange(moe_group, num_experts)
        self.num_local_experts = num_experts // self.exchange.num_workers
        self.first_expert = moe_group.rank() * self.num_local_experts if moe_group is not None else 0
        with random.keyed("gate", self.seed):
            self.gate = build_gate(gate, d_model, num_experts, top_k, **(gate_options or {}))
        self.experts = self._build_experts(expert, 4 * d_model if d_hidden is None else d_hidden, expert_options or {})
        for parameter in self.experts.parameters():
            # Megatron's word for "not replicated like the rest": gradients are averaged over the ranks that hold the
            # same experts alone. It is set at one worker too, so that the same code runs at every split.
            parameter.allreduce = False
        self.loss_weights = {**DEFAULT_LOSS_WEIGHTS, **(loss_weights or {})}
        self.loss_scale = DEFAULT_LOSS_SCALE if loss_scale is None else loss_scale
        self.metrics = LayerMetrics(num_experts, tuple(self.loss_weights))

    def _build_experts(self, expert: str | Callable[..., nn.Module], d_hidden: int, options: Mapping[str, Any]):
        if isinstance(expert, str):
            if expert != "ffn":
                raise UserError(f"expert={expert!r} is not known; there are 'ffn' and factories")
            expert = FFNExperts
        return expert(
            self.num_local_experts, self.d_model, d_hidden, first_expert=self.first_expert, seed=self.seed, **options
        )

    @property
    def world_size(self) -> int:
        """Workers that the experts are spread over."""
        return self.exchange.num_workers

    def reset_parameters(self) -> None:
        """Draws every weight anew, the same ones (they are keyed): for models built on the meta device."""
        with random.keyed("gate", self.seed):
            self.gate.reset_parameters()
        self.experts.reset_parameters()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Routes every token and mixes its experts' outputs.

        Args:
            x: [T, D], [..., S, D], or [S, B, D] with ``sequence_first``.
            mask: bool, the shape of ``x`` without D; False marks padding, which is not routed and comes out as zero.

        Returns:
            The shape of ``x``.

        Raises:
            UserError: shape or dtype of ``x`` or ``mask`` is wrong.
            RuntimeError: another worker failed before the exchange; its rank and message are named.
        """
        try:
            x_TD, groups = tokens_of(
                x,
                self.d_model,
                group_size=self.group_size,
                sequence_first=self.sequence_first,
                mask=mask,
                layer_seed=self.seed,
            )
            routing = self.gate(x_TD, groups)
            plan = DispatchPlan.from_routing(routing, self.num_experts)
        except Exception as error:
            self.exchange.abort(error)
            raise
        transfer = self.exchange.open(plan)
        rows_RD = transfer.dispatch(permute(x_TD, plan, transfer.num_rows))
        rows_RD = self.experts(rows_RD, transfer.counts)
        y_TD = combine(transfer.combine(rows_RD), routing.weight_TK, plan)
        return self._attach_losses(y_TD, routing).view(x.shape)

    def _attach_losses(self, y_TD: Tensor, routing: Routing) -> Tensor:
        """Adds the weighted losses to the backward pass, and there counts the statistics."""
        if not self.training or not routing.losses or not torch.is_grad_enabled():
            return y_TD
        unknown = routing.losses.keys() - self.loss_weights.keys()
        if unknown:
            raise UserError(f"loss_weights has no entry for {sorted(unknown)}, which the gate returns")
        total = sum(self.loss_weights[name] * loss for name, loss in routing.losses.items())
        return attach_loss(y_TD, total, self.loss_scale, lambda: self.record(routing))

    def record(self, routing: Routing) -> None:
        """Counts the statistics of one micro batch; called once, in its backward pass."""
        self.metrics.add(routing.stats, routing.losses)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, workers={self.world_size}, first_expert={self.first_expert}"
