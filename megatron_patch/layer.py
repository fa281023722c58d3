"""`MegatronMoE`: the MoE layer that replaces the MLP of a Megatron-core transformer layer."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from fmoe import MoE, UserError
from fmoe.auxiliary import AuxLosses
from fmoe.build import Spec
from fmoe.errors import option_names
from fmoe.experts import taken_options
from fmoe.experts.call import ExpertCall
from fmoe.gates import GATES
from fmoe.layout import LocalTokens
from fmoe.moe import ONE_RANK
from fmoe.random import key
from fmoe.routing import Routing
from megatron_patch import patches
from megatron_patch.context import context_group
from megatron_patch.sharded import sharded_experts

# Names of losses in Megatron's aux-loss tracker, which its training loops log.
_TRACKED = {"balance": "load_balancing_loss", "z": "z_loss"}


class MegatronMoE(MoE):
    """`fmoe.MoE` with the constructor and the call of a Megatron-core MLP.

    Width, activation, bias, initializers and dtype come from ``config``. The tensor, expert and expert tensor parallel
    groups come from ``pg_collection`` or, without it, from Megatron's parallel_state. The layer sets
    ``config.num_moe_experts``: otherwise Megatron's schedule would not pass on the scale of auxiliary losses.

    Each tensor parallel rank sends one slice of the sequences to the experts. Under sequence parallelism, each rank
    holds only this slice. Otherwise, the layer takes the slice from the whole sequences. Under context parallelism,
    each rank sends the slice that it holds, which must be contiguous (`megatron_patch.context`). The gate routes the
    tokens of all slices together, as without parallelism.

    With an expert tensor parallel size above 1, the experts' hidden units are split over that group. With
    ``config.recompute_granularity="selective"``, the layer is recomputed if ``config.recompute_modules`` lists "mlp" or
    "moe".

    Args:
        config, submodules, layer_number, pg_collection, is_mtp_layer, name: arguments that Megatron-core passes.
        num_experts: number of experts over all ranks.
        d_hidden: hidden width of an expert. None for the config's ``moe_ffn_hidden_size`` or, if that is not set, its
            ``ffn_hidden_size``.
        seed: seed of the run. Seed and layer number determine the layer's weights and noise.
        layer_offset: number of layers in earlier stacks, such as a T5's encoder. It is added to the layer number.
        model_layers: number of layers over all stacks. None for the number in ``config``, including multi-token
            prediction.
        overlap_shared: on a GPU, compute the shared expert on a second stream, in parallel with the gate, the
            all-to-all and the routed experts. The result is the same.
        options: all other options of `fmoe.build.Spec`.

    Raises:
        UserError: the config's tensor or context parallel size differs from the group's; tensor and context parallelism
            are combined without sequence parallelism; ``gate`` is a module, which all layers would share; an option is
            invalid.
    """

    aux: "MegatronAux"

    def __init__(
        self,
        config: TransformerConfig,
        submodules=None,
        layer_number: int | None = None,
        pg_collection=None,
        is_mtp_layer: bool = False,
        name: str | None = None,
        *,
        num_experts: int,
        d_hidden: int | None = None,
        seed: int = 0,
        layer_offset: int = 0,
        model_layers: int | None = None,
        overlap_shared: bool = False,
        gate_options: Mapping[str, Any] | None = None,
        expert_options: Mapping[str, Any] | None = None,
        **options,
    ):
        patches.install()
        if isinstance(options.get("gate"), nn.Module):
            kind = type(options["gate"]).__name__
            raise UserError(f"gate is a module ({kind}), which all layers would share: pass its name or class")
        self._run_seed = seed
        self._layer_offset = layer_offset
        if layer_number is not None:
            layer_number += layer_offset
        tensor_group = _group(pg_collection, "tp", parallel_state.get_tensor_model_parallel_group)
        size = tensor_group.size() if tensor_group else 1
        if config.tensor_model_parallel_size != size:
            raise UserError(
                f"tensor_model_parallel_size={config.tensor_model_parallel_size} of the config differs from the size "
                f"{size} of the tensor parallel group: initialize Megatron's groups with the config's size"
            )
        slice_group, sequence_group = _token_groups(config, pg_collection, tensor_group)
        if _has_router(options.get("gate", "naive")):
            gate_options = {"init_method": config.init_method, **(gate_options or {})}
        expert = options.get("expert", "ffn")
        if isinstance(expert, str):
            of_model = {
                "activation": config.activation_func,
                "gated": config.gated_linear_unit,
                "bias": config.add_bias_linear,
                "init_method": config.init_method,
                "output_init_method": config.output_layer_init_method,
            }
            if expert != "ffn":
                options["shared_options"] = of_model
            expert_options = {**taken_options(expert, of_model), **(expert_options or {})}
        if d_hidden is None:
            d_hidden = config.moe_ffn_hidden_size or config.ffn_hidden_size
        spec = Spec(
            d_model=config.hidden_size,
            num_experts=num_experts,
            d_hidden=d_hidden,
            gate_options=gate_options,
            expert_options=dict(expert_options or {}),
            moe_group=_group(pg_collection, "ep", parallel_state.get_expert_model_parallel_group),
            slice_group=slice_group,
            sequence_group=sequence_group,
            expert_tensor_group=_group(pg_collection, "expt_tp", parallel_state.get_expert_tensor_parallel_group),
            loss_scale=megatron_loss_scale,
            sequence_first=True,
            seed=key("layer", seed, layer_number or 0),
            name=_name(layer_number),
            **options,
        )
        self.config = config
        self.spec = spec
        self.layer_number = layer_number
        num_layers = model_layers or config.num_layers + (config.mtp_num_layers or 0)
        super().__init__(**spec.arguments(aux=functools.partial(MegatronAux, config, layer_number, num_layers)))
        modules = config.recompute_modules if config.recompute_granularity == "selective" else ()
        # With "mlp", Megatron itself recomputes the module that replaces the MLP.
        self._recomputes = "moe" in (modules or ()) and "mlp" not in modules
        config.num_moe_experts = self.num_experts
        self._move()
        self._overlaps_shared = overlap_shared and self.shared is not None
        self._shared_output: tuple[Tensor, torch.cuda.Stream] | None = None

    def _move(self) -> None:
        """Move the layer to the model's device and dtype."""
        on_meta = any(parameter.is_meta for parameter in self.parameters())
        on_cpu = on_meta or self.config.use_cpu_initialization
        self.to(device=None if on_cpu else torch.cuda.current_device(), dtype=self.config.params_dtype)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the layer's number to ``layer_number`` plus the layer's ``layer_offset``.

        If this changes the number, all weights of the layer are initialized again.
        """
        layer_number += self._layer_offset
        if layer_number != self.layer_number:
            self.layer_number = self.aux.layer_number = layer_number
            self.name = self.aux.name = _name(layer_number)
            self.seed = key("layer", self._run_seed, layer_number)
            self.assemble(**self.spec.parts(self.exchange, self.seed))
            self._move()

    def forward(  # type: ignore[override]  # as Megatron-core calls its layers
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Map [s, b, h] to ([s, b, h], None): there is no bias to add.

        Args:
            intermediate_tensors: must be None; Megatron-core's MoELayer passes on parts of a CUDA graph in them.
            padding_mask: [b, s], True for padding, which is not routed.

        Raises:
            UserError: ``intermediate_tensors`` is not None; otherwise, see `fmoe.MoE.forward`.
        """
        if intermediate_tensors is not None:
            raise UserError("intermediate_tensors is not supported: the layer is computed as a whole, so pass None")
        mask = None if padding_mask is None else ~padding_mask.bool().transpose(0, 1)
        if self._recomputes and self.training:
            return tensor_parallel.checkpoint(super().forward, False, hidden_states, mask), None
        return super().forward(hidden_states, mask), None

    def call(self, tokens: LocalTokens) -> ExpertCall:
        if self._overlaps_shared and tokens.x_TD.is_cuda:
            stream = _second_stream(tokens.x_TD.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # autograd runs the backward pass on this stream too
                self._shared_output = self.shared(tokens.x_TD), stream
            tokens.x_TD.record_stream(stream)
        return super().call(tokens)

    def finish(self, outputs: list[Tensor], tokens: LocalTokens, weight_TK: Tensor) -> list[Tensor]:
        if self._shared_output is None:
            return super().finish(outputs, tokens, weight_TK)
        shared_TD, stream = self._shared_output
        self._shared_output = None
        torch.cuda.current_stream().wait_stream(stream)
        shared_TD.record_stream(torch.cuda.current_stream())
        return [outputs[0] + tokens.without_padding(shared_TD), *outputs[1:]]

    def _mark_experts(self) -> None:
        super()._mark_experts()
        experts = {id(parameter) for parameter in self.experts.parameters()}
        slice_group = self.layout.slice_group
        sequence_group = self.layout.sequence_group
        parameter: Any
        for parameter in self.parameters():
            if id(parameter) in experts:
                # Tensor parallel ranks hold different experts, or see different tokens. Without the mark, Megatron
                # takes the parameter for a duplicate, which it leaves out of the gradient norm.
                parameter.tensor_model_parallel = True
            elif slice_group is not None or sequence_group is not None:
                parameter.sequence_parallel = sequence_group is not None
                setattr(parameter, patches.PARTIAL, sequence_group is None)
        bias = getattr(self.experts, "bias_out", None)
        group = self.spec.expert_tensor_group
        if bias is not None and group is not None:
            bias.shared = group.rank() > 0  # equal on all ranks: Megatron then counts it once

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Return the state as Megatron's sharded tensors, in which each expert has its global id.

        The experts' hidden units are split over expert tensor parallel ranks. Gate and shared expert are replicated.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        replicated = {
            name: value
            for name, value in self.state_dict(keep_vars=True).items()
            if not name.startswith("experts.") and name != ONE_RANK and isinstance(value, Tensor)
        }
        sharded = make_sharded_tensors_for_checkpoint(
            replicated,
            prefix,
            {},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        return sharded | sharded_experts(
            self.experts, self.exchange, self.spec.expert_tensor_group, f"{prefix}experts.", sharded_offsets
        )

    def _process_groups(self) -> list[dist.ProcessGroup | None]:
        return [*super()._process_groups(), self.spec.moe_group, self.spec.expert_tensor_group]


class MegatronAux(AuxLosses):
    """`AuxLosses` that also records the losses in Megatron's tracker, which its training loops log.

    Args:
        config: config of the model.
        layer_number: number of the layer, from 1.
        num_layers: number of layers in the model.
        arguments: arguments of `AuxLosses`.
    """

    def __init__(self, config: TransformerConfig, layer_number: int | None, num_layers: int, *args, **arguments):
        super().__init__(*args, **arguments)
        self.config = config
        self.layer_number = layer_number
        self.num_layers = num_layers

    def attach(self, routing: Routing, share: float | Tensor, training: bool) -> Tensor:
        if self.config.calculate_per_token_loss and routing.stats is not None:
            # The training loss is then a sum over tokens. finalize_model_grads divides it by their number.
            share = share * routing.stats.tokens
        return super().attach(routing, share, training)

    def record(self, routing: Routing, observer: Callable[[Routing], None] | None = None) -> None:
        super().record(routing, observer)
        for name, loss in routing.losses.items():
            save_to_aux_losses_tracker(
                _TRACKED.get(name, name),
                loss,
                self.layer_number,
                self.num_layers,
                avg_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            )


def drop_tracked_losses() -> None:
    """Empty Megatron's aux-loss tracker, whose size is the model's number of layers. Call it before building another
    model."""
    if hasattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"):
        moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER.clear()
    else:  # from megatron-core 0.18 on
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream of ``device`` for shared experts, the same for all layers."""
    return torch.cuda.Stream(device)


def _group(collection, name: str, default: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup | None:
    """Return the group ``name`` of the collection, or else ``default()``; None if the group has one rank."""
    group = getattr(collection, name, None)
    group = default() if group is None else group
    return None if group.size() == 1 else group


def _token_groups(
    config: TransformerConfig, collection: Any, tensor_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the options ``slice_group`` and ``sequence_group`` of `Spec`."""
    # slice_group: ranks with the same tokens. sequence_group: ranks with successive slices of the sequences.
    context = context_group(config, collection)
    if context is None:
        return (None, tensor_group) if config.sequence_parallel else (tensor_group, None)
    if tensor_group is None:
        return None, context
    if not config.sequence_parallel:
        raise UserError(
            f"context_parallel_size={config.context_parallel_size} with tensor_model_parallel_size="
            f"{config.tensor_model_parallel_size} needs sequence_parallel=True"
        )
    return None, _group(collection, "tp_cp", parallel_state.get_tensor_and_context_parallel_group)


def _has_router(gate: Any) -> bool:
    """Return whether ``gate`` is the name of a gate that takes a function to initialize its weights."""
    cls = GATES.get(gate) if isinstance(gate, str) else None
    return isinstance(cls, type) and "init_method" in (option_names(cls) or ())


def megatron_loss_scale() -> float | Tensor:
    """Return the factor of auxiliary losses that the schedule set for this micro batch; 1 if it set none."""
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    return 1.0 if scale is None else scale


def _name(layer_number: int | None) -> str:
    return "FMoE" if layer_number is None else f"FMoE of layer {layer_number}"
