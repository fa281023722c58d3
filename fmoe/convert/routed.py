"""`RoutedMoE`: a layer that takes the place of a model's own experts, while the model keeps its router.

Shape letters: T tokens, K experts per token, E experts, D model width, H hidden width, P height of the first map (2 H
if gated, else H).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmoe.gates import external
from fmoe.gates.router import routing_stats
from fmoe.layout import LocalTokens
from fmoe.moe import MoE
from fmoe.routing import Routing


@dataclass(frozen=True)
class Form:
    """Names and layout of the weights of a model's own experts.

    Attributes:
        names: for each parameter of `fmoe.experts.FFNExperts`, the model's tensors that hold it, such as
            ``{"weight_in": ("gate_up_proj",)}``. Several tensors hold parts of the height P, in this order. A tensor
            stacks all experts along its first axis, or is of the expert whose global id replaces ``{}`` in the name.
        is_transposed: matrices are [in, out]; else [out, in].
        is_interleaved: rows of gate and value alternate; else the gate has the first half of P.
    """

    names: Mapping[str, tuple[str, ...]]
    is_transposed: bool = False
    is_interleaved: bool = False

    @property
    def is_listed(self) -> bool:
        """Whether each tensor is of one expert."""
        return any("{}" in part for parts in self.names.values() for part in parts)

    def is_same(self, name: str) -> bool:
        """Return whether one tensor of the model holds the parameter ``name`` in fmoe's layout."""
        is_moved = self.is_transposed and name.startswith("weight")
        is_mixed = self.is_interleaved and name.endswith("_in")
        return len(self.names[name]) == 1 and not (self.is_listed or is_moved or is_mixed)

    def keys(self, name: str, experts: Sequence[int]) -> list[str]:
        """Return the names of the model's tensors that hold the parameter ``name`` of these experts (global ids)."""
        return [part.format(i) for part in self.names[name] for i in (experts if "{}" in part else experts[:1])]

    def read(self, name: str, tensors: Mapping[str, Tensor], experts: Sequence[int]) -> Tensor:
        """Return fmoe's parameter ``name`` of these experts (global ids), given the model's tensors."""
        parts = []
        for part in self.names[name]:
            value = torch.stack([tensors[part.format(i)] for i in experts]) if "{}" in part else tensors[part]
            parts.append(value.mT if self.is_transposed and name.startswith("weight") else value)
        if self.is_same(name):
            return parts[0]
        value = torch.cat(parts, 1)
        if self.is_interleaved and name.endswith("_in"):
            value = torch.cat([value[:, ::2], value[:, 1::2]], 1)
        return value.contiguous()

    def write(self, name: str, value: Tensor, experts: Sequence[int]) -> dict[str, Tensor]:
        """Return the model's tensors that hold the ``value`` of the parameter ``name``: the inverse of `read`."""
        if self.is_same(name):
            return {self.names[name][0]: value}
        if self.is_interleaved and name.endswith("_in"):
            value = torch.stack(value.chunk(2, 1), 2).flatten(1, 2)
        tensors: dict[str, Tensor] = {}
        parts = self.names[name]
        for part, piece in zip(parts, value.chunk(len(parts), 1), strict=True):
            piece = piece.mT if self.is_transposed and name.startswith("weight") else piece
            if "{}" in part:
                tensors |= {part.format(i): piece[row].clone() for row, i in enumerate(experts)}
            else:
                tensors[part] = piece.contiguous()
        return tensors


@dataclass(eq=False, kw_only=True)
class RoutedTokens(LocalTokens):
    """Tokens of a `RoutedMoE`, with their experts (-1 for no expert) and combine weights, both [T, K]."""

    expert_TK: Tensor
    weight_TK: Tensor


class RoutedMoE(MoE):
    """MoE layer with the experts of a model whose own router chooses among them.

    The state has the names and the layout of the model's own experts (`Form`). Their router is outside of the layer, so
    the entropy in the layer's statistics is NaN.
    """

    form = Form({})  # assigned after construction

    # The names of transformers.
    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts.

        Args:
            hidden_states: the tokens, [T, D].
            top_k_index: ids of each token's experts, [T, K]; E for no expert, as in transformers. Or 0 and 1 for
                each expert, [T, K, E].
            top_k_weights: combine weights, [T, K].

        Raises:
            UserError, PeerError: as in `MoE.forward`.
        """
        y_TD: Tensor = super().forward((hidden_states, top_k_index, top_k_weights))
        return y_TD.to(hidden_states.dtype)

    def split(self, x: Any, mask: Tensor | None, token_ids: Tensor | None) -> RoutedTokens:
        hidden_states, index, weight = x
        tokens = super().split(hidden_states, mask, token_ids)
        if index.dim() == 3:  # Switch Transformers
            index = torch.where(index.any(-1), index.argmax(-1), self.num_experts)
        expert_TK = index.reshape(-1, index.shape[-1]).long()
        weight_TK = weight.reshape(-1, weight.shape[-1])
        return RoutedTokens(
            **vars(tokens),
            expert_TK=expert_TK.masked_fill(expert_TK == self.num_experts, -1),
            weight_TK=weight_TK.to(torch.promote_types(weight.dtype, torch.float32)),
        )

    def route(self, tokens: Any) -> Routing:
        groups = tokens.groups
        routing = Routing(tokens.expert_TK, tokens.weight_TK)
        routing = external.checked(self.gate, routing, groups, self.num_experts, name=self.name, check=self.check)
        entropy_T = torch.full((groups.num_tokens,), torch.nan, dtype=torch.float32, device=tokens.x_TD.device)
        expert_TK = routing.expert_TK
        return replace(routing, stats=routing_stats(expert_TK, expert_TK, entropy_T, groups, self.num_experts))

    def facts(self, x: Any) -> dict[str, object]:
        return super().facts(x[0])

    @property
    def local_experts(self) -> range:
        """Global ids of this rank's experts."""
        return range(self.first_expert, self.first_expert + self.num_local_experts)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # The model's names, such as gate_up_proj: torch.distributed.checkpoint looks up the keys of the state.
            for own in self.form.names:
                for key in self.form.keys(own, self.local_experts):
                    if key == name:
                        return self.form.write(own, getattr(self.experts, own), self.local_experts)[name]
                    if key.startswith(f"{name}."):
                        return _Inner(self, name)
            raise

    def state_dict(  # type: ignore[override]  # torch's is overloaded
        self, *args: Any, prefix: str = "", **options: Any
    ) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict(*args, prefix=prefix, **options)
        for own in self.form.names:
            key = f"{prefix}experts.{own}"
            if key in state:  # absent under an adapter
                tensors = self.form.write(own, state.pop(key), self.local_experts)
                state.update({prefix + name: value for name, value in tensors.items()})
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for own in self.form.names:
            names = self.form.keys(own, self.local_experts)
            if all(prefix + name in state_dict for name in names):  # else torch reports the missing parameter
                tensors = {name: state_dict.pop(prefix + name) for name in names}
                state_dict[f"{prefix}experts.{own}"] = self.form.read(own, tensors, self.local_experts)
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Inner:
    """Part of the name of a tensor in the state of a `RoutedMoE`, such as expert_3 in expert_3.wi.weight."""

    def __init__(self, layer: RoutedMoE, path: str):
        self.layer = layer
        self.path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, f"{self.path}.{name}")
