"""Build the parts of an MoE layer from names and options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe import random
from fmoe.auxiliary import AuxLosses
from fmoe.errors import UserError, known_names, wrong_type
from fmoe.exchange import Exchange, build_exchange
from fmoe.experts import SharedExpert, build_experts
from fmoe.experts.factories import Factory
from fmoe.gates import GATES, Gate, build_gate
from fmoe.layout import Layout
from fmoe.losses import DEFAULT_LOSS_WEIGHTS
from fmoe.runtime import collectives

_UNSET: Any = None  # default of required options, and of options that `Spec.__post_init__` computes


@dataclass(kw_only=True)
class Spec:
    """Options of an MoE layer (`fmoe.MoE.build`).

    With ``slice_group`` or ``sequence_group``, the gate routes the tokens of all ranks of the group together, so that
    routing groups (`fmoe.routing.RoutingGroups`) stay whole. The gradients of the gate and of the shared expert are
    then partial sums. So are the gradients of experts that several of these ranks hold. Sum them over the ranks.

    Attributes:
        d_model: D, the width of tokens.
        num_experts: E, the number of experts on all ranks together; each rank of ``moe_group`` holds an equal part.
        d_hidden: hidden width of an expert; None for ``4 * d_model``.
        top_k: K, experts per token; None for the gate's own default.
        gate: a name in `fmoe.gates.GATES`, a class, a function or a ready instance; None for "naive".
        gate_options: keywords for a gate given by name or class, e.g. ``{"capacity_factor": 1.0}``.
        expert: a name in `fmoe.experts.EXPERTS`; a module class or function, called as `fmoe.register_expert`
            describes; or a sequence of one module, class or function per expert. None if a subclass of `fmoe.MoE`
            assigns the experts. A class or function that has a default for ``d_hidden`` gets it only if the layer's
            ``d_hidden`` or ``granularity`` is set.
        expert_options: keywords for the named expert, class or function, e.g. ``{"bias": False}``.
        shared_expert: an expert that processes every token, in parallel with the routed ones: a module, or the hidden
            width of an FFN; None for no shared expert.
        shared_options: options of that FFN (`fmoe.experts.FFNExperts`); None for ``expert_options``. The FFN is ungated
            with GELU by default, even with ``expert="swiglu"``.
        shared_gate: multiply the shared expert's output by ``sigmoid(w . x)``, with a trained w (Qwen2-MoE).
        granularity: m splits every expert into m experts of hidden width ``d_hidden / m`` (DeepSeekMoE, arXiv
            2401.06066). Each token then gets ``m * K`` of ``m * E`` experts.
        moe_group: expert parallel group, over which the experts are spread; None if this rank holds all.
        exchange: name in `fmoe.exchange.EXCHANGES` of the algorithm that sends tokens between the ranks of
            ``moe_group`` (docs/parallelism.md compares them). Their results are equal up to rounding.
        exchange_options: keywords of that exchange, e.g. ``{"chunks": 2, "wire_dtype": torch.bfloat16}``.
        slice_group: tensor parallel group, whose ranks hold the same tokens. Each rank processes one slice of them; the
            output on every rank has all tokens.
        sequence_group: sequence parallel group, whose ranks hold equal parts of the same sequences. The parts follow
            each other along the first dimension of the input.
        expert_tensor_group: ranks over which the hidden units of every expert are spread (only ffn, swiglu and geglu).
        aux_loss: "auto" adds the losses to the backward pass; for "manual", add `fmoe.collect_losses` to your loss.
        loss_weights: factor of each auxiliary loss by name; missing names keep their defaults
            (`fmoe.losses.DEFAULT_LOSS_WEIGHTS`); 0 turns a loss off.
        loss_scale: function that returns the factor by which the backward pass multiplies the auxiliary losses; None
            for the value of `fmoe.set_loss_scale`.
        group_size: tokens per routing group (`fmoe.routing.RoutingGroups`); None for one group per sequence.
        sequence_first: 3-D inputs are [S, B, D] instead of [B, S, D].
        backend: backend of `fmoe.experts.FFNExperts`: "native", "cuda", "te", "sonicmoe", "torch", or "auto" for the
            fastest available. With "sonicmoe", a shared FFN uses "auto".
        check: raise if a combine weight is not finite or an expert id is invalid; synchronizes with a GPU.
        name: the layer's name in errors and warnings.
        seed: seed of the layer's weights and noise, equal on all ranks. For None, the first rank of ``moe_group`` draws
            a seed from torch's default generator, and sends it to the other ranks of that group.

    Raises:
        UserError: an option is invalid; the message has its name, value and limit. Options of a part (gate, experts,
            exchange) are checked when `arguments` builds it.
    """

    d_model: int = _UNSET
    num_experts: int = _UNSET
    d_hidden: int = _UNSET
    top_k: int | None = None
    gate: str | type[nn.Module] | Gate | None = None
    gate_options: Mapping[str, Any] | None = None
    expert: str | Factory | Sequence[Any] | None = "ffn"
    expert_options: dict[str, Any] = _UNSET
    shared_expert: nn.Module | int | None = None
    shared_options: Mapping[str, Any] | None = None
    shared_gate: bool = False
    granularity: int = 1
    moe_group: dist.ProcessGroup | None = None
    exchange: str = "all_to_all"
    exchange_options: Mapping[str, Any] | None = None
    slice_group: dist.ProcessGroup | None = None
    sequence_group: dist.ProcessGroup | None = None
    expert_tensor_group: dist.ProcessGroup | None = None
    aux_loss: str = "auto"
    loss_weights: Mapping[str, float] | None = None
    loss_scale: Callable[[], float | Tensor] | None = None
    group_size: int | None = None
    sequence_first: bool = False
    backend: str = "auto"
    check: bool = False
    name: str = "MoE"
    seed: int | None = None

    def __post_init__(self) -> None:
        for key in ("d_model", "num_experts"):
            if getattr(self, key) is None:
                raise UserError(f"{key} is missing: every layer needs it")
        for key in ("d_model", "num_experts", "group_size", "granularity", "d_hidden"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"{key}={value!r} is not a positive whole number")
        for field in fields(self):
            value = getattr(self, field.name)
            wrong = None if value is field.default else wrong_type(field.type, value)
            if wrong:
                raise UserError(f"{field.name}={value!r} is not {wrong}")
            if field.name.endswith("_group") and value is not None and not hasattr(value, "size"):
                raise UserError(f"{field.name}={value!r} is not a process group")
        shared = self.shared_expert
        if not isinstance(shared, nn.Module | None) and (type(shared) is not int or shared < 1):
            raise UserError(f"shared_expert={shared!r} is neither a module nor a positive whole number")
        if self.aux_loss not in ("auto", "manual"):
            raise UserError(f"aux_loss={self.aux_loss!r} must be 'auto' or 'manual'")
        self.is_default_width = self.d_hidden is None and self.granularity == 1
        self.d_hidden = 4 * self.d_model if self.d_hidden is None else self.d_hidden
        if self.d_hidden % self.granularity:
            raise UserError(f"granularity={self.granularity} does not divide d_hidden={self.d_hidden}")
        if self.slice_group is not None and self.sequence_group is not None:
            raise UserError(
                "slice_group and sequence_group are mutually exclusive: pass slice_group if the ranks hold the same "
                "tokens, sequence_group if they hold parts of the sequences"
            )
        for key, value in (self.exchange_options or {}).items():
            if self.expert_tensor_group is not None and key in ("max_rows", "shadow"):
                raise UserError(
                    f"exchange_options.{key}={value!r} is not supported with expert_tensor_group: omit "
                    f"exchange_options.{key}"
                )
        gate = GATES.get(self.gate or "naive") if isinstance(self.gate, str | None) else self.gate
        unknown = (self.loss_weights or {}).keys() - DEFAULT_LOSS_WEIGHTS.keys()
        if unknown and getattr(gate, "__module__", "").startswith("fmoe."):  # a gate of yours may have other losses
            names = ", ".join(DEFAULT_LOSS_WEIGHTS)
            raise UserError(f"loss_weights has the unknown loss {sorted(unknown)[0]!r}; the known losses are {names}")
        if self.granularity > 1:
            if self.top_k is not None and not 1 <= self.top_k <= self.num_experts:
                raise UserError(f"top_k={self.top_k} is not between 1 and num_experts={self.num_experts}")
            default = getattr(gate, "default_top_k", None)
            top_k = self.top_k or (default and min(default, self.num_experts))
            self.top_k = top_k and top_k * self.granularity
        self.num_experts = self.num_experts * self.granularity
        self.d_hidden = self.d_hidden // self.granularity
        self.expert_options = dict(self.expert_options or {})

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Spec":
        """Return these options as a `Spec`.

        Raises:
            UserError: an unknown or invalid option.
        """
        names = [field.name for field in fields(cls)]
        for key in options:
            if key not in names:
                raise UserError(f"unknown option {key}={options[key]!r} of a layer; {known_names(key, names)}")
        return cls(**options)

    def arguments(
        self, *, layout: Callable[..., Layout] = Layout, aux: Callable[..., AuxLosses] = AuxLosses
    ) -> dict[str, Any]:
        """Build the parts of the layer, and return the keyword arguments of `fmoe.MoE`. If ``seed`` is None, draw one.

        Args:
            layout, aux: classes or functions to call instead of `fmoe.layout.Layout` and `fmoe.auxiliary.AuxLosses`.

        Raises:
            UserError: an option of the gate, the experts or the exchange is invalid.
        """
        exchange = build_exchange(self.moe_group, self.num_experts, self.exchange, self.exchange_options)
        if self.seed is None:
            self.seed = _draw_seed(exchange)
        is_manual = self.aux_loss == "manual"
        return {
            **self.parts(exchange, self.seed),
            "exchange": exchange,
            "layout": layout(self.d_model, self.group_size, self.sequence_first, self.slice_group, self.sequence_group),
            "aux": aux(self.num_experts, self.loss_weights, is_manual=is_manual, scale=self.loss_scale, name=self.name),
            "name": self.name,
            "seed": self.seed,
            "check": self.check,
        }

    def parts(self, exchange: Exchange, seed: int) -> dict[str, Any]:
        """Build the gate ("gate"), this rank's experts ("experts") and the shared expert ("shared").

        The weights depend on the seed, but not on the number of ranks.
        """
        first = exchange.ep_rank * exchange.num_local_experts
        count = exchange.num_local_experts
        with random.keyed("gate", seed):
            gate = build_gate(
                self.gate or "naive", self.d_model, self.num_experts, self.top_k, **dict(self.gate_options or {})
            )
        if hasattr(gate, "set_ep_rank"):
            gate.set_ep_rank(exchange.ep_rank, exchange.ep_size)
        experts = shared = None
        if self.expert is not None:
            experts = build_experts(
                self.expert,
                self.num_experts,
                slice(first, first + count),
                self.d_model,
                self.d_hidden,
                seed,
                self.expert_options,
                self.expert_tensor_group,
                self.backend,
                is_default_width=self.is_default_width,
            )
        if self.shared_expert is not None:
            options = self.expert_options if self.shared_options is None else self.shared_options
            # SonicMoE takes a multiple of 4 experts.
            options = {**options, "backend": "auto" if self.backend == "sonicmoe" else self.backend}
            with random.keyed("shared expert", seed):
                shared = SharedExpert(self.d_model, self.shared_expert, gated_output=self.shared_gate, options=options)
        return {"gate": gate, "experts": experts, "shared": shared}


def _draw_seed(exchange: Exchange) -> int:
    seed = torch.randint(1 << 62, (1,), device="cpu", dtype=torch.int64)
    group = exchange.group
    if group is not None:
        on_host = any(device.type == "cpu" for device in group._device_types)
        seed = seed if on_host else seed.cuda()
        collectives.run(dist.broadcast, seed, src=dist.get_global_rank(group, 0), group=group)
    return int(seed)
