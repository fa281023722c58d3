"""The Mixture-of-Experts layer: layout -> gate -> losses -> exchange (dispatch, experts, combine) -> shared expert.

Shape letters: T tokens of this rank, D model width, E experts, K experts per token, R rows (token vectors) that this
rank's L experts get.
"""

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe import random
from fmoe.auxiliary import AuxLosses
from fmoe.build import Spec
from fmoe.errors import UserError
from fmoe.exchange import Exchange
from fmoe.experts import initial
from fmoe.experts.call import ExpertCall
from fmoe.gates import external
from fmoe.gates.router import Router, routes_by_logits
from fmoe.kernels import gates as gate_kernels
from fmoe.layout import Layout, LocalTokens, zero_padding
from fmoe.metrics import LayerMetrics
from fmoe.routing import Routing
from fmoe.runtime import ownership
from fmoe.runtime.adapters import adapted

ONE_RANK = "one_rank.experts._extra_state"  # end of a key in the state of a layer


class HeldExperts(nn.Module):
    """Extra state of a layer whose experts are spread over ranks: the experts that this rank holds.

    Keys of experts are the same on all ranks. This entry keeps a rank from loading the experts of another one.
    """

    def __init__(self, first_expert: int, num_experts: int):
        super().__init__()
        self.first_expert = first_expert
        self.num_experts = num_experts

    def get_extra_state(self) -> Tensor:
        """Return a float32 tensor [first_expert + num_experts]: 1 for the experts of this rank, else 0."""
        # Its size differs between ranks. torch.distributed.checkpoint saves the entry of one rank; on the others, it
        # raises because of the size, before it overwrites any weight.
        ids = torch.arange(self.first_expert + self.num_experts, device="cpu", dtype=torch.int64)
        return (ids >= self.first_expert).float()

    def _load_from_state_dict(self, *args: Any) -> None:
        """Leave missing keys unreported: older states lack the entry. `MoE` has checked it."""


class MoE(nn.Module):
    """Mixture-of-Experts layer: ``y = sum over the K chosen experts of weight * expert(x)``, plus ``shared(x)``.

    `MoE.build` makes a layer from names and options.

    Args:
        gate: chooses experts, ``gate(x_TD, groups) -> Routing`` (`fmoe.gates`).
        experts: the experts of this rank, ``experts(rows_RD, counts_L) -> [R, D]`` (`fmoe.experts`); None if a subclass
            assigns ``self.experts`` after the constructor.
        exchange: moves rows to the ranks that own their experts, and back (`fmoe.exchange`).
        layout: extracts this rank's tokens from the input, and restores the input's shape (`fmoe.layout`).
        aux: adds auxiliary losses to the backward pass and counts routing statistics (`fmoe.auxiliary`).
        shared: an expert that processes every token; None for no shared expert.
        name: the layer's name in errors and warnings.
        seed: seed of the layer's weights and noise (`fmoe.random`).
        check: raise if a combine weight is not finite or an expert id is invalid; synchronizes with a GPU.
    """

    # Any, because the type nn.Module lacks the methods that are called.
    gate: Any
    experts: Any
    shared: Any
    _recorder: Callable[[Routing], None] | None = None  # set in replicas (`_replicate_for_data_parallel`)

    def __init__(
        self,
        gate: Any,
        experts: nn.Module | None,
        exchange: Exchange,
        layout: Layout,
        aux: AuxLosses,
        *,
        shared: nn.Module | None = None,
        name: str = "MoE",
        seed: int = 0,
        check: bool = False,
    ):
        super().__init__()
        self.exchange = exchange
        self.layout = layout
        self.aux = aux
        self.name = name
        self.seed = seed
        self.check = check
        self.assemble(gate, experts, shared)
        if exchange.ep_size > 1:
            first = exchange.ep_rank * exchange.num_local_experts
            # The key contains ".experts.", like all keys whose values differ between these ranks.
            self.one_rank = nn.ModuleDict({"experts": HeldExperts(first, exchange.num_local_experts)})
        ownership.enrol(self)

    @classmethod
    def build(cls, **options: Any) -> Self:
        """Build a layer from options, which `fmoe.build.Spec` documents."""
        return cls(**Spec.of(options).arguments())

    def assemble(self, gate: Any, experts: nn.Module | None, shared: nn.Module | None) -> None:
        """Set the parts that have parameters; ``experts=None`` leaves the experts as they are."""
        self.gate = gate
        if experts is not None:
            self.experts = experts
        self.shared = shared  # keep this order: saved optimizer states number parameters by it

    def forward(self, x: Any, mask: Tensor | None = None, *, token_ids: Tensor | None = None) -> Any:
        """Route every token and combine the outputs of its experts.

        Args:
            x: [T, D], [..., S, D], or [S, B, D] with ``sequence_first``, for B sequences of S tokens.
            mask: bool, the shape of ``x`` without D; False marks padding, which is not routed and has zero output. With
                ``sequence_group``, pass ``mask`` and ``token_ids`` on all of its ranks or on none.
            token_ids: int64, the shape of ``mask``, for gates that route by token id.

        Returns:
            A tensor of the shape of ``x``.

        Raises:
            UserError: an argument has an invalid shape or dtype, the gate returned an invalid routing, or settings
                differ between ranks.
            PeerError: another rank failed, is gone or does not respond. The message names the rank, and its error if
                known.
        """
        gate = self.gate if isinstance(self.gate, Router) else adapted(self.gate)
        runs_collectives = getattr(gate, "runs_collectives", False)
        with self.exchange.session(self.name, self.facts, self.experts, x, runs_collectives) as session:
            tokens = self.split(x, mask, token_ids)
            expert_call = self.call(tokens)
            routing = tokens.local_routing(self.route(tokens))
            weight_TK = self.aux.attach(routing, tokens.loss_share, self.training)
            outputs = session.run(routing, weight_TK, tokens.rows(expert_call.needs_keys), expert_call)
            outputs = tokens.join(self.finish(outputs, tokens, weight_TK))
            record = self._recorder or getattr(gate, "record", None)
            outputs = self.aux.count(routing, weight_TK, outputs, self.training, record)
        return self.result(outputs, expert_call)

    def split(self, x: Any, mask: Tensor | None, token_ids: Tensor | None) -> LocalTokens:
        """Return this rank's tokens, and the input of its gate. Padding is replaced by zeros."""
        x = x if mask is None else zero_padding(x, mask)
        return self.layout.split(x, mask, token_ids, self.seed, routes_by_logits(self.gate))

    def route(self, tokens: LocalTokens) -> Routing:
        """Return the gate's decision about ``tokens.gate_input_TD``, which kernels may compute instead of the gate.

        A gate of another kind than `Router` may take only the tokens, and return FastMoE's ``(index, score)``.
        """
        gate = self.gate
        x_TD = tokens.gate_input_TD
        groups = tokens.groups
        is_router = isinstance(adapted(gate), Router)
        routing = gate_kernels.route(gate, tokens)
        if routing is None:
            routing = gate(x_TD, groups) if is_router or external.takes_groups(gate) else gate(x_TD)
        if is_router and not self.check:
            return routing
        return external.checked(gate, routing, groups, self.num_experts, name=self.name, check=self.check)

    def call(self, tokens: LocalTokens) -> ExpertCall:
        """Return the `fmoe.experts.call.ExpertCall` that runs the experts in this forward pass."""
        return ExpertCall(self.experts, self.name, tokens.x_TD, self.training)

    def finish(self, outputs: list[Tensor], tokens: LocalTokens, weight_TK: Tensor) -> list[Tensor]:
        """Return the combined outputs [T, ...], with the shared expert's output added to the first of them."""
        if self.shared is None:
            return outputs
        return [outputs[0] + tokens.without_padding(self.shared(tokens.x_TD)), *outputs[1:]]

    def result(self, outputs: list[Tensor], expert_call: ExpertCall) -> Any:
        """Return the layer's output. ``outputs`` are the tensors of `finish`, in the shape of the layer's input."""
        return outputs[0]

    def facts(self, x: Any) -> dict[str, object]:
        """Return the settings that must be equal on all expert-parallel ranks; the first forward pass checks them."""
        gate = adapted(self.gate)
        experts = adapted(self.experts)
        return {
            "name": self.name,
            "d_model": self.layout.d_model,
            "d_hidden": getattr(experts, "d_hidden", None),
            "num_experts": self.num_experts,
            "top_k": getattr(gate, "top_k", None),
            "gate": type(gate).__name__,
            "experts": getattr(experts, "kind", type(experts).__name__),
            "dtype of parameters": getattr(next(self.parameters(), None), "dtype", None),
            "dtype of the input": getattr(x, "dtype", None),
            "width of the input": x.shape[-1] if isinstance(x, Tensor) and x.dim() else None,
            "group_size": self.layout.group_size,
            "aux_loss": "manual" if self.aux.is_manual else "auto",
            "loss_weights": sorted(self.aux.weights.items()),
            "seed": self.seed,
        }

    @property
    def num_experts(self) -> int:
        """E, the number of experts on all ranks together."""
        return self.exchange.num_experts

    @property
    def num_local_experts(self) -> int:
        """Number of experts of this rank."""
        return self.exchange.num_local_experts

    @property
    def first_expert(self) -> int:
        """Global id of this rank's first expert."""
        return self.exchange.ep_rank * self.exchange.num_local_experts

    @property
    def metrics(self) -> LayerMetrics:
        """Routing statistics since they were last reset (`fmoe.metrics`)."""
        return self.aux.metrics

    @metrics.setter
    def metrics(self, metrics: LayerMetrics) -> None:
        self.aux.metrics = metrics

    def collect_losses(self) -> Tensor | None:
        """Return the sum of the layer's weighted auxiliary losses since the last call, for ``aux_loss="manual"``.

        Return None if there are none.
        """
        return self.aux.collect()

    def reset_parameters(self) -> None:
        """Draw all parameters again from the layer's seed, for models that were built on the meta device.

        A gate or experts without a method ``reset_parameters`` need it in their submodules. Parameters that no such
        method draws are left unchanged.
        """
        for part, *key in ((self.gate, "gate"), (self.experts, "experts", self.first_expert)):
            with random.keyed(*key, self.seed):
                initial.reset(part)
        if self.shared is not None:
            with random.keyed("shared expert", self.seed):
                self.shared.reset_parameters()
        self._mark_experts()

    def _mark_experts(self) -> None:
        # Megatron's mark for parameters that are not replicated: gradients are averaged only over the ranks that hold
        # the same experts. It is set on a single rank too, so that the same code runs at every expert parallel size.
        for parameter in self.experts.parameters() if "experts" in self._modules else ():
            parameter.allreduce = False

    def _mark_parameters(self) -> None:
        """Set the attribute ``allreduce`` of the experts' parameters again, in case other tensors replaced them."""
        experts = self._modules.get("experts")
        if experts is None:
            return
        if getattr(experts, "_is_fsdp_managed_module", False):
            from torch.distributed.fsdp import FSDPModule

            if not any(isinstance(module, FSDPModule) for module in experts.modules()):
                return  # torch's fully_shard made replicas: without the mark, `refuse_replicating_wrapper` detects that
        self._mark_experts()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "experts":
            self._mark_experts()
        elif name == "gate" and self._recorder is None:
            self.aux.observer = getattr(adapted(value), "record", None)
        elif name == "name":
            self.aux.name = value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # `to_empty`, for one, makes new parameters without the mark
        self._mark_experts()
        return self

    def _replicate_for_data_parallel(self) -> Self:
        # nn.DataParallel discards its replicas after the forward pass. The gate of this layer records for all of them.
        replica = super()._replicate_for_data_parallel()
        record = getattr(adapted(self.gate), "record", None)
        if record is not None:
            tensor = next(itertools.chain(self.gate.parameters(), self.gate.buffers(), self.parameters()), None)
            replica._recorder = functools.partial(_record_on, None if tensor is None else tensor.device, record)
        return replica

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        held = state_dict.get(f"{prefix}{ONE_RANK}")
        if held is not None:
            theirs = held.nonzero().flatten().tolist()
            ours = list(range(self.first_expert, self.first_expert + self.num_local_experts))
            if theirs != ours:
                raise UserError(
                    f"{prefix}experts: the state has the experts {theirs[0]} to {theirs[-1]} of another rank, but this "
                    f"rank holds {ours[0]} to {ours[-1]}: save and load fmoe.parallel.state_dict"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        ownership.enrol(self)
        self._mark_experts()

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__setstate__(self.__getstate__())
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        if any(group is not None for group in self._process_groups()):
            raise UserError(
                f"{self.name} has process groups, which cannot be pickled: save model.state_dict() instead, and load "
                "it into a layer that is built on every rank"
            )
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Process groups cannot be copied, and copies of parameters have lost their mark.
        memo |= {id(group): group for group in self._process_groups() if group is not None}
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def _process_groups(self) -> list[dist.ProcessGroup | None]:
        experts = adapted(self._modules.get("experts"))
        gate = adapted(self.gate)
        of_parts = [getattr(experts, "group", None), getattr(gate, "balance_group", None)]
        return [self.layout.slice_group, self.layout.sequence_group, self.exchange.group, *of_parts]

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, ep_size={self.exchange.ep_size}, first_expert={self.first_expert}"


def _record_on(device: torch.device | None, record: Callable[[Routing], None], routing: Routing) -> None:
    """Call ``record`` with the routing of a replica, after a copy of its statistics to ``device``."""
    if device is not None and routing.stats is not None:
        routing = replace(routing, stats=routing.stats.to(device))
    record(routing)
