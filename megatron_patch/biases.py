"""Biases of selected linear layers of a GPT. Megatron-core's ``add_bias_linear`` adds biases to all of them or none."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from torch import nn


class BiasedRowParallelLinear(RowParallelLinear):
    """`RowParallelLinear` that always has a bias, even if Megatron-core passes ``bias=False``."""

    def __init__(self, *args: Any, bias: bool, **options: Any):
        super().__init__(*args, bias=True, **options)


def add_output_bias(model: GPTModel) -> None:
    """Add a bias, initialized to zeros, to a model's logits.

    Each tensor parallel rank holds the elements of its part of the vocabulary. A pipeline stage without an output layer
    is unchanged.
    """
    if not model.post_process:
        return
    layer = model.output_layer
    device = next(model.parameters()).device
    zeros = torch.zeros(layer.output_size_per_partition, dtype=model.config.params_dtype, device=device)
    layer.bias = nn.Parameter(zeros)
    set_tensor_model_parallel_attributes(layer.bias, True, 0, 1)
    layer.bias.allreduce = True
