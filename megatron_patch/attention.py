"""Megatron-core's attention without Transformer Engine, computed by torch's ``scaled_dot_product_attention``.

Megatron-core's own code materializes the [s, s] scores of every head several times. torch has fused kernels for CPU and
GPU (FlashAttention, arXiv 2205.14135).
"""

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe import UserError
from fmoe.kernels.attention import causal_attention, visible
from megatron_patch import bf16_linear
from megatron_patch.context import context_group, heads_to_sequence, spread_heads
from megatron_patch.dropout import HeadDropout
from megatron_patch.sharded import Sliced


class SDPAttention(Sliced, DotProductAttention):
    """Replacement for `DotProductAttention` that uses torch's `scaled_dot_product_attention`.

    Arguments, shapes and results are the same, with these exceptions:

    * If all keys of a query are masked, Megatron-core returns the mean of the values. This class returns zeros or, in
      training with `HeadDropout` and without learned softmax offsets, NaN.
    * An attention bias is added to the scaled scores, where Megatron-core raises an AssertionError. With a window or
      learned softmax offsets, this class raises it too.
    * A mask also applies in layers with a window, where Megatron-core ignores it.
    * Values may be narrower or wider than keys (``v_channels``), as in multi-latent attention.
    * bf16 is computed in float32 on processors where that is faster (`megatron_patch.bf16_linear`).

    ``config.window_size=(n, 0)`` is a causal window of n + 1 tokens. With ``config.window_stride=N``, an attribute that
    Megatron-core does not have, a query also sees every N-th key before its window. ``config.softmax_type="learnable"``
    adds a learned offset per head to the softmax (`fmoe.kernels.attention`). Offsets start at zero. Each tensor
    parallel rank holds the offsets of its own heads.

    Megatron-core's implementation, without torch's kernels, computes these cases:

    * packed sequences;
    * scores scaled by layer number;
    * windows that are not causal;
    * windows or offsets, if the attention is not causal;
    * several queries after cached keys, without a mask, window or offset.

    Under context parallelism, each rank holds a contiguous slice of the sequences. It attends over whole sequences with
    a part of its heads (`megatron_patch.context`). A mask is for whole sequences, [b, 1, s, s].

    Raises:
        UserError: the context parallel size does not divide the number of heads of a tensor parallel rank. Under
            context parallelism, a forward pass also raises it for an attention bias, for dropout that is not
            `HeadDropout`, and for the cases that Megatron-core's implementation computes.
    """

    context_group: dist.ProcessGroup | None = None
    softmax_offset: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection=None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **options,
    ):
        plain = copy.copy(config)
        plain.context_parallel_size = 1  # the base class refuses other sizes
        has_sinks = getattr(config, "softmax_type", "vanilla") == "learnable"
        if has_sinks:
            plain.softmax_type = "vanilla"  # the base class draws offsets that depend on the split
        if v_channels is not None:
            plain.kv_channels = v_channels  # the base class shapes its output by it
        super().__init__(plain, *args, pg_collection=pg_collection, **options)
        self.config = config
        self.context_group = context_group(config, pg_collection)
        if self.num_attention_heads_per_partition % config.context_parallel_size:
            raise UserError(
                f"context_parallel_size={config.context_parallel_size} does not divide the "
                f"{self.num_attention_heads_per_partition} attention heads of a tensor parallel rank"
            )
        if has_sinks:
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            heads = self.num_attention_heads_per_partition
            del self.softmax_offset
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        """Map query, key and value [s, b, heads, head width] to [s, b, heads * head width of values].

        Args:
            attention_mask: True where a query must not see a key, [1 or b, 1, s of queries, s of keys]. Causal
                attention without a mask hides the later keys. A mask replaces this default, so it must hide them too.
            attention_bias: added to the scores, such as T5's relative positions: [1 or b, heads, s of queries, s of
                keys].
        """
        options = (attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        if self.context_group is None:
            return self._forward(query, key, value, *options)
        query, key, value = spread_heads(query, key, value, self.context_group)
        out = self._forward(query, key, value, *options)
        return heads_to_sequence(out.unflatten(2, query.shape[2:]), self.context_group).flatten(2)

    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None,
        attention_bias: Tensor | None,
        packed_seq_params: Any,
    ) -> Tensor:
        softmax = self.scale_mask_softmax
        is_causal = attention_mask is None and self.attn_mask_type == AttnMaskType.causal
        window = softmax.window_size
        sinks_H = self.softmax_offset
        if sinks_H is not None and self.context_group is not None:  # those of the heads with which this rank attends
            sinks_H = sinks_H.chunk(self.context_group.size())[self.context_group.rank()]
        stride = getattr(self.config, "window_stride", None)
        is_local = sinks_H is not None or window is not None
        # Left to megatron-core: windows and offsets in attention that is not causal, or with a bias.
        special = window is not None and (window[0] < 0 or window[1] != 0)
        special |= is_local and (self.attn_mask_type != AttnMaskType.causal or attention_bias is not None)
        special |= softmax.scale is not None
        # torch aligns a causal mask at the top left, which is wrong with more keys than queries. A single query after
        # cached keys sees all keys, without a mask.
        is_causal &= query.shape[0] > 1
        special |= is_causal and query.shape[0] != key.shape[0] and not is_local
        if self.context_group is not None and attention_bias is not None:
            self._refuse_context("an attention bias")
        if special or packed_seq_params is not None:
            self._refuse_context(
                "packed sequences, non-causal windows or softmax offsets, layer-scaled scores or cached keys"
            )
            return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        dtype = torch.float32 if query.dtype == torch.bfloat16 and bf16_linear.is_needed() else query.dtype
        q, k, v = (x.permute(1, 2, 0, 3).to(dtype) for x in (query, key, value))
        mask = attention_mask  # or a bias that is -inf where the mask is True
        if attention_bias is not None:
            hidden = _later(q, k) if is_causal else attention_mask
            is_causal = False
            mask = attention_bias.to(dtype)
            if hidden is not None:
                mask = mask.masked_fill(hidden, -torch.inf)
        dropout = self.attention_dropout.p if self.training else 0.0
        size = None if window is None else window[0] + 1
        if dropout and isinstance(self.attention_dropout, HeadDropout):
            if size is not None:
                far = ~visible(query.shape[0], key.shape[0], size, query.device, stride)
                mask = far if mask is None else far | mask
                is_causal = False
            out = self._attend(q, k, v, mask, is_causal, sinks_H)
            return out.permute(2, 0, 1, 3).flatten(2).to(query.dtype)
        if dropout:
            self._refuse_context("attention dropout that megatron_patch.dropout.key_dropout has not replaced")
        # As in `DotProductAttention`: under tensor parallelism each rank drops scores of its own heads.
        forked = dropout > 0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if forked else contextlib.nullcontext():
            if is_local:
                seen = None if attention_mask is None else ~attention_mask
                local: dict[str, Any] = {"window": size, "stride": stride, "sinks_H": sinks_H, "dropout": dropout}
                out = causal_attention(q, k, v, scale=self.softmax_scale, seen=seen, **local)
                return out.permute(2, 0, 1, 3).flatten(2).to(query.dtype)
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=~mask if mask is not None and mask.dtype == torch.bool else mask,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.softmax_scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return out.permute(2, 0, 1, 3).flatten(2).to(query.dtype)

    def _refuse_context(self, what: str) -> None:
        if self.context_group is not None:
            size = self.context_group.size()
            raise UserError(f"context_parallel_size={size} is not supported with {what}: use context_parallel_size=1")

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Return attention with dropout by `HeadDropout`. Inputs and result are [b, heads, s, head width]."""
        # mask: float, added to the scores, or bool, True where a query must not see a key. sinks_H: softmax offsets.
        if query.shape[1] != key.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores = (query * self.softmax_scale) @ key.transpose(2, 3)
        mask = _later(query, key) if is_causal else mask
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        if sinks_H is not None:
            scores = torch.cat([scores, sinks_H.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        probabilities = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        probabilities = probabilities if sinks_H is None else probabilities[..., :-1]
        return self.attention_dropout(probabilities) @ value


def _later(query: Tensor, key: Tensor) -> Tensor:
    """Return the causal mask [s of queries, s of keys]: True where the key comes later."""
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
