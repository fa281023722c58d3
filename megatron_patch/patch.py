"""The two ways for FMoE into a Megatron-core model: by its layer spec, or in place."""

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from fmoe import UserError
from fmoe.adapters import Block
from fmoe.patch import check_chosen, check_model, plan_blocks
from fmoe.upcycle import Upcycling
from megatron_patch.layer import MegatronFMoE
from megatron_patch.upcycle import expert_options, fill, mlp_block


def fmoe_layer_spec(base_spec: ModuleSpec, **options) -> ModuleSpec:
    """A copy of a transformer layer's spec with `MegatronFMoE` where the MLP was.

    Args:
        base_spec: e.g. ``get_gpt_layer_local_spec()``.
        options: of `MegatronFMoE`: ``num_experts``, ``top_k``, ``gate``, ...
    """
    spec = copy.deepcopy(base_spec)
    spec.submodules.mlp = ModuleSpec(module=MegatronFMoE, params=options)
    return spec


def fmoefy(
    model: nn.Module,
    num_experts: int,
    *,
    layers: Collection[int] | None = None,
    upcycle: bool = False,
    exact: bool = True,
    noise: float = 0.0,
    granularity: int = 1,
    seed: int = 0,
    **options,
) -> nn.Module:
    """Puts `MegatronFMoE` in place of the MLPs of a Megatron-core GPTModel; returns the model.

    Call it before Float16Module, DistributedDataParallel and the optimizer, which keep what they found. The model's
    layers are as they were if it raises.

    Args:
        num_experts: in all, of each layer.
        layers: numbers of the layers to change, counted from 1 over the whole model as Megatron does; None for all.
        upcycle: every expert begins as the MLP of its layer, and the model's output is unchanged. The default draws new
            ones, as `fmoe_layer_spec` does: a model that is about to be pretrained has nothing to keep, and copies
            of one random MLP would only begin alike. `fmoe.fmoefy` upcycles unless told otherwise, here too.
        exact, noise: with ``upcycle``, as in `fmoe.fmoefy`.
        granularity: m makes experts of 1 / m of the hidden units, as in `fmoe.fmoefy`: ``num_experts`` counts these.
        seed: of the run; with the layer number, the key of routers, new experts and noise.
        options: of `MegatronFMoE`.

    Raises:
        UserError: the model is wrapped already, is no GPTModel, has FMoE layers already, or has no layer of ``layers``;
            upcycling cannot keep the output.
    """
    if hasattr(model, "module"):
        raise UserError(f"fmoefy got a model inside {type(model).__name__}: call it before the model is wrapped")
    if not isinstance(model, GPTModel):
        raise UserError(f"fmoefy of megatron_patch takes a GPTModel, not {type(model).__name__}")
    check_model(model)
    chosen = [layer for layer in model.decoder.layers if layers is None or layer.layer_number in layers]
    known = range(1, model.config.num_layers + 1)
    for number in layers or ():
        if number not in known:
            raise UserError(f"layers={sorted(layers)}: the model's layers are numbered 1 to {model.config.num_layers}")
    found = [mlp_block(layer, granularity) for layer in chosen] if upcycle else []
    check_chosen(model, found, granularity, options)
    shape = {"num_experts": num_experts, "granularity": granularity, "sequence_first": True}
    how = plan_blocks(found, upcycle=upcycle, exact=exact, noise=noise, options={**options, **shape})
    blocks = [f.block for f in found] or [None] * len(chosen)
    options = {"num_experts": num_experts, "seed": seed, **options}
    # All layers are made before the first is put in, so that an error leaves the model as it was.
    made = [_make(layer, granularity, block, how, options) for layer, block in zip(chosen, blocks, strict=True)]
    for layer, new in zip(chosen, made, strict=True):
        layer.mlp = new.train(layer.training)
    if layers is not None:  # unlike layers: sharded_state_dict must not stack them into one tensor
        model.config.moe_layer_freq = [int(number in layers) for number in known]
    return model


def _make(
    layer: nn.Module, granularity: int, block: Block | None, how: Upcycling | None, options: dict[str, Any]
) -> MegatronFMoE:
    """For the place of the layer's MLP: experts made of it, which is ``block``, or new ones."""
    config = layer.config
    width = (config.moe_ffn_hidden_size or config.ffn_hidden_size) if block is None else block.d_hidden
    options = {"d_hidden": max(width // granularity, 1), **options}
    if block is not None:
        options["expert_options"] = expert_options(block, options.get("expert_options"))
    groups = getattr(layer, "pg_collection", None)
    old = next(layer.mlp.parameters(), torch.empty(0))
    new = MegatronFMoE(config, layer_number=layer.layer_number, pg_collection=groups, **options).to(old.device)
    return new if block is None else fill(new, block, how)


def adapter(model: nn.Module) -> Callable[..., nn.Module] | None:
    """For `fmoe.fmoefy`: takes Megatron-core models, wrapped ones too, to tell their owners off."""
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    if not isinstance(inner, GPTModel):
        return None
    return _convert


def _convert(
    model: nn.Module, *, layers: str | int | Collection[int] = "all", upcycle: bool = True, **options
) -> nn.Module:
    """`fmoefy` with `fmoe.fmoefy`'s spellings of ``layers`` and its default of ``upcycle``; numbers count from 1."""
    if isinstance(layers, int):
        count = model.config.num_layers if isinstance(model, GPTModel) else layers
        if not 1 <= layers <= count:
            raise UserError(f"layers={layers} (every n-th layer) chooses none: the model has {count}")
        layers = range(layers, count + 1, layers)
    return fmoefy(model, layers=None if layers == "all" else layers, upcycle=upcycle, **options)
