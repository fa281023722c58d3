"""Classifiers of images in transformers, built from ``model.config``: ViT, Swin and others.

The arrays of a sample are keyword arguments of the model, and ``labels`` [1]. The classes are ``model.vocab_size``, and
layers are the model's feed-forward blocks, which `fmoe.fmoefy` replaces.
"""

import inspect
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

import fmoe
from fmoe import random
from fmoe.errors import UserError, known_names
from fmoe.moe import ONE_RANK
from megatron_patch.layer import megatron_loss_scale
from megatron_patch.sharded import sharded_experts
from pretrain.config import Recipe
from pretrain.config.classifier import build_classifier
from pretrain.models.batch import Batch
from pretrain.models.config import transformer_config


class Classifier(MegatronModule):
    """A classifier of transformers with the attributes that Megatron-core's schedule and checkpoints read."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: TransformerConfig, model: nn.Module):
        super().__init__(config)
        self.model = model.to(config.params_dtype)
        parameters = inspect.signature(model.forward).parameters.values()
        # Names that **kwargs takes have no effect.
        self._arguments = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]

    def set_input_tensor(self, tensor: Any) -> None:
        """Do nothing: there is one pipeline stage."""

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the logits [b, classes].

        Raises:
            UserError: the model does not have an argument.
        """
        for name in inputs:
            if name not in self._arguments:
                kind = type(self.model).__name__
                raise UserError(
                    f"samples have {name}, which {kind} does not take; {known_names(name, self._arguments)}"
                )
        dtype = self.config.params_dtype
        values = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        logits: Tensor = self.model(**values).logits
        return logits

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the state as Megatron's sharded tensors, in which each expert has its global id."""
        sharded: dict[str, Any] = {}
        for name, layer in self.named_modules():
            if isinstance(layer, fmoe.MoE):
                sharded |= sharded_experts(layer.experts, layer.exchange, None, f"{name}.experts.", ())
        state = self.state_dict(keep_vars=True)
        replicated = {name: x for name, x in state.items() if name not in sharded and not name.endswith(ONE_RANK)}
        tensor_group = parallel_state.get_tensor_model_parallel_group()
        return sharded | make_sharded_tensors_for_checkpoint(
            replicated, prefix, {}, (), tp_group=tensor_group, dp_cp_group=(metadata or {})["dp_cp_group"]
        )


def build(recipe: Recipe, **stage: Any) -> Classifier:
    """Build a classifier; see `pretrain.models`."""
    with random.keyed("classifier", recipe.train.seed):
        module, _ = build_classifier(recipe.model)
    return Classifier(transformer_config(recipe), module)


def fmoefy(
    module: Classifier, num_experts: int, *, layers: tuple[int, ...], overlap_shared: bool, **options: Any
) -> Classifier:
    """Replace blocks by experts of the blocks' sizes; see `pretrain.models`."""
    for name in ("expert", "expert_options", "d_hidden"):  # those of the block
        options.pop(name)
    group = parallel_state.get_expert_model_parallel_group()
    fmoe.fmoefy(
        module.model,
        num_experts,
        layers=[number - 1 for number in layers],
        upcycle=False,
        moe_group=group if group.size() > 1 else None,
        loss_scale=megatron_loss_scale,
        **options,
    )
    made: list[Any] = [layer for layer in module.modules() if isinstance(layer, fmoe.MoE)]
    for number, layer in zip(sorted(layers), made, strict=True):
        layer.layer_number = number
    return module


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Run a classifier on a micro batch: losses [b, 1], or logits [b, 1, classes]; see `pretrain.models`."""
    inputs = {name: x for name, x in batch.items() if name not in ("labels", "loss_weight")}
    logits_BV = model(**inputs)
    if "labels" not in batch:
        return logits_BV.unsqueeze(1)
    return F.cross_entropy(logits_BV.float(), batch["labels"][:, 0], reduction="none").unsqueeze(1)
