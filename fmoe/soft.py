"""Layers with dense routing: soft MoE and multi-gate MoE.

Shape letters: B sequences, S tokens per sequence, D model width, E experts, P slots per expert, N tasks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe import random
from fmoe.errors import UserError
from fmoe.experts import build_experts, initial
from fmoe.experts.factories import Factory
from fmoe.layout import zero_padding


class _DenseExperts(nn.Module):
    def __init__(
        self,
        d_model: int,
        num_experts: int,
        d_hidden: int | None,
        expert: str | Factory,
        expert_options: Mapping[str, Any] | None,
        seed: int | None,
    ):
        super().__init__()
        for name, value in (("d_model", d_model), ("num_experts", num_experts)):
            if value < 1:
                raise UserError(f"{name}={value} must be at least 1")
        self.d_model = d_model
        self.num_experts = num_experts
        self.seed = random.draw_seed() if seed is None else seed
        self.experts = build_experts(
            expert,
            num_experts,
            slice(0, num_experts),
            d_model,
            4 * d_model if d_hidden is None else d_hidden,
            self.seed,
            expert_options or {},
            is_default_width=d_hidden is None,
        )

    def reset_parameters(self) -> None:
        """Draw all parameters again from the layer's seed, for models that were built on the meta device."""
        with random.keyed("experts", self.seed):
            initial.reset(self.experts)
        self._draw()

    def _draw(self) -> None:
        """Draw the layer's own parameters."""
        raise NotImplementedError

    def _run(self, rows_ERD: Tensor) -> Tensor:
        """Map [E, R, D] to [E, R, ...]: each expert processes its R rows."""
        num_experts, num_rows, width = rows_ERD.shape
        counts_L = torch.full((num_experts,), num_rows, dtype=torch.int64, device="cpu")
        out = self.experts(rows_ERD.reshape(num_experts * num_rows, width), counts_L)
        return out.view(num_experts, num_rows, *out.shape[1:])

    def _check(self, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[-1] != self.d_model:
            raise UserError(f"the input has shape {tuple(x.shape)}; it must be [..., tokens, d_model={self.d_model}]")


class SoftMoE(_DenseExperts):
    """Soft MoE (arXiv 2308.00951, algorithm 1).

    Each expert has ``slots_per_expert`` slots. The input of a slot is a weighted mean of all tokens of a sequence. Each
    token's output is a weighted mean of the outputs of all slots. No token is dropped. Do not use this layer in
    autoregressive models, because a token's output depends on later tokens.

    Args:
        d_model: D.
        num_experts, slots_per_expert: E and P; the paper mostly sets ``E * P`` to the number of tokens of a sequence.
        d_hidden, expert, expert_options, seed: as in `fmoe.build.Spec`.
    """

    router_parameters = ("slots", "scale")  # `fmoe.optim.hidden_matrices`

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        slots_per_expert: int = 1,
        d_hidden: int | None = None,
        *,
        expert: str | Factory = "ffn",
        expert_options: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ):
        super().__init__(d_model, num_experts, d_hidden, expert, expert_options, seed)
        if slots_per_expert < 1:
            raise UserError(f"slots_per_expert={slots_per_expert} must be at least 1")
        self.slots_per_expert = slots_per_expert
        self.slots = nn.Parameter(torch.empty(num_experts * slots_per_expert, d_model))
        self.scale = nn.Parameter(torch.empty(()))
        self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        with random.keyed("soft slots", self.seed):
            slots_QD = torch.randn(self.slots.shape, device="cpu", dtype=torch.float32)
        self.slots.copy_(slots_QD * self.d_model**-0.5)
        self.scale.fill_(1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the layer's output for ``x`` [..., S, D], in the same shape.

        Args:
            mask: bool [..., S], False for padding, which slots ignore and whose output is zero; None for no padding.
        """
        self._check(x)
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != x.shape[:-1]:
                raise UserError(
                    f"mask is {mask.dtype} {tuple(mask.shape)}; it must be torch.bool {tuple(x.shape[:-1])}, "
                    "False for padding"
                )
            x = zero_padding(x, mask)
        x_BSD = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            # Tokens and slots are normalized, as in the paper, so that the softmax does not collapse at large widths.
            slots_QD = self.scale.to(dtype) * F.normalize(self.slots.to(dtype), dim=-1)
            logits_BSQ = F.normalize(x_BSD.to(dtype), dim=-1) @ slots_QD.t()
            combine_BSQ = logits_BSQ.softmax(-1)
            if mask is not None:
                mask_BS1 = mask.reshape(*x_BSD.shape[:2], 1)
                logits_BSQ = logits_BSQ.masked_fill(~mask_BS1, torch.finfo(dtype).min)
                combine_BSQ = combine_BSQ * mask_BS1
            dispatch_BSQ = logits_BSQ.softmax(1)
        slots_BQD = dispatch_BSQ.to(x.dtype).transpose(1, 2) @ x_BSD
        per_expert = (self.num_experts, self.slots_per_expert)
        out_ERD = self._run(slots_BQD.unflatten(1, per_expert).transpose(0, 1).flatten(1, 2))
        out_BQD = out_ERD.unflatten(1, (len(x_BSD), self.slots_per_expert)).transpose(0, 1).flatten(1, 2)
        y_BSD = combine_BSQ.to(out_BQD.dtype) @ out_BQD
        return y_BSD.view(*x.shape[:-1], y_BSD.shape[-1])


class MMoE(_DenseExperts):
    """Multi-gate Mixture-of-Experts (Ma et al., KDD 2018): tasks share experts but not gates.

    Task n has the output ``y_n = sum_e softmax(W_n x)_e f_e(x)``, where f_e is expert e.

    Args:
        d_model: D.
        num_experts, num_tasks: E and N.
        d_hidden, expert, expert_options, seed: as in `fmoe.build.Spec`.
    """

    router_parameters = ("gates",)

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        num_tasks: int,
        d_hidden: int | None = None,
        *,
        expert: str | Factory = "ffn",
        expert_options: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ):
        super().__init__(d_model, num_experts, d_hidden, expert, expert_options, seed)
        if num_tasks < 1:
            raise UserError(f"num_tasks={num_tasks} must be at least 1")
        self.num_tasks = num_tasks
        self.gates = nn.Parameter(torch.empty(num_tasks, num_experts, d_model))
        self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        gates_NED = torch.empty(self.gates.shape, device="cpu", dtype=torch.float32)
        with random.keyed("task gates", self.seed):
            gates_NED.uniform_(-1, 1)
        self.gates.copy_(gates_NED * self.d_model**-0.5)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return N outputs for ``x`` [..., S, D], one per task, each in the shape of ``x``."""
        self._check(x)
        x_TD = x.reshape(-1, self.d_model)
        out_ETD = self._run(x_TD.expand(self.num_experts, -1, -1))
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            weight_NTE = torch.einsum("ned,td->nte", self.gates.to(dtype), x_TD.to(dtype)).softmax(-1)
        y_NTD = torch.einsum("nte,etd->ntd", weight_NTE.to(out_ETD.dtype), out_ETD)
        return [y_TD.view(*x.shape[:-1], y_TD.shape[-1]) for y_TD in y_NTD.unbind(0)]
