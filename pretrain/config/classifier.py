"""Classifiers of images in transformers, such as ViT and Swin, which `ModelConfig.config` describes."""

import math
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fmoe.convert import Found, find_blocks
from fmoe.errors import UserError, known_names, one_line, require
from pretrain.config.layer import router_shapes
from pretrain.config.model import ModelConfig

# Keys that would have no effect, or contradict what the recipe or the engine sets.
_OF_THE_RECIPE = {"num_labels", "id2label", "label2id", "dtype", "return_dict", "problem_type"}


def build_classifier(model: ModelConfig) -> tuple[nn.Module, list[Found]]:
    """Build the dense model on torch's default device; return it and its feed-forward blocks, which are the layers.

    Raises:
        UserError: the package transformers is missing; ``model.config`` has an unknown key or model type, or a value
            that transformers refuses; the configuration has no ``image_size`` and ``num_channels``; or
            ``model.num_layers`` is not the number of blocks.
    """
    auto: Any = require("transformers", "pretrain,tasks", "model.kind=classifier")
    options = dict(model.config)
    kind = options.pop("model_type", None)
    if kind not in auto.models.auto.modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        raise UserError(f"model.config.model_type={kind} is not a classifier of images, such as vit or swin")
    default = auto.AutoConfig.for_model(kind)
    known = sorted(set(default.to_dict()) - _OF_THE_RECIPE)
    for name, value in options.items():
        if name not in known:
            raise UserError(f"model.config.{name}={value} is not a key of {kind}; {known_names(name, known)}")
    if not {"image_size", "num_channels"} <= set(known):
        raise UserError(f"model.config.model_type={kind} is not supported: it has no image_size or no num_channels")
    try:
        config = auto.AutoConfig.for_model(kind, **options, num_labels=model.vocab_size)
        module = auto.AutoModelForImageClassification.from_config(config)
    except Exception as error:  # of any type, for a value that does not fit
        message = one_line(error, with_type=True)
        raise UserError(f"model.config={dict(model.config)} fails in transformers: {message}") from error
    blocks = find_blocks(module)
    if len(blocks) != model.num_layers:
        raise UserError(
            f"model.num_layers={model.num_layers} must be {len(blocks)}, the number of feed-forward blocks of "
            f"model.config={options}"
        )
    return module, blocks


def num_params(model: ModelConfig, experts: int) -> int:
    """Return the number of parameters of a classifier with ``experts`` experts in each layer that has experts."""
    with torch.device("meta"):
        module, blocks = build_classifier(model)
    total = sum(parameter.numel() for parameter in module.parameters())
    for number in model.layers_with_experts:
        block = blocks[number - 1].block
        total += (experts - 1) * _size(block)
        of_layer = model.with_values({"hidden_size": block.d_model})
        total += sum(map(math.prod, router_shapes(of_layer)))
    return total


def flops_per_token(model: ModelConfig) -> float:
    """Return the floating point operations of a training step per token.

    Counts those of the dense model's matrices and attention, forward and backward, for one sample, divided by
    ``model.sequence_length``. Experts beyond the first of a token count as if each layer had all of these tokens.
    """
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        module, blocks = build_classifier(model)
        counter.flop_counts.clear()  # of the search for blocks
        config: Any = module.config
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        image = (1, config.num_channels, height, width)
        module(torch.zeros(image, dtype=torch.get_default_dtype(), device="meta"))
    more = sum(_size(blocks[number - 1].block) for number in model.layers_with_experts) * (model.moe.top_k - 1)
    return 3 * counter.get_total_flops() / model.sequence_length + 6 * more


def _size(block: Any) -> int:
    return sum(tensor.numel() for tensor in block.tensors)
