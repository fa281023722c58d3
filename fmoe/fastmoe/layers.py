"""FastMoE's layer `FMoE`, derived from `fmoe.MoE`; ``fmoe.layers`` is this module.

Shape letters: T tokens of this rank, D model width, E experts, K experts per token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fmoe import random
from fmoe.build import Spec
from fmoe.errors import UserError
from fmoe.experts.call import ExpertCall, is_unchanged
from fmoe.experts.factories import Factory
from fmoe.experts.modules import ModuleExperts
from fmoe.fastmoe import spelling
from fmoe.fastmoe.functions import MOEGather, MOEScatter, ensure_comm, prepare_forward
from fmoe.fastmoe.spelling import mark_module_parallel_comm
from fmoe.gates import Gate
from fmoe.gates.external import checked, takes_groups
from fmoe.gates.router import Router, routes_by_logits
from fmoe.layout import Layout, LocalTokens, zero_padding
from fmoe.moe import MoE
from fmoe.routing import Routing
from fmoe.runtime.adapters import adapted
from fmoe.shards import slice_bounds, take_slice


@dataclass(eq=False)
class NestedTokens(LocalTokens):
    """`LocalTokens` of an input that is a pytree of tensors.

    Attributes:
        nest: pytree structure of the input.
        filled: FastMoE's integer ``mask`` of these tokens; None without a mask.
    """

    nest: pytree.TreeSpec = field(kw_only=True)
    filled: Tensor | None = None


class NestedLayout(Layout):
    """`Layout` of inputs that are pytrees of tensors, of equal shape except for the last dimension."""

    def split(
        self,
        x: Any,
        mask: Tensor | None,
        token_ids: Tensor | None,
        seed: int,
        by_logits: bool = False,
        *,
        filled: Tensor | None = None,
        is_fastmoe: bool = False,
    ) -> NestedTokens:
        """Return this rank's part of a pytree of tensors, as `Layout.split` does for a tensor.

        Args:
            filled: FastMoE's integer mask of the tokens. If ``mask`` is None, only tokens with ``filled == 0`` are
                routed.
            is_fastmoe: whether the gate sees only this rank's slice of the tokens of ``slice_group``, as in FastMoE.
        """
        leaves, nest = pytree.tree_flatten(x)
        leading = leaves[0].shape[:-1]
        if filled is not None:
            filled = filled.to(leaves[0].device).view(leading)
            mask = filled == 0 if mask is None else mask
        if is_fastmoe and self.slice_group is not None:
            tokens = self._own_slice(self.slice_group, leaves[0], mask, token_ids, seed)
        else:
            tokens = super().split(leaves[0], mask, token_ids, seed, by_logits)
        others = leaves[1:]
        for leaf in others:
            if leaf.shape[: len(leading)] != leading:
                raise UserError(
                    f"a tensor of the input has shape {tuple(leaf.shape)}; its first dimensions must be "
                    f"{tuple(leading)}, as in the first tensor"
                )
        if self.slice_group is not None:
            others, filled = take_slice((others, filled), self.slice_group)
        num_tokens = tokens.x_TD.shape[0]
        inputs = [tokens.x_TD, *(leaf.reshape(num_tokens, *leaf.shape[len(leading) :]) for leaf in others)]
        return NestedTokens(**vars(tokens) | {"inputs": inputs}, nest=nest, filled=filled)

    def _own_slice(
        self, group: dist.ProcessGroup, x: Tensor, mask: Tensor | None, token_ids: Tensor | None, seed: int
    ) -> LocalTokens:
        begin, end = slice_bounds(x.shape[0], group.rank(), group.size())
        part, mask, token_ids = take_slice((x, mask, token_ids), group)
        x_TD, groups = self.tokens(part, mask, token_ids, seed)
        before = 0 if self.sequence_first else begin * x.shape[1:-1].numel()  # tokens on earlier ranks
        groups.first_group = (before + random.first_token()) // groups.size
        share = (end - begin) / x.shape[0] if x.shape[0] else 1.0
        return LocalTokens([x_TD], x_TD, groups, x.shape[:-1], share, slice_group=self.slice_group)


class NestedCall(ExpertCall):
    """`ExpertCall` for rows that are pytrees of tensors; it calls `FMoE.expert_fn`.

    Args:
        layer: layer whose ``expert_fn`` and experts are called.
        tokens: tokens of this forward pass.

    Attributes:
        nest: pytree structure of the outputs, set by each call.
    """

    def __init__(self, layer: "FMoE", tokens: NestedTokens):
        self._has_own_expert_fn = not is_unchanged(layer, "expert_fn", FMoE.expert_fn)  # which takes no dropout keys
        self._expert_fn = layer.expert_fn
        self._inputs = tokens.nest
        self.nest = tokens.nest
        super().__init__(layer.experts, layer.name, tokens.x_TD, layer.training)
        self.needs_keys = self.needs_keys and not self._has_own_expert_fn

    def compute(self, rows: list[Tensor], counts_L: Tensor, parameters: list[list[Tensor]] | None) -> list[Tensor]:
        keys = [rows[-1].squeeze(1)] if self.needs_keys else []
        inputs = pytree.tree_unflatten(rows[:-1] if keys else rows, self._inputs)
        if parameters is None:
            run = self.module if keys else self._expert_fn
            return self._flat(run(inputs, counts_L, *keys))
        if self._has_own_expert_fn:
            raise UserError(
                f"exchange_options.shadow is not supported for {self.name}, which overrides expert_fn: use shadow=0"
            )
        return self._flat(self.module.run_with(parameters, inputs, counts_L, *keys))

    def is_plain(self) -> bool:
        return not self._has_own_expert_fn and self._inputs.is_leaf() and super().is_plain()

    def _flat(self, out: Any) -> list[Tensor]:
        leaves, self.nest = pytree.tree_flatten(out)
        return leaves


def _of(part: str, name: str) -> property:
    """Return a property of a layer that reads and writes ``layer.<part>.<name>``."""

    def get(layer):
        return getattr(getattr(layer, part), name)

    def set_(layer, value):
        setattr(getattr(layer, part), name, value)

    return property(get, set_)


class FMoE(MoE):
    """A Mixture-of-Experts layer that replaces a feed-forward block (FastMoE, arXiv 2103.13262).

    The output is the sum of ``weight * expert(x)`` over the K experts that the gate chooses. With ``moe_group``, the
    experts are split over its ranks, and the output equals that of one rank with all experts. There are two signatures:

    ``FMoE(d_model=512, num_experts=64, top_k=2, gate="switch", expert="swiglu", moe_group=None)``
        The options of `fmoe.MoE.build` (`fmoe.build.Spec`). ``num_experts`` counts the experts of all ranks. By
        default, the backward pass adds the auxiliary losses.
    ``FMoE(num_expert=32, d_model=1024, world_size=1, ..., gate=NaiveGate, expert=None, ...)``
        FastMoE's arguments, with the meaning they have there (`fmoe.fastmoe.spelling`). ``num_expert`` counts the
        experts of a rank. Add ``gate.get_loss()`` to the training loss yourself.

    Args:
        num_expert, world_size, mp_group, gate_bias: FastMoE's signature only (`fmoe.fastmoe.spelling.translate`).
        gate_hook: FastMoE's signature only; called with expert ids [T, K], weights [T, K] and None.
        mask: FastMoE's signature only; one integer per token. Only tokens with 0 are sent to experts. Ignored without
            ``mask_dict``.
        mask_dict: FastMoE's signature only; maps integers to tensors. A token whose ``mask`` is k gets the output
            ``mask_dict[k]``, times the sum of the token's gate weights.
        d_model, slice_group, moe_group, top_k, gate, expert, num_experts, options: see `fmoe.build.Spec`.

    Raises:
        UserError: an argument is invalid.
    """

    _expert_dp_comm: str | None = None
    # Plain attributes, which subclasses may set.
    num_experts: int = 0
    num_local_experts: int = 0
    first_expert: int = 0

    layout: NestedLayout

    def __init__(
        self,
        num_expert: int | None = None,
        d_model: int | None = None,
        world_size: int | None = None,
        mp_group: dist.ProcessGroup | None = None,
        slice_group: dist.ProcessGroup | None = None,
        moe_group: dist.ProcessGroup | None = None,
        top_k: int | None = None,
        gate: str | type[nn.Module] | Gate | None = None,
        expert: str | Factory | Sequence[Any] | None = None,
        gate_hook: Callable | None = None,
        mask: Tensor | None = None,
        mask_dict: Mapping[int, Tensor] | None = None,
        gate_bias: bool | None = None,
        *,
        num_experts: int | None = None,
        **options: Any,
    ):
        is_fastmoe = num_experts is None
        if is_fastmoe:
            options |= spelling.translate(
                num_expert, d_model, world_size, mp_group, slice_group, moe_group, top_k, gate, expert, gate_bias
            )
        else:
            foreign: dict[str, Any] = {"num_expert": num_expert, "world_size": world_size, "mp_group": mp_group}
            foreign |= {"gate_hook": gate_hook, "mask": mask, "mask_dict": mask_dict, "gate_bias": gate_bias}
            for key, value in foreign.items():
                if value is not None:
                    raise UserError(
                        f"{key} is an argument of FastMoE's signature (num_expert=): with num_experts=, omit {key}"
                    )
            options |= {"d_model": d_model, "num_experts": num_experts, "top_k": top_k, "gate": gate}
            expert = "ffn" if expert is None else expert
            options |= {"slice_group": slice_group, "moe_group": moe_group, "expert": expert}
        spec = Spec.of({"name": "FMoE"} | options)
        super().__init__(**spec.arguments(layout=NestedLayout))
        self.spec = spec
        self.is_fastmoe = is_fastmoe
        self.gate_hook = gate_hook
        self.mask = mask
        self.mask_dict = mask_dict
        self.d_model = spec.d_model
        self.d_hidden = spec.d_hidden
        self.moe_group = spec.moe_group
        self.expert_tensor_group = spec.expert_tensor_group
        self.top_k = getattr(self.gate, "top_k", top_k)
        self.num_experts = self.exchange.num_experts
        self.world_size = self.exchange.ep_size
        self.num_expert = self.num_local_experts = self.exchange.num_local_experts
        self.first_expert = self.exchange.ep_rank * self.num_expert

    slice_group = _of("layout", "slice_group")
    sequence_group = _of("layout", "sequence_group")
    group_size = _of("layout", "group_size")
    sequence_first = _of("layout", "sequence_first")
    loss_weights = _of("aux", "weights")
    loss_scale = _of("aux", "loss_scale")

    @property
    def aux_loss(self) -> str:
        """Treatment of the auxiliary losses, "auto" or "manual", as in `fmoe.build.Spec`."""
        return "manual" if self.aux.is_manual else "auto"

    @aux_loss.setter
    def aux_loss(self, value: str) -> None:
        self.aux.is_manual = value == "manual"

    @classmethod
    def build(cls, **options: Any) -> "FMoE":
        """Build the layer from options of `fmoe.build.Spec`."""
        return cls(**options)

    @property
    def slice_size(self) -> int:
        """Number of ranks that hold the same tokens."""
        return 1 if self.slice_group is None else self.slice_group.size()

    @property
    def slice_rank(self) -> int:
        """This rank's index among the ranks that hold the same tokens."""
        return 0 if self.slice_group is None else self.slice_group.rank()

    def expert_fn(self, inp: Any, fwd_expert_count: Tensor) -> Any:
        """Return the experts' outputs for the rows ``inp``, sorted by expert; a subclass may override this method."""
        if type(self.experts) is nn.ModuleList:  # set by a subclass; FastMoE calls its items, not the list
            forward: Callable[..., Any] = ModuleExperts.forward
            return forward(self.experts, inp, fwd_expert_count)
        return self.experts(inp, fwd_expert_count)

    def mark_parallel_comm(self, expert_dp_comm: str = "none") -> None:
        """Set the parameters' attribute ``dp_comm``: "gate" for the gate, ``expert_dp_comm`` for the experts.

        ``dp_comm`` names the group over which `DistributedGroupedDataParallel` averages gradients.
        """
        mark_module_parallel_comm(self.experts, expert_dp_comm)
        mark_module_parallel_comm(self.gate, "gate")
        self._expert_dp_comm = expert_dp_comm

    def forward(self, x: Any, mask: Tensor | None = None, *, token_ids: Tensor | None = None) -> Any:
        """Route tokens and combine the outputs of their experts, as `MoE.forward` does.

        Args:
            x: as in `MoE.forward`, or a pytree of tensors of equal shape except for the last dimension. Experts get the
                whole pytree, and gates the first tensor. In a layer built with FastMoE's signature, a gate whose
                ``forward`` has one required argument gets the whole pytree, too.

        Returns:
            A tensor of the shape of ``x``; for pytrees, a pytree with the structure of the experts' outputs.
        """
        return super().forward(x, mask, token_ids=token_ids)

    def split(self, x: Any, mask: Tensor | None, token_ids: Tensor | None) -> NestedTokens:
        x = x if mask is None else pytree.tree_map(lambda leaf: zero_padding(leaf, mask), x)
        filled = None if self.mask_dict is None else self.mask
        by_logits = routes_by_logits(self.gate)
        tokens = self.layout.split(x, mask, token_ids, self.seed, by_logits, filled=filled, is_fastmoe=self.is_fastmoe)
        if self.world_size > 1:  # for FastMoE's functions, which the gate may call
            ensure_comm(tokens.x_TD, self.moe_group)
        return tokens

    def route(self, tokens: Any) -> Routing:
        if isinstance(adapted(self.gate), Router) or not self.is_fastmoe or takes_groups(self.gate):
            routing = super().route(tokens)
        else:  # FastMoE's gates get the whole input
            result = self.gate(pytree.tree_unflatten(tokens.inputs, tokens.nest))
            routing = checked(self.gate, result, tokens.groups, self.num_experts, name=self.name, check=self.check)
        if self.gate_hook is not None:
            self.gate_hook(routing.expert_TK, routing.weight_TK, None)
        return routing

    def call(self, tokens: Any) -> NestedCall:
        return NestedCall(self, tokens)

    def finish(self, outputs: list[Tensor], tokens: Any, weight_TK: Tensor) -> list[Tensor]:
        outputs = super().finish(outputs, tokens, weight_TK)
        if tokens.filled is None or self.mask_dict is None:
            return outputs
        return [_fill_masked(y_TD, tokens.filled, self.mask_dict, weight_TK) for y_TD in outputs]

    def result(self, outputs: list[Tensor], expert_call: Any) -> Any:
        return pytree.tree_unflatten(outputs, expert_call.nest)

    def facts(self, x: Any) -> dict[str, object]:
        first = next((leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)), None)
        return {**super().facts(first), "d_hidden": self.d_hidden, "top_k": self.top_k}

    def _mark_experts(self) -> None:
        super()._mark_experts()
        if self._expert_dp_comm is not None:  # copies and new parameters lack the tags
            spelling.tag_missing(self.experts.parameters(), self._expert_dp_comm)
            spelling.tag_missing(self.gate.parameters(), "gate")

    def _process_groups(self) -> list[dist.ProcessGroup | None]:
        return [*super()._process_groups(), self.moe_group, self.expert_tensor_group]


def _fill_masked(y_TD: Tensor, mask: Tensor, mask_dict: Mapping[int, Tensor], weight_TK: Tensor) -> Tensor:
    """Set the outputs of tokens with mask k to ``mask_dict[k]`` times the sum of their gate weights."""
    mask_T = mask.reshape(-1).to(y_TD.device)
    for key, value in mask_dict.items():
        value = torch.as_tensor(value, dtype=torch.promote_types(y_TD.dtype, torch.float32), device=y_TD.device)
        filled_TD = weight_TK.sum(-1, keepdim=True).to(y_TD.dtype) * value
        y_TD = torch.where((mask_T == key).unsqueeze(-1), filled_TD.to(y_TD.dtype), y_TD)
    return y_TD


def _fmoe_general_global_forward(
    inp: Any,
    gate: Tensor,
    expert_fn: Callable[[Any, Tensor], Any],
    num_expert: int,
    world_size: int,
    experts: Any = None,
) -> Any:
    """Send tokens to their experts, call ``expert_fn(rows, counts)``, and send the outputs back, unweighted.

    Args:
        inp: [T, D], or a pytree of such tensors.
        gate: int64 [T] or [T, K], expert ids of each token; -1 for no expert.
        experts: ignored, as in FastMoE, where only FasterMoE's schedule uses them.

    Returns:
        [T * K, D] for each tensor that ``expert_fn`` returns; zero for choices of -1.
    """
    pos, sent, received, counts_L, num_rows = prepare_forward(gate, num_expert, world_size)
    top_k = gate.shape[1] if gate.dim() == 2 else 1
    token = torch.div(pos, top_k, rounding_mode="floor")
    rows = pytree.tree_map(lambda x: MOEScatter.apply(x, token, sent, received, num_rows, world_size), inp)
    outputs = expert_fn(rows, counts_L)
    return pytree.tree_map(lambda y: MOEGather.apply(y, pos, sent, received, gate.numel(), world_size), outputs)


__all__ = ["FMoE", "_fmoe_general_global_forward", "mark_module_parallel_comm"]
