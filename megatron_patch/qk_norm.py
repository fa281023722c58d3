"""RMSNorm of queries or keys over all heads together, as in OLMoE (arXiv 2409.02060 section 2)."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from fmoe.runtime import collectives
from megatron_patch.sharded import Sliced


def norm_all_heads(attention: type[SelfAttention]) -> type[SelfAttention]:
    """Return a subclass of ``attention`` that normalizes queries and keys with `AllHeadsRMSNorm`.

    Leave ``config.qk_layernorm`` False, and the spec without norms of queries and keys.
    """
    # Not by the spec: from megatron-core 0.19 on, attention refuses norms in its spec without `config.qk_layernorm`.
    # With it, Megatron-core takes the weights for replicas, and sums their gradients over tensor parallel ranks.

    class AllHeadsNormAttention(attention):
        def __init__(self, config: TransformerConfig, *args: Any, **options: Any):
            super().__init__(config, *args, **options)
            width = self.hidden_size_per_attention_head
            eps = config.layernorm_epsilon
            self.q_layernorm = AllHeadsRMSNorm(width, config, eps, num_heads=config.num_attention_heads)
            self.k_layernorm = AllHeadsRMSNorm(width, config, eps, num_heads=config.num_query_groups)

    return AllHeadsNormAttention


class AllHeadsRMSNorm(Sliced, nn.Module):
    """RMSNorm over the elements of all heads; each tensor parallel rank holds some heads and their weights.

    Args:
        hidden_size: width of a head.
        config: config of the model.
        eps: constant that is added to the mean square.
        num_heads: number of heads over all tensor parallel ranks.
    """

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float, *, num_heads: int):
        super().__init__()
        self.eps = eps
        self.num_elements = num_heads * hidden_size
        self.num_ranks = config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.ones(num_heads // self.num_ranks * hidden_size))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [s, b, heads, head width] to the same shape."""
        x_32 = x.float()
        square = x_32.square().sum((-2, -1), keepdim=True)
        if self.num_ranks > 1:
            square = _Sum.apply(square, parallel_state.get_tensor_model_parallel_group())
        y = x_32 * (square / self.num_elements + self.eps).rsqrt()
        return y.to(x.dtype) * self.weight.view(x.shape[-2:])


class _Sum(torch.autograd.Function):
    """All-reduce whose gradient is all-reduced too, because each rank uses the sum for its own heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over the ranks of a group."""
    total = x.clone(memory_format=torch.contiguous_format)
    collectives.run(dist.all_reduce, total, group=group)
    return total
