"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1) without Transformer Engine."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from megatron_patch.qk_norm import summed

_FROM_SPEC = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class LatentAttention(MLASelfAttention):
    """`MLASelfAttention` with the correct gradient of the rotary key under tensor parallelism.

    All heads share one rotary key per token, so its gradient is the sum over the heads of all tensor parallel ranks.
    Without Transformer Engine, Megatron-core sums over the heads of one rank only.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        if config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(functools.partial(_gather, config))

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        # Without `config.qk_layernorm`, the base class refuses norms of compressed keys and values. With it,
        # uncompressed queries need Transformer Engine.
        return {name: getattr(submodules, name) for name in _FROM_SPEC}


def _gather(
    config: MLATransformerConfig, module: Any, inputs: Any, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Forward hook of a column parallel linear layer that gathers all columns of its output."""
    # Megatron-core expects all columns. Under sequence parallelism, it expects this rank's slice of the tokens, and
    # then gathers the rotary keys.
    columns, bias = output
    whole = gather_from_tensor_model_parallel_region(columns)
    if config.sequence_parallel:
        return scatter_to_sequence_parallel_region(whole), bias
    latent, key = whole.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
    return torch.cat([latent, _SumGradients.apply(key, module.tp_group)], dim=-1), bias


class _SumGradients(torch.autograd.Function):
    """Identity whose gradient is summed over a group."""

    # Megatron-core's `copy_to_tensor_model_parallel_region` loses the sum if the gradient is not contiguous.

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None
