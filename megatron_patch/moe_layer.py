"""Conversion of Megatron-core's MoELayer to `MegatronMoE`: of a state dict, or of a whole model in place.

Shape letters: E experts, L experts of this rank, D model width, H hidden width, P = H, or 2 H with a gated linear unit.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from fmoe import UserError
from fmoe.convert import NOT_DRAWN
from megatron_patch.layer import MegatronMoE
from megatron_patch.models import checked_stacks

_ROUTER = "router.weight"
# Parameters and buffers of Megatron's router, and their names in FMoE.
_OF_ROUTER = {"weight": "gate.weight", "bias": "gate.bias", "expert_bias": "gate.expert_bias_E"}
_OF_LINEAR = {"linear_fc1": "in", "linear_fc2": "out"}

# Config fields that FMoE supports only for some values: name, test of the value, reason.
LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("moe_expert_capacity_factor", lambda v: v is None, "FMoE may drop other tokens than Megatron-core"),
    ("moe_expert_rank_capacity_factor", lambda v: v is None, "FMoE may drop other tokens than Megatron-core"),
    ("moe_router_score_function", lambda v: v in ("softmax", "sigmoid"), "it must be softmax or sigmoid"),
    ("moe_router_num_groups", lambda v: v is None, "FMoE ranks groups of experts differently"),
    ("moe_input_jitter_eps", lambda v: v is None, "FMoE draws noise differently"),
    ("moe_apply_probs_on_input", lambda v: not v, "FMoE multiplies outputs by the probabilities"),
    ("moe_latent_size", lambda v: v is None, "FMoE's experts have the model's width"),
    ("moe_router_force_load_balancing", lambda v: not v, "it is for benchmarks only"),
    ("moe_router_force_biased", lambda v: v is None, "it is for benchmarks only"),
    (
        "moe_router_load_balancing_type",
        lambda v: v in ("none", "aux_loss", "seq_aux_loss"),
        "it must be none, aux_loss or seq_aux_loss",
    ),
    ("use_te_activation_func", lambda v: not v, "FMoE's experts use torch's activations"),
    ("activation_func_clamp_value", lambda v: v is None, "FMoE's experts do not clamp activations"),
    ("glu_linear_offset", lambda v: not v, "FMoE's gated experts have no offset"),
    ("moe_mlp_glu_interleave_size", lambda v: v is None, "FMoE's gated experts do not interleave their halves"),
    ("moe_shared_expert_glu_interleave_size", lambda v: v is None, "FMoE's shared experts do not interleave halves"),
)


def fmoe_state_dict(state: Mapping[str, Tensor], *, num_local_experts: int | None = None) -> dict[str, Tensor]:
    """Convert the state dict of a Megatron-core model or MoE layer to the names and shapes of `MegatronMoE`.

    The experts may come from SequentialMLP (``experts.local_experts.N.linear_fc1.weight``), GroupedMLP
    (``experts.weight1``) or TEGroupedMLP (``experts.linear_fc1.weightN``). Entries outside MoE layers are unchanged. In
    MoE layers, Transformer Engine's ``_extra_state`` is dropped.

    Args:
        state: state dict of one rank or of a whole model. Expert tensor parallelism is not supported, because it splits
            the matrices of an expert.
        num_local_experts: number of experts in each layer of ``state``; None for as many as the router has.

    Returns:
        A new dict, which shares unchanged tensors with ``state``.

    Raises:
        UserError: a tensor of an expert is missing; ``weight1`` or ``weight2`` of a GroupedMLP has the wrong size; a
            name inside an MoE layer is unknown.
    """
    prefixes = [key.removesuffix(_ROUTER) for key in state if key == _ROUTER or key.endswith(f".{_ROUTER}")]
    found: dict[str, Any] = {}
    of_layer: dict[str, dict[str, Any]] = {prefix: {} for prefix in prefixes}
    for key, value in state.items():
        prefix = next((p for p in prefixes if key.startswith(p)), None)
        if prefix is None:
            found[key] = value
        else:
            of_layer[prefix][key.removeprefix(prefix)] = value
    for prefix, layer in of_layer.items():
        try:
            found |= {f"{prefix}{name}": value for name, value in _layer_state(layer, num_local_experts).items()}
        except UserError as error:
            raise UserError(f"{prefix.rstrip('.') or 'the layer'}: {error}") from error
    return found


def _layer_state(state: Mapping[str, Tensor], num_local_experts: int | None) -> dict[str, Tensor]:
    left = {name: value for name, value in state.items() if not name.endswith("_extra_state") and value is not None}
    num_experts, width = left[_ROUTER].shape
    count = num_experts if num_local_experts is None else num_local_experts
    found = {}
    for name, ours in _OF_ROUTER.items():
        if f"router.{name}" in left:
            found[ours] = left.pop(f"router.{name}")
    found |= _grouped(left, count, width) if "experts.weight1" in left else _single(left, count)
    for name, ours in (*_shared_names(),):
        if name in left:
            found[ours] = left.pop(name).unsqueeze(0)
    if "shared_experts.gate_weight" in left:
        found["shared.output_gate.weight"] = left.pop("shared_experts.gate_weight")
    if left:
        raise UserError(f"{next(iter(left))} has no counterpart in an FMoE layer of {count} experts")
    return found


def _shared_names() -> Iterator[tuple[str, str]]:
    for linear, ours in _OF_LINEAR.items():
        for kind in ("weight", "bias"):
            yield f"shared_experts.{linear}.{kind}", f"shared.expert.{kind}_{ours}"


def sharded_names() -> dict[str, str]:
    """Map Megatron-core's names of an MoE layer's tensors, as in its distributed checkpoints, to fmoe's names.

    In such a checkpoint, the experts of all ranks are one tensor. The weights of fmoe's shared expert have an
    additional first axis of size 1.
    """
    names = {f"router.{name}": ours for name, ours in _OF_ROUTER.items()} | dict(_shared_names())
    for linear, ours in _OF_LINEAR.items():
        names |= {f"experts.experts.{linear}.{kind}": f"experts.{kind}_{ours}" for kind in ("weight", "bias")}
    return names | {"shared_experts.gate_weight": "shared.output_gate.weight"}


def _grouped(left: dict[str, Tensor], count: int, width: int) -> dict[str, Tensor]:
    """Return fmoe's weights from those of a GroupedMLP, which has the matrices of all experts in one tensor."""
    first = left.pop("experts.weight1")
    second = left.pop("experts.weight2", None)
    if second is None:
        raise UserError("experts.weight2 is missing")
    if first.numel() % (count * width) or second.numel() % (count * width):
        raise UserError(
            f"experts.weight1 of shape {tuple(first.shape)} and weight2 of shape {tuple(second.shape)} do not fit "
            f"{count} experts of width {width}"
        )
    return {
        "experts.weight_in": first.reshape(count, width, -1).transpose(1, 2).contiguous(),
        "experts.weight_out": second.reshape(count, -1, width).transpose(1, 2).contiguous(),
    }


def _single(left: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return fmoe's weights from those of a SequentialMLP or TEGroupedMLP, which have one matrix per expert."""
    found = {}
    for linear, ours in _OF_LINEAR.items():
        for kind in ("weight", "bias"):
            for form in ("experts.local_experts.{n}.{linear}.{kind}", "experts.{linear}.{kind}{n}"):
                names = [form.format(n=n, linear=linear, kind=kind) for n in range(count)]
                if names[0] not in left:
                    continue
                missing = [name for name in names if name not in left]
                if missing:
                    raise UserError(f"{missing[0]} is missing: {count} experts are expected (num_local_experts)")
                found[f"experts.{kind}_{ours}"] = torch.stack([left.pop(name) for name in names])
    lacking = {"experts.weight_in", "experts.weight_out"} - found.keys()
    if lacking:
        raise UserError(
            f"the state has no weights for {', '.join(sorted(lacking))}: use a state of SequentialMLP, GroupedMLP or "
            "TEGroupedMLP"
        )
    return found


def convert_moe_layers(model: nn.Module, *, seed: int = 0, **options) -> nn.Module:
    """Replace the MoELayers of a Megatron-core model with `MegatronMoE`; return the model, whose output is unchanged.

    The new layers keep the weights of gate, experts and shared experts, and the coefficients of the auxiliary losses.
    Load a checkpoint before the conversion. Convert before Float16Module, DistributedDataParallel and the optimizer.

    With expert parallelism, each rank converts its own experts. If the router has a bias that balances loads
    (``moe_router_enable_expert_bias``), `fmoe.end_step` updates it.

    Args:
        model: a GPTModel, T5Model, BertModel or CLIPViTModel. Layers without experts are unchanged.
        seed: seed of the run, for the noise of the layers.
        options: arguments of `MegatronMoE` that leave the output unchanged: ``exchange``, ``exchange_options``,
            ``backend``, ``group_size``, ``loss_weights``, ``check``.

    Raises:
        UserError: the model is wrapped, has another type, or has no MoELayer (not checked under pipeline parallelism);
            fmoe does not support a layer's config. The model is then unchanged.
    """
    parts = checked_stacks(model, "convert_moe_layers")
    total = sum(stack.num_layers for stack in parts)
    options = {"seed": seed, **options}
    if len(parts) > 1:
        options = {"model_layers": total, **options}
    made = [
        (layer, _converted(layer, {"layer_offset": offset, **options}))
        for in_stack, _, offset, _ in parts
        for layer in in_stack
        if isinstance(layer.mlp, MoELayer)
    ]
    if not made and parallel_state.get_pipeline_model_parallel_world_size() == 1:
        raise UserError(f"the {type(model).__name__} has no MoELayer of Megatron-core: to replace MLPs, use fmoefy")
    for layer, new in made:
        layer.mlp = new
    return model


def _converted(layer: Any, options: dict[str, Any]) -> MegatronMoE:
    old = layer.mlp
    config = layer.config
    name = f"the MoELayer of layer {layer.layer_number + options['layer_offset']}"
    _check(old, config, name)
    gate, gate_options = _gate(config, old.router)
    shared: dict[str, Any] = {}
    if old.shared_experts is not None:
        shared = {"shared_expert": config.moe_shared_expert_intermediate_size}
        shared["shared_gate"] = old.shared_experts.gate_weight is not None
        shared["overlap_shared"] = config.moe_shared_expert_overlap
    balance = config.moe_aux_loss_coeff if config.moe_router_load_balancing_type != "none" else 0.0
    weights = {"z": config.moe_z_loss_coeff or 0.0, "balance": balance, "sequence_balance": balance}
    like = old.router.weight
    new = MegatronMoE(
        config,
        layer_number=layer.layer_number,
        pg_collection=getattr(layer, "pg_collection", None),
        num_experts=config.num_moe_experts,
        d_hidden=config.moe_ffn_hidden_size,
        top_k=config.moe_router_topk,
        gate=gate,
        gate_options=gate_options,
        expert_options={"bias": config.add_bias_linear, **NOT_DRAWN},
        loss_weights=weights | options.pop("loss_weights", {}),
        **shared,
        **options,
    ).to(like.device, like.dtype)
    new.load_state_dict(fmoe_state_dict(old.state_dict(), num_local_experts=old.num_local_experts))
    drawn = {"init_method": config.init_method, "output_init_method": config.output_layer_init_method}
    for experts in (new.experts, *((new.shared.expert,) if shared else ())):
        vars(experts).update(drawn)  # for reset_parameters
    new.spec.expert_options.update(drawn)  # for set_layer_number
    for part, was in ((new.gate, old.router), (new.experts, old.experts), (new.shared, old.shared_experts)):
        if part is not None:
            part.requires_grad_(any(parameter.requires_grad for parameter in was.parameters()))
    return new.train(old.training)


def _check(old: MoELayer, config: TransformerConfig, name: str) -> None:
    for field, holds, why in LIMITS:
        value = getattr(config, field, None)
        if not holds(value):
            raise UserError(f"{name}: {field}={value} is not supported: {why}")
    if old.router.weight.is_meta:
        raise UserError(f"{name} is on the meta device, without weights: load them first")
    for module, base in ((old, MoELayer), (old.router, TopKRouter)):
        if type(module).forward is not base.forward:
            raise UserError(f"{name}: {type(module).__name__} is not supported: it overrides {base.__name__}.forward")
    size = parallel_state.get_expert_tensor_parallel_world_size()
    if size > 1:
        raise UserError(f"{name}: expert_tensor_parallel_size={size}, which splits experts, is not supported: use 1")
    size = parallel_state.get_tensor_model_parallel_world_size()
    if old.shared_experts is not None and size > 1:
        raise UserError(
            f"{name}: tensor_model_parallel_size={size}, which splits shared experts, is not supported: use 1"
        )


def _gate(config: TransformerConfig, router: TopKRouter) -> tuple[str, dict[str, Any]]:
    """Return the name and options of the gate that makes the same decisions as Megatron's router."""
    options: dict[str, Any] = {"routed_scale": config.moe_router_topk_scaling_factor or 1.0}
    if router.bias is not None:
        options["bias"] = True
    if config.moe_router_score_function == "softmax":
        # With pre_softmax, weights are probabilities over all experts; otherwise they sum to 1 over the chosen ones.
        return "naive", {**options, "normalize": not config.moe_router_pre_softmax}
    options["normalize"] = config.moe_router_topk > 1
    if router.expert_bias is None:
        return "naive", {**options, "score": "sigmoid"}
    return "sigmoid", {**options, "bias_step": config.moe_router_bias_update_rate}
