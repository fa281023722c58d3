"""Gated feed-forward blocks: Llama, Mistral, Qwen2, Qwen3, Gemma, the gated T5 and alike (arXiv 2002.05202)."""

from torch import nn

from fmoe.adapters.block import Block
from fmoe.adapters.mlp import whole_module


def glu(module: nn.Module) -> list[Block]:
    """Three linear maps: gate, value, output. Which is which is seen from what goes into the activation."""
    return whole_module(module, 3)
