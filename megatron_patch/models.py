"""MoE layers of fmoe in a Megatron-core model: through its layer spec (`fmoe_layer_spec`), or in place (`fmoefy`)."""

import copy
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from fmoe import UserError
from fmoe.convert import check_chosen, check_model, plan_blocks
from fmoe.convert.blocks import Block
from fmoe.convert.upcycle import Upcycling
from megatron_patch.layer import MegatronMoE
from megatron_patch.mtp import mtp_layers
from megatron_patch.upcycle import expert_options, fill, mlp_block

LayerSpec = TypeVar("LayerSpec", ModuleSpec, functools.partial)
MODELS = (GPTModel, T5Model, BertModel, CLIPViTModel)


class Stack(NamedTuple):
    """A model's encoder, its decoder, or all its modules for multi-token prediction.

    Attributes:
        layers: transformer layers of this stack on this rank.
        config: config of the layers.
        offset: number of layers in earlier stacks of the model, to add to ``layer_number``.
        is_mtp: True for the modules for multi-token prediction, which share their config with the decoder.
    """

    layers: tuple[Any, ...]
    config: TransformerConfig
    offset: int
    is_mtp: bool = False

    @property
    def num_layers(self) -> int:
        """Number of layers over all ranks."""
        return self.config.mtp_num_layers or 0 if self.is_mtp else self.config.num_layers


def checked_stacks(model: Any, caller: str) -> tuple[Stack, ...]:
    """Return the model's transformer blocks (`stacks`), after a check that its MLPs can be replaced.

    Args:
        caller: name of the calling function, for the error message.

    Raises:
        UserError: the model is not one of `MODELS`, is wrapped, or already has MoE layers of fmoe.
    """
    if not isinstance(model, MODELS):
        names = ", ".join(kind.__name__ for kind in MODELS)
        raise UserError(f"{caller} takes a model of one of the types {names}, not {type(model).__name__}")
    check_model(model)
    return stacks(model)


def stacks(model: Any) -> tuple[Stack, ...]:
    """Return the transformer blocks of a model, which is one of `MODELS`.

    The blocks are in the order of the forward pass: encoder, decoder, modules for multi-token prediction.
    """
    blocks = {"decoder": model.config}
    if isinstance(model, BertModel):
        blocks = {"encoder": model.config}
    elif isinstance(model, T5Model):
        blocks = {"encoder": model.encoder_config, "decoder": model.config}
    parts = []
    offset = 0
    for name, config in blocks.items():
        block = getattr(model, name)  # None on a pipeline stage without this block
        parts.append(Stack(() if block is None else tuple(block.layers), config, offset))
        offset += config.num_layers
    if model.config.mtp_num_layers:
        layers = tuple(mtp_layers(model))
        parts.append(Stack(tuple(layer for layer, _ in layers), model.config, layers[0][1] if layers else 0, True))
    return tuple(parts)


def fmoe_layer_spec(base_spec: LayerSpec, **options) -> LayerSpec:
    """Return a copy of a transformer layer's spec with `MegatronMoE` instead of the MLP.

    For a T5 with N encoder and M decoder layers, pass ``model_layers=N + M`` to both specs and ``layer_offset=N`` to
    the decoder's. Otherwise encoder and decoder layers with the same number share initial weights, noise and entries of
    Megatron's aux-loss tracker.

    Args:
        base_spec: spec of the layer, such as ``get_gpt_layer_local_spec()``: a ModuleSpec, or a functools.partial with
            the keyword argument ``submodules``.
        options: arguments of `MegatronMoE`, such as ``num_experts``, ``top_k`` and ``gate``.

    Raises:
        UserError: ``base_spec`` is not the spec of a transformer layer; or its MLP contains the layer's norm, as in
            Transformer Engine's specs of dense layers.
    """
    spec = copy.deepcopy(base_spec)
    parts: Any = getattr(spec, "submodules", None)
    if isinstance(spec, functools.partial):
        parts = spec.keywords.get("submodules")
    if not hasattr(parts, "pre_mlp_layernorm"):
        kind = type(base_spec).__name__
        raise UserError(f"base_spec must be the spec of a transformer layer, with submodules; this {kind} is not")
    norm = parts.pre_mlp_layernorm
    if getattr(norm, "func", getattr(norm, "module", norm)) is IdentityOp:
        _refuse_norm_in_mlp("base_spec", parts.mlp)
    parts.mlp = ModuleSpec(module=MegatronMoE, params=options)
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
    """Replace the MLPs of a Megatron-core model, one of `MODELS`, with `MegatronMoE`; return the model.

    Call it before Float16Module, DistributedDataParallel and the optimizer, which keep references to the old
    parameters. If it raises, the model is unchanged.

    Args:
        num_experts: number of experts of each layer, over all ranks.
        layers: numbers of the layers to change; None for all. The first layer of the whole model is 1. In a T5, the
            decoder's layers follow the encoder's. The layers for multi-token prediction follow the decoder's.
        upcycle: initialize every expert from the MLP of its layer. By default experts are drawn at random, because
            copies of an untrained MLP would only make all experts equal. Through `fmoe.fmoefy`, the default is True.
        exact, noise: with ``upcycle``, as in `fmoe.fmoefy`.
        granularity: m, so that experts have 1 / m of the MLP's hidden units, as in `fmoe.fmoefy`. ``num_experts``
            counts these smaller experts.
        seed: seed of the run. Seed and layer number determine routers, new experts and noise.
        options: other arguments of `MegatronMoE`.

    Raises:
        UserError: the model is wrapped, has another type, or already has MoE layers of fmoe; ``layers`` are out of
            range; an MLP contains the layer's norm, as in Transformer Engine's specs of dense layers; an MLP cannot be
            upcycled, or upcycling would change the output; an option is invalid.
    """
    if hasattr(model, "module"):
        raise UserError(f"the model is wrapped in {type(model).__name__}: convert it before you wrap it")
    parts = checked_stacks(model, "megatron_patch.fmoefy")
    total = sum(stack.num_layers for stack in parts)
    if layers is not None and not (layers and set(layers) <= set(range(1, total + 1))):
        raise UserError(f"layers={sorted(layers)} must be one or more layer numbers from 1 to {total}")
    chosen = [
        (layer, offset)
        for in_stack, _, offset, _ in parts
        for layer in in_stack
        if layers is None or layer.layer_number + offset in layers
    ]
    for layer, offset in chosen:
        if isinstance(layer.pre_mlp_layernorm, IdentityOp):
            _refuse_norm_in_mlp(f"layer {layer.layer_number + offset}", layer.mlp)
    dense = [mlp_block(layer, granularity, offset) for layer, offset in chosen] if upcycle else []
    check_chosen(model, dense, granularity, options)
    shape = {"num_experts": num_experts, "granularity": granularity, "sequence_first": True}
    how = plan_blocks(dense, upcycle=upcycle, exact=exact, noise=noise, options={**options, **shape})
    blocks: list[Block | None] = [found.block for found in dense] or [None] * len(chosen)
    options = {"num_experts": num_experts, "seed": seed, **options}
    if len(parts) > 1:
        options = {"model_layers": total, **options}
    # Build all layers before replacing the first, so that an error leaves the model unchanged.
    before = [(stack.config, stack.config.num_moe_experts) for stack in parts]
    try:
        made = [
            _make(layer, granularity, block, how, {"layer_offset": offset, **options})
            for (layer, offset), block in zip(chosen, blocks, strict=True)
        ]
    except Exception:
        for config, count in before:
            config.num_moe_experts = count
        raise
    for (layer, _), new in zip(chosen, made, strict=True):
        layer.mlp = new.train(layer.training)
    for _, config, offset, is_mtp in parts:
        if made:  # for every stack, because the schedule reads only one of the configs
            config.num_moe_experts = made[0].num_experts
        if layers is not None and not is_mtp:  # layers differ: sharded_state_dict must not stack them into one tensor
            numbers = range(offset + 1, offset + config.num_layers + 1)
            config.moe_layer_freq = [int(number in layers) for number in numbers]
    return model


def _refuse_norm_in_mlp(where: str, mlp: Any) -> None:
    # By class name: a spec holds classes, in a ModuleSpec or, from megatron-core 0.18 on, in a functools.partial.
    if "LayerNorm" in repr(mlp):
        raise UserError(
            f"{where} has its norm inside the MLP, which the experts replace: use a layer spec whose pre_mlp_layernorm "
            "is a norm, such as get_gpt_layer_local_spec() or get_gpt_layer_with_transformer_engine_spec(num_experts=2)"
        )


def _make(
    layer: Any, granularity: int, block: Block | None, how: Upcycling | None, options: dict[str, Any]
) -> MegatronMoE:
    """Build the MoE layer that replaces the layer's MLP. Copy its experts from ``block``, the old MLP, if given."""
    config = layer.config
    width = (config.moe_ffn_hidden_size or config.ffn_hidden_size) if block is None else block.d_hidden
    options = {"d_hidden": max(width // granularity, 1), **options}
    if block is not None:
        options["expert_options"] = expert_options(block, options.get("expert_options"))
    groups = getattr(layer, "pg_collection", None)
    new = MegatronMoE(config, layer_number=layer.layer_number, pg_collection=groups, **options)
    old = next(layer.mlp.parameters(), None)
    new = new if old is None else new.to(old.device)
    return new if block is None or how is None else fill(new, block, how)


def converter(model: nn.Module) -> Callable[..., nn.Module] | None:
    """Return the converter of Megatron-core models for `fmoe.fmoefy`; None for other models.

    A wrapped Megatron-core model gets the converter too, which then raises an error.
    """
    inner: Any = model
    while hasattr(inner, "module"):
        inner = inner.module
    if not isinstance(inner, MODELS):
        return None
    return _convert


def _convert(
    model: nn.Module, *, layers: str | int | Collection[int] = "all", upcycle: bool = True, **options
) -> nn.Module:
    """Call `fmoefy` with the defaults of `fmoe.fmoefy`. ``layers`` has the same forms as there, but counts from 1."""
    if isinstance(layers, str) and layers != "all":
        raise UserError(f"layers={layers!r} is neither 'all', nor layer numbers, nor n for every n-th layer")
    if isinstance(layers, int):
        count = sum(s.num_layers for s in stacks(model)) if isinstance(model, MODELS) else layers
        if not 1 <= layers <= count:
            raise UserError(f"layers={layers} (every n-th layer) selects no layer: the model has {count} layers")
        layers = range(layers, count + 1, layers)
    return fmoefy(model, layers=None if isinstance(layers, str) else layers, upcycle=upcycle, **options)
