"""FMoE where a Megatron-core transformer layer has its MLP."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from fmoe import FMoE, UserError
from fmoe.random import key
from fmoe.routing import Routing

# Our names of losses in Megatron's aux-loss tracker, which its training loops log.
_TRACKED = {"balance": "load_balancing_loss", "z": "z_loss"}


class MegatronFMoE(FMoE):
    """`FMoE` with the constructor and the call of the module in the MLP's place (megatron-core 0.16).

    Width, activation, bias, initialisers and dtype come from ``config``; the expert parallel group from
    ``pg_collection`` or parallel_state. It sets ``config.num_moe_experts``, because the schedule hands the scale of
    auxiliary losses only to models that have it.

    Args:
        config, submodules, layer_number, pg_collection, is_mtp_layer, name: what Megatron-core passes.
        num_experts: in all.
        d_hidden: hidden width of an expert; None for the config's ``moe_ffn_hidden_size``, else ``ffn_hidden_size``.
        seed: of the run; with the layer number, the key of the layer's weights and noise.
        layer_offset: added to the layer number: for the second stack of a model (a T5's decoder) the first's layers.
        model_layers: layers of all stacks; None for those of ``config``.
        options: all other arguments of `fmoe.FMoE`.

    Raises:
        UserError: tensor parallelism, which this layer does not run under yet; a ready gate, which layers would share.
    """

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
        gate_options: Mapping[str, Any] | None = None,
        expert_options: Mapping[str, Any] | None = None,
        **options,
    ):
        if config.tensor_model_parallel_size > 1:
            raise UserError(
                f"tensor_model_parallel_size={config.tensor_model_parallel_size}: FMoE layers run at 1 in this version"
            )
        if isinstance(options.get("gate"), nn.Module):
            raise UserError("gate is one module for all layers: give its name or class, and gate_options")
        self._run_seed, self._layer_offset, self._model_layers = seed, layer_offset, model_layers
        if layer_number is not None:
            layer_number += layer_offset
        groups = pg_collection if hasattr(pg_collection, "ep") else None
        if isinstance(options.get("gate", "naive"), str):
            gate_options = {"init_method": config.init_method, **(gate_options or {})}
        if isinstance(options.get("expert", "ffn"), str):
            expert_options = {
                "activation": config.activation_func,
                "gated": config.gated_linear_unit,
                "bias": config.add_bias_linear,
                "init_method": config.init_method,
                "output_init_method": config.output_layer_init_method,
                **(expert_options or {}),
            }
        if d_hidden is None:
            d_hidden = config.moe_ffn_hidden_size or config.ffn_hidden_size
        super().__init__(
            d_model=config.hidden_size,
            num_experts=num_experts,
            d_hidden=d_hidden,
            gate_options=gate_options,
            expert_options=expert_options,
            moe_group=groups.ep if groups else parallel_state.get_expert_model_parallel_group(),
            loss_scale=_megatron_loss_scale,
            sequence_first=True,
            seed=key("layer", seed, layer_number or 0),
            name=_name(layer_number),
            **options,
        )
        self.config = config
        self.layer_number = layer_number
        config.num_moe_experts = self.num_experts
        self._place()

    def _place(self) -> None:
        """On the device and in the dtype of the model around it."""
        on_meta = any(parameter.is_meta for parameter in self.parameters())
        on_cpu = on_meta or self.config.use_cpu_initialization
        self.to(device=None if on_cpu else torch.cuda.current_device(), dtype=self.config.params_dtype)

    def set_layer_number(self, layer_number: int) -> None:
        """Called by Megatron-core once the layer knows its place; gate and experts are made anew under it."""
        layer_number += self._layer_offset
        if layer_number != self.layer_number:
            self.layer_number, self.name = layer_number, _name(layer_number)
            self.seed = key("layer", self._run_seed, layer_number)
            self.build()
            self._place()

    def forward(
        self, hidden_states: Tensor, intermediate_tensors=None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """[s, b, h] -> ([s, b, h], no bias). ``padding_mask`` is [b, s], True for padding, which is not routed."""
        mask = None if padding_mask is None else ~padding_mask.bool().transpose(0, 1)
        return super().forward(hidden_states, mask), None

    def total_loss(self, routing: Routing) -> Tensor | None:
        total = super().total_loss(routing)
        if total is not None and self.config.calculate_per_token_loss and routing.stats is not None:
            # The training loss is then a sum over tokens, which finalize_model_grads divides by their number.
            total = total * routing.stats.tokens
        return total

    def record(self, routing: Routing) -> None:
        super().record(routing)
        num_layers = self._model_layers or self.config.num_layers + (self.config.mtp_num_layers or 0)
        for name, loss in routing.losses.items():
            save_to_aux_losses_tracker(
                _TRACKED.get(name, name),
                loss,
                self.layer_number,
                num_layers,
                avg_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Experts sharded over the expert parallel group along their global id, the gate replicated."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        gate = {f"gate.{name}": value for name, value in self.gate.state_dict(keep_vars=True).items()}
        sharded = make_sharded_tensors_for_checkpoint(
            gate,
            prefix,
            {},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        axis = len(sharded_offsets)
        for name, value in self.experts.state_dict(keep_vars=True).items():
            full_name = f"{prefix}experts.{name}"
            sharded[full_name] = ShardedTensor.from_rank_offsets(
                full_name,
                value,
                *sharded_offsets,
                (axis, self.first_expert // self.num_local_experts, self.world_size),
                replica_id=(0, 0, parallel_state.get_expert_data_parallel_rank()),
                prepend_axis_num=axis,
            )
        return sharded


def _megatron_loss_scale() -> float | Tensor:
    """What the schedule set for this micro batch: loss scale / micro batches."""
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    return 1.0 if scale is None else scale


def _name(layer_number: int | None) -> str:
    return "FMoE" if layer_number is None else f"FMoE of layer {layer_number}"
