"""The two ways for FMoE into a Megatron-core model: by its layer spec, or in place."""

import copy
from collections.abc import Callable, Collection

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from fmoe import UserError
from megatron_patch.layer import MegatronFMoE


def fmoe_layer_spec(base_spec: ModuleSpec, **options) -> ModuleSpec:
    """A copy of a transformer layer's spec with `MegatronFMoE` where the MLP was.

    Args:
        base_spec: e.g. ``get_gpt_layer_local_spec()``.
        options: of `MegatronFMoE`: ``num_experts``, ``top_k``, ``gate``, ...
    """
    spec = copy.deepcopy(base_spec)
    spec.submodules.mlp = ModuleSpec(module=MegatronFMoE, params=options)
    return spec


def fmoefy(model: nn.Module, num_experts: int, *, layers: Collection[int] | None = None, **options) -> nn.Module:
    """Puts `MegatronFMoE` in place of the MLPs of a Megatron-core GPTModel; returns the model.

    Call it before Float16Module, DistributedDataParallel and the optimizer, which keep what they found.

    Args:
        layers: numbers of the layers to change, counted from 1 over the whole model as Megatron does; None for all.
        options: of `MegatronFMoE`.

    Raises:
        UserError: the model is wrapped already, is no GPTModel, or has no layer of ``layers``.
    """
    if hasattr(model, "module"):
        raise UserError(f"fmoefy got a model inside {type(model).__name__}: call it before the model is wrapped")
    if not isinstance(model, GPTModel):
        raise UserError(f"fmoefy of megatron_patch takes a GPTModel, not {type(model).__name__}")
    chosen = [layer for layer in model.decoder.layers if layers is None or layer.layer_number in layers]
    known = range(1, model.config.num_layers + 1)
    for number in layers or ():
        if number not in known:
            raise UserError(f"layers={sorted(layers)}: the model's layers are numbered 1 to {model.config.num_layers}")
    for layer in chosen:
        old = next(layer.mlp.parameters(), torch.empty(0))
        groups = getattr(layer, "pg_collection", None)
        new = MegatronFMoE(
            layer.config, layer_number=layer.layer_number, pg_collection=groups, num_experts=num_experts, **options
        )
        layer.mlp = new.to(old.device).train(layer.training)
    if layers is not None:  # unlike layers: sharded_state_dict must not stack them into one tensor
        model.config.moe_layer_freq = [int(number in layers) for number in known]
    return model


def adapter(model: nn.Module) -> Callable[..., nn.Module] | None:
    """For `fmoe.fmoefy`: takes Megatron-core models, wrapped ones too, to tell their owners off."""
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    if not isinstance(inner, GPTModel):
        return None
    return _convert


def _convert(
    model: nn.Module, *, layers: str | int | Collection[int] = "all", upcycle: bool = False, **options
) -> nn.Module:
    """`fmoefy` with `fmoe.fmoefy`'s spellings of ``layers``; numbers count from 1 here."""
    if upcycle:
        raise UserError("upcycle=True: Megatron-core models get new experts in this version")
    if isinstance(layers, int):
        layers = range(layers, len(model.decoder.layers) + 1, layers)
    return fmoefy(model, layers=None if layers == "all" else layers, **options)
