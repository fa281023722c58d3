"""Upcycling of a Megatron-core model: conversion of its MLPs to blocks, from which `fmoe.convert.upcycle` makes
experts."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe import UserError
from fmoe.convert import NOT_DRAWN
from fmoe.convert.blocks import Block, LinearMap, addition, known_activation
from fmoe.convert.families import Found
from fmoe.convert.upcycle import Upcycling, upcycle_
from fmoe.experts.ffn import ACTIVATIONS
from fmoe.runtime import collectives
from megatron_patch.layer import MegatronMoE


def mlp_block(layer: Any, granularity: int, offset: int = 0) -> Found:
    """Return the MLP of a transformer layer as a `Block` to copy experts from, and its name for messages.

    Args:
        granularity: number of experts into which the MLP is split.
        offset: number of layers in earlier stacks, added to the layer's number in messages.

    Raises:
        UserError: the layer's MLP is not Megatron-core's `MLP`, or it computes more than a feed-forward block; or the
            config sets another width for the experts.
    """
    mlp = layer.mlp
    config = layer.config
    name = f"the MLP of layer {layer.layer_number + offset}"
    reason = _unsupported(mlp)
    if reason is not None:
        raise UserError(f"upcycle=True does not support {name}: {reason}; upcycle=False draws new experts")
    fc1 = mlp.linear_fc1
    fc2 = mlp.linear_fc2
    parts = 2 if config.gated_linear_unit else 1
    biases = [None] * parts if fc1.bias is None else [_whole(half, 0) for half in fc1.bias.chunk(parts)]
    weights = [_whole(half, 0) for half in fc1.weight.chunk(parts)]
    # Megatron's fused bias and GELU is the tanh approximation.
    is_tanh = config.bias_activation_fusion and config.activation_func is F.gelu
    block = Block(
        maps_in=tuple(map(LinearMap, weights, biases)),
        map_out=LinearMap(_whole(fc2.weight, 1), fc2.bias),
        activation=ACTIVATIONS["gelu_tanh"] if is_tanh else config.activation_func,
        module=mlp,
        sequence_first=True,
    )
    hidden = config.moe_ffn_hidden_size  # Megatron sets it to ffn_hidden_size in models with experts
    if hidden not in (None, config.ffn_hidden_size) and hidden * granularity != block.d_hidden:
        raise UserError(
            f"moe_ffn_hidden_size={hidden} is not supported with upcycle=True: {name}, from which experts are copied, "
            f"has {block.d_hidden} hidden units; use moe_ffn_hidden_size=None"
        )
    return Found(name, "megatron", block)


@torch.no_grad()
def _whole(shard: Tensor, axis: int) -> Tensor:
    """Gather a tensor that is split over tensor parallel ranks along ``axis``."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return shard
    return torch.cat(collectives.gather(shard.contiguous(), group), axis).requires_grad_(shard.requires_grad)


def _unsupported(mlp: nn.Module) -> str | None:
    """Return why the module is not ``W_out act(W_in x + b_in) + b_out`` or its gated form, as a phrase; else None."""
    if isinstance(mlp, MoELayer):
        return "it already has experts, which megatron_patch.convert_moe_layers converts"
    if not isinstance(mlp, MLP) or type(mlp).forward is not MLP.forward:
        return f"{type(mlp).__name__} is not an MLP of Megatron-core"
    added = addition(mlp)
    if added is not None:
        return f"it {added}"
    for name in ("linear_fc1", "linear_fc2"):
        linear = getattr(mlp, name)
        added = addition(linear)
        if added is not None:
            return f"its {name} {added}"
        if not type(linear).__module__.startswith("megatron.core.") or "weight" not in linear._parameters:
            return f"its {name}, a {type(linear).__name__}, is not Megatron-core's own"
        others = sorted({key for key, _ in linear.named_parameters()} - {"weight", "bias"})
        if others or not torch.is_tensor(getattr(linear, "weight", None)):
            # Transformer Engine's linear layer may normalize its input: the MLP's norm would be lost with it.
            return f"its {name}, a {type(linear).__name__}, has {', '.join(others) or 'no weight'}"
    for name, without in (("use_te_activation_func", False), ("activation_func_clamp_value", None)):
        if getattr(mlp.config, name, without) != without:
            return f"FMoE's experts do not support {name}={getattr(mlp.config, name)}"
    if getattr(mlp.config, "glu_linear_offset", 0) and mlp.config.gated_linear_unit:
        return f"FMoE's experts do not support glu_linear_offset={mlp.config.glu_linear_offset}"
    return None


def expert_options(block: Block, options: dict | None) -> dict:
    """Return expert options with the activation, gate and bias of a block, updated with ``options``.

    The experts' weights are not initialized: `fill` sets them.
    """
    like = {
        "activation": known_activation(block.activation, block.tensors[0].dtype),
        "gated": block.is_gated,
        "bias": block.has_bias,
    }
    return {**like, **NOT_DRAWN, **(options or {})}


def fill(layer: MegatronMoE, block: Block, how: Upcycling) -> MegatronMoE:
    """Copy a block into the layer's experts, in the block's dtype and device. Experts of a frozen block are frozen.

    Raises:
        UserError: the layer has an expert tensor parallel group.
    """
    group = layer.spec.expert_tensor_group
    if group is not None:
        raise UserError(
            f"expert_tensor_parallel_size={group.size()}, which splits experts, is not supported with upcycle=True: "
            "use expert_tensor_parallel_size=1, or upcycle=False"
        )
    like = block.tensors[0]
    layer.to(like.device, like.dtype)
    upcycle_(layer, block, how)
    drawn = {"init_method": layer.config.init_method, "output_init_method": layer.config.output_layer_init_method}
    vars(layer.experts).update(drawn)  # for reset_parameters
    layer.spec.expert_options.update(drawn)  # for set_layer_number
    for parameter in layer.experts.parameters():
        parameter.requires_grad_(any(t.requires_grad for t in block.tensors))
    return layer
