"""The Mixture-of-Experts layer: gate -> exchange (plan, dispatch, experts, combine), and nothing else.

Shape letters: T tokens on this rank, D model width, E experts in all, L experts on this rank, K experts a token,
M assignments kept, R rows that this rank's experts get.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _StopRecomputationError

from fmoe import collectives, ownership, random, recording
from fmoe.auxiliary import AuxiliaryLosses
from fmoe.compat import fastmoe
from fmoe.dispatch import build_exchange
from fmoe.errors import UserError
from fmoe.experts import Runner, SharedExpert, build_experts
from fmoe.gates import Gate, build_gate
from fmoe.gates.adapt import route
from fmoe.losses import DEFAULT_LOSS_WEIGHTS
from fmoe.metrics import LayerMetrics
from fmoe.parallel.guard import refuse_replicating_wrapper
from fmoe.parallel.slicing import gather_slices, take_part
from fmoe.routing import tokens_of


class FMoE(AuxiliaryLosses, fastmoe.FastMoEMembers, nn.Module):
    """A Mixture-of-Experts layer in the place of a feed-forward block (FastMoE, arXiv 2103.13262).

    ``y = sum over the K experts that the gate picks of weight * expert(x)``. With ``moe_group`` the experts are spread
    over its workers; the result is that of one worker holding all of them. There are two spellings:

    ``FMoE(d_model=512, num_experts=64, top_k=2, gate="switch", expert="swiglu", moe_group=None)``
        experts counted in all; auxiliary losses are applied by default.
    ``FMoE(num_expert=32, d_model=1024, world_size=1, ..., gate=NaiveGate, expert=None, ...)``
        FastMoE's, with its meaning (`fmoe.compat.fastmoe`): experts counted a worker, its users add
        ``gate.get_loss()`` themselves.

    Args:
        num_expert, world_size, mp_group, gate_hook, mask, mask_dict, gate_bias: FastMoE's spelling alone.
        d_model: D, the width of tokens.
        num_experts: E, in all; every worker holds ``E / workers`` of them.
        d_hidden: hidden width of an expert; None for ``4 * d_model``.
        top_k: K; None for the gate's own default.
        gate: a name of `fmoe.gates.GATES`, a class, a function or a ready instance; default "naive".
        gate_options: keywords for a gate given by name or class, e.g. ``{"capacity_factor": 1.0}``.
        expert: a name of `fmoe.experts.EXPERTS`, a module class or factory (called with ``d_model`` for each expert),
            or a sequence of those or of modules, one for each of the E; default "ffn".
        expert_options: keywords for experts given by name, e.g. ``{"activation": "relu", "bias": False}``.
        shared_expert: a module, or the hidden width of one, that every token meets beside the routed experts.
        shared_gate: weighs the shared expert by a sigmoid of the token (Qwen2-MoE) instead of by one.
        granularity: m splits every expert into m of ``d_hidden / m`` and picks ``m * K`` of them (DeepSeekMoE, arXiv
            2401.06066).
        moe_group: process group over which the experts are spread; None for one worker.
        exchange: how rows travel between the workers of ``moe_group``, a name of `fmoe.dispatch.EXCHANGES`
            (docs/parallelism.md tells which pays when); nothing of it changes what is computed.
        exchange_options: keywords of that exchange, e.g. ``{"chunks": 2, "wire_dtype": torch.bfloat16}``.
        slice_group: tensor parallel group whose ranks hold the same tokens: each computes its part of them.
        sequence_group: sequence parallel group whose ranks hold parts of the same sequences, equal ones along the first
            dimension of the input. With either the gate decides over the tokens of the whole group, so that routing
            groups are not cut; gradients of gate and shared expert are parts, to be summed over the group.
        expert_tensor_group: ranks that the hidden units of every expert are spread over, for ffn, swiglu and geglu.
        aux_loss: "auto" adds the losses to the backward pass; "manual" leaves that to `collect_losses`.
        loss_weights: factor of each auxiliary loss by name; what is left out keeps its default
            (`fmoe.losses.DEFAULT_LOSS_WEIGHTS`); 0 turns one off.
        loss_scale: gives the factor between auxiliary losses and the backward pass; None for `fmoe.set_loss_scale`.
        group_size: tokens of a routing group (`fmoe.routing.RoutingGroups`); None for one sequence.
        sequence_first: 3-D inputs are [S, B, D] instead of [B, S, D].
        backend: of experts given by name: "native" for the C++ operations of the CPU (docs/native.md), "cuda" for the
            kernels of GPUs (docs/cuda.md), "torch", or "auto", native or cuda where it can be.
        check: look for NaN in what the gate decides (a host sync on a GPU).
        name: how errors and warnings call the layer.
        seed: key of this layer's weights and noise; None draws one from torch's default generator, on the first worker
            of ``moe_group`` for all of them.

    Attributes:
        metrics: routing statistics since they were last reset (`fmoe.metrics`).

    Raises:
        UserError: an argument that cannot be, with its name, value and limit.
    """

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
        expert: str | Callable[..., nn.Module] | Sequence[Any] | None = None,
        gate_hook: Callable | None = None,
        mask: Tensor | None = None,
        mask_dict: Mapping[int, Tensor] | None = None,
        gate_bias: bool = True,
        *,
        num_experts: int | None = None,
        d_hidden: int | None = None,
        gate_options: Mapping[str, Any] | None = None,
        expert_options: Mapping[str, Any] | None = None,
        shared_expert: nn.Module | int | None = None,
        shared_gate: bool = False,
        granularity: int = 1,
        exchange: str = "all_to_all",
        exchange_options: Mapping[str, Any] | None = None,
        aux_loss: str = "auto",
        loss_weights: Mapping[str, float] | None = None,
        loss_scale: Callable[[], float | Tensor] | None = None,
        group_size: int | None = None,
        sequence_first: bool = False,
        backend: str = "auto",
        check: bool = False,
        name: str = "FMoE",
        seed: int | None = None,
        sequence_group: dist.ProcessGroup | None = None,
        expert_tensor_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        self.is_fastmoe = num_experts is None
        if self.is_fastmoe:
            spelled = fastmoe.translate(
                num_expert, d_model, world_size, mp_group, slice_group, moe_group, top_k, gate, expert, gate_bias
            )
            num_experts, d_model, top_k, gate = spelled.num_experts, spelled.d_model, spelled.top_k, spelled.gate
            expert, moe_group, slice_group, aux_loss = spelled.expert, spelled.moe_group, spelled.slice_group, "manual"
        else:
            foreign = {"num_expert": num_expert, "mp_group": mp_group, "gate_hook": gate_hook, "mask": mask}
            for key, value in {**foreign, "mask_dict": mask_dict, "world_size": world_size}.items():
                if value is not None:
                    raise UserError(f"{key} belongs to FastMoE's spelling (num_expert=), not beside num_experts=")
        if d_model is None:
            raise UserError("d_model is missing")
        for key, value in {
            "d_model": d_model,
            "num_experts": num_experts,
            "group_size": group_size,
            "granularity": granularity,
            "d_hidden": d_hidden,
        }.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"{key}={value} is not a positive whole number")
        if aux_loss not in ("auto", "manual"):
            raise UserError(f"aux_loss={aux_loss!r} is neither 'auto' nor 'manual'")
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        if d_hidden % granularity:
            raise UserError(f"granularity={granularity} does not divide d_hidden={d_hidden}")
        self.d_model, self.d_hidden = d_model, d_hidden // granularity
        self.num_experts = num_experts * granularity
        if slice_group is not None and sequence_group is not None:
            raise UserError(
                "slice_group is for ranks with the same tokens, sequence_group for those with parts: not both"
            )
        if expert_tensor_group is not None and {"max_rows", "shadow"} & (exchange_options or {}).keys():
            raise UserError("exchange_options: max_rows and shadow are not for experts over an expert_tensor_group")
        self.moe_group, self.slice_group, self.sequence_group = moe_group, slice_group, sequence_group
        self.expert_tensor_group = expert_tensor_group
        self.aux_loss, self.loss_scale = aux_loss, loss_scale
        self.group_size, self.sequence_first = group_size, sequence_first
        self.check, self.name = check, name
        self.gate_hook, self.mask, self.mask_dict = gate_hook, mask, mask_dict
        self.exchange = build_exchange(moe_group, self.num_experts, exchange, exchange_options)
        self._introduced = self.exchange.num_workers == 1
        self.world_size = self.exchange.num_workers
        self.num_local_experts = self.num_expert = self.num_experts // self.world_size
        self.first_expert = moe_group.rank() * self.num_local_experts if self.world_size > 1 else 0
        self.seed = self._draw_seed() if seed is None else seed
        self._build_arguments = (
            gate,
            top_k and top_k * granularity,
            dict(gate_options or {}),
            backend,
            expert,
            dict(expert_options or {}),
        )
        self._shared_arguments = (shared_expert, shared_gate, {**(expert_options or {}), "backend": backend})
        self.build()
        self.top_k = getattr(self.gate, "top_k", top_k)
        unknown = (loss_weights or {}).keys() - DEFAULT_LOSS_WEIGHTS.keys()
        if unknown and isinstance(gate, str | None):
            raise UserError(f"loss_weights has {sorted(unknown)[0]!r}; known are {', '.join(DEFAULT_LOSS_WEIGHTS)}")
        self.loss_weights = {**DEFAULT_LOSS_WEIGHTS, **(loss_weights or {})}
        self.metrics = LayerMetrics(self.num_experts, tuple(self.loss_weights))
        self._pending: list[Tensor] = []
        self._warned = self._has_offered = False
        self._number = recording.enrol(self)
        ownership.enrol(self)

    def _draw_seed(self) -> int:
        seed = torch.randint(1 << 62, (1,), device="cpu", dtype=torch.int64)
        if self.world_size > 1:
            on_host = any(device.type == "cpu" for device in self.moe_group._device_types)
            seed = seed if on_host else seed.cuda()
            source = dist.get_global_rank(self.moe_group, 0)
            collectives.run(dist.broadcast, seed, src=source, group=self.moe_group)
        return int(seed)

    def build(self) -> None:
        """Makes gate, experts and shared expert under the layer's seed, which draws the same weights at every split."""
        gate, top_k, gate_options, backend, expert, expert_options = self._build_arguments
        with random.keyed("gate", self.seed):
            self.gate = build_gate(gate or "naive", self.d_model, self.num_experts, top_k, **gate_options)
        if hasattr(self.gate, "set_worker"):
            self.gate.set_worker(self.first_expert // self.num_local_experts, self.world_size)
        if expert is not None or not self.is_fastmoe:  # FastMoE's subclasses set self.experts themselves
            self.experts = build_experts(
                "ffn" if expert is None else expert,
                self.num_experts,
                slice(self.first_expert, self.first_expert + self.num_local_experts),
                self.d_model,
                self.d_hidden,
                self.seed,
                expert_options,
                self.expert_tensor_group,
                backend,
            )
        shared, is_gated, options = self._shared_arguments
        self.shared = None
        if shared is not None:
            with random.keyed("shared expert", self.seed):
                self.shared = SharedExpert(self.d_model, shared, gated_output=is_gated, options=options)

    def reset_parameters(self) -> None:
        """Draws every weight anew, the same ones (they are keyed): for models built on the meta device."""
        with random.keyed("gate", self.seed):
            for part in (self.gate, self.experts):
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
        if self.shared is not None:
            with random.keyed("shared expert", self.seed):
                self.shared.reset_parameters()
        self._mark_experts()

    def _mark_experts(self) -> None:
        # Megatron's word for "not replicated like the rest": gradients are averaged over the ranks that hold the same
        # experts alone. It is set at one worker too, so that the same code runs at every split.
        for parameter in self.experts.parameters() if "experts" in self._modules else ():
            parameter.allreduce = False
        self._tag_again()

    def _mark_parameters(self) -> None:
        """Mark the parameters again, because other tensors may have replaced them (`fmoe.ownership`)."""
        experts = self._modules.get("experts")
        if experts is None:
            return
        if getattr(experts, "_is_fsdp_managed_module", False):
            from torch.distributed.fsdp import FSDPModule

            if not any(isinstance(module, FSDPModule) for module in experts.modules()):
                return  # torch's fully_shard took them for dense ones: `refuse_replicating_wrapper` sees it by the mark
        self._mark_experts()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)  # may make new parameters, without the mark: to_empty
        self._mark_experts()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": []}  # losses that wait belong to the graph of the original

    def __setstate__(self, state):
        super().__setstate__(state)
        self._number = recording.enrol(self)
        ownership.enrol(self)
        self._mark_experts()

    def __deepcopy__(self, memo):
        # Process groups cannot be copied, and copies of parameters have lost their mark.
        groups = (self.moe_group, self.slice_group, self.sequence_group, self.expert_tensor_group)
        memo |= {id(group): group for group in groups if group is not None}
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def forward(self, x: Any, mask: Tensor | None = None, *, token_ids: Tensor | None = None) -> Any:
        """Routes every token and mixes its experts' outputs.

        Args:
            x: [T, D], [..., S, D], or [S, B, D] with ``sequence_first``; or a nest of tensors that agree in all but
                their last dimension, of which the first is what the gate sees and the experts get all.
            mask: bool, the shape of ``x`` without D; False marks padding, which is not routed and comes out as zero.
            token_ids: the shape of ``mask``, for gates that route by them.

        Returns:
            The shape of ``x``; of each tensor that the experts return, for nests.

        Raises:
            UserError: shape or dtype of ``x`` or ``mask`` is wrong, the gate decided what cannot be.
            PeerError: another worker failed, is gone or stands still; its rank and message are named.
        """
        self.exchange.begin(self.name)
        if not self._introduced:
            self._introduce(x)
        try:
            if self.world_size > 1:
                refuse_replicating_wrapper(self)
            leaves, nest = pytree.tree_flatten(x)
            leading = leaves[0].shape[:-1]
            filled = None
            if self.mask is not None and self.mask_dict is not None:
                filled = self.mask.to(leaves[0].device).view(leading)
                mask = filled == 0 if mask is None else mask
            part = take_part(self, leaves, mask, token_ids, filled)
            filled, sliced = part.filled, part.leaves[0].shape[:-1]
            seen_TD, groups = tokens_of(
                part.seen,
                self.d_model,
                group_size=self.group_size,
                sequence_first=self.sequence_first,
                mask=part.mask,
                token_ids=part.token_ids,
                layer_seed=self.seed,
                before=0 if self.sequence_first else part.before,
                parts=part.parts if part.gathers_scores else None,
            )
            # What the gate sees is one view with what the experts get: its gradients are then added up in place.
            leaves = [seen_TD if leaf is part.seen else _rows_of(leaf, sliced) for leaf in part.leaves]
            x_TD = leaves[0]
            self._check_dtype(x_TD)
            fastmoe.name_group(self, x_TD)
            routing = part.own_routing(route(self, pytree.tree_unflatten(leaves, nest), seen_TD, groups))
        except Exception as error:
            if getattr(self.gate, "exchanges", False):  # the others wait inside the gate, not at the counts
                self.exchange.fail(error)
            else:
                self.exchange.abort(error, self._device(x))
            raise
        has_keys = self.training and getattr(self.experts, "wants_row_keys", False)
        if has_keys:
            leaves.append(part.own(groups.token_keys("expert dropout", x_TD.device)).unsqueeze(1))
        runner = Runner(self, nest, has_keys)
        transfer = self.exchange.open(routing, self._depth(leaves))
        try:
            weight_TK = self._attach_losses(routing, part.share)
            outputs = transfer.run(leaves, weight_TK, runner)
            self.exchange.follow(outputs)
            if self.shared is not None:
                shared_TD = self.shared(x_TD)
                if groups.mask_T is not None:
                    shared_TD = shared_TD.masked_fill(~part.own(groups.mask_T).unsqueeze(1), 0)
                outputs[0] = outputs[0] + shared_TD
        except _StopRecomputationError:  # no failure: a checkpoint has all that it wants of this pass
            raise
        except Exception as error:
            self.exchange.fail(error)
            raise
        if filled is not None:
            outputs = [fastmoe.fill_masked(out, filled, self.mask_dict, weight_TK) for out in outputs]
        if self.slice_group is not None:
            outputs = [
                gather_slices(out.view(*sliced, *out.shape[1:]), leading[0], self.slice_group) for out in outputs
            ]
        outputs = self._count(routing, weight_TK, outputs)
        outputs = [out.reshape(*leading, *out.shape[-1:]) for out in outputs]
        return pytree.tree_unflatten(outputs, runner.nest)

    def _introduce(self, x: Any) -> None:
        """Before anything else is exchanged: do all workers of ``moe_group`` have the same in mind?"""
        first = next((leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)), None)
        fields = {
            "name": self.name,
            "d_model": self.d_model,
            "d_hidden": self.d_hidden,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "gate": type(self.gate).__name__,
            "experts": getattr(self.experts, "kind", type(self.experts).__name__),
            "dtype of parameters": getattr(next(self.parameters(), None), "dtype", None),
            "dtype of the input": getattr(first, "dtype", None),
            "width of the input": None if first is None or not first.dim() else first.shape[-1],
            "granularity of routing groups": self.group_size,
            "aux_loss": self.aux_loss,
            "loss_weights": sorted(self.loss_weights.items()),
            "seed": self.seed,
        }
        with self.exchange.traffic.paused():
            self.exchange.prepare(fields, self.experts, self.d_model, self._device(x))
        self._introduced = True

    def _depth(self, leaves: list[Tensor]) -> int:
        """How far the backward pass goes (`fmoe.dispatch.Exchange.open`)."""
        if not torch.is_grad_enabled():
            return 0
        if any(leaf.requires_grad for leaf in leaves):
            return 2
        return int(any(p.requires_grad for p in self.experts.parameters()))

    def _check_dtype(self, x_TD: Tensor) -> None:
        if getattr(self.experts, "_is_fsdp_managed_module", False):
            return  # its mixed precision policy casts weights and rows when the experts are called
        dtype = getattr(self.experts, "dtype", x_TD.dtype)
        if x_TD.dtype != dtype and not torch.is_autocast_enabled(x_TD.device.type):
            raise UserError(
                f"the input of {self.name} is {x_TD.dtype}, its experts are {dtype}: cast one, or use autocast"
            )

    def _device(self, x: Any) -> torch.device:
        parameter = next(self.parameters(), None)
        if parameter is not None:
            return parameter.device
        return next((leaf.device for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)), torch.device("cpu"))

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, workers={self.world_size}, first_expert={self.first_expert}"


def _rows_of(leaf: Tensor, leading: torch.Size) -> Tensor:
    if leaf.shape[: len(leading)] != leading:
        raise UserError(f"a tensor of the input has shape {tuple(leaf.shape)}; it must begin with {tuple(leading)}")
    return leaf.reshape(leading.numel(), *leaf.shape[len(leading) :])
