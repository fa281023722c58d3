"""Constant factors of embeddings, residual branches and logits, as in Granite (arXiv 2408.13359 section 3)."""

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn


def scale_model(model: Any, *, embedding: float = 1.0, residual: float = 1.0, logit_divisor: float = 1.0) -> None:
    """Scale the embedding, the output of each attention and feed-forward block, and the input of the output layer.

    Args:
        model: a Megatron-core GPT, or a pipeline stage of one, with its final blocks and dropout.
    """
    module: nn.Module
    for module in model.modules():
        if isinstance(module, LanguageModelEmbedding) and embedding != 1:
            module.word_embeddings.register_forward_hook(lambda _, __, out: out * embedding)
        elif isinstance(module, TransformerLayer) and residual != 1:
            for name in ("self_attn_bda", "mlp_bda"):
                setattr(module, name, functools.partial(_scaled_add, getattr(module, name), residual))
    if logit_divisor != 1 and model.post_process:
        # The hidden states are fewer elements than the logits.
        model.output_layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] / logit_divisor, *inputs[1:]))


def _scaled_add(make: Callable[..., Callable[..., Tensor]], scale: float, *options: Any) -> Callable[..., Tensor]:
    """Wrap Megatron-core's addition of a block's output to the residual stream, with bias and dropout."""
    add = make(*options)

    def scale_and_add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        return add((x * scale, None if bias is None else bias * scale), residual, prob)

    return scale_and_add
