"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860 section 3): relative positions and segment recurrence.

Layers keep their input hidden states as the memory of the next segment of the same text. Keys and values come from the
memory and the segment, queries only from the segment. No gradient enters the memory. Positions enter a score only as
the distance between query and key.

Shape letters: S tokens of the segment, M of the memory, K = M + S keys, B sequences, A heads on this rank, W head
width, D hidden size.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from fmoe import UserError
from fmoe.kernels.attention import relative_shift, sinusoids
from megatron_patch.sharded import Sliced


class PositionBiases(Sliced, nn.Module):
    """The learned vectors u and v of each head, which Transformer-XL adds to queries (arXiv 1901.02860, section 3.3).

    Args:
        config: config of the model.
        width: elements of a head.

    Attributes:
        content: u, added to queries for their products with keys; [heads on this rank * width].
        position: v, added to queries for their products with distances; [heads on this rank * width].
    """

    content: nn.Parameter
    position: nn.Parameter

    def __init__(self, config: TransformerConfig, width: int):
        super().__init__()
        size = config.tensor_model_parallel_size
        rank = parallel_state.get_tensor_model_parallel_rank()
        count = config.num_attention_heads * width
        for name in ("content", "position"):
            value = nn.Parameter(torch.empty(count // size, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(value, is_parallel=True, dim=0, stride=1)
            setattr(self, name, value)
            if not value.is_meta:
                whole = torch.empty(count, device="cpu", dtype=torch.float32)
                nn.init.normal_(whole, std=config.init_method_std)
                value.data.copy_(whole.chunk(size)[rank])

    def forward(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries [S, B, A, W] for products with keys, and those for products with distances."""
        # In a module's forward, because Megatron-core waits there for parameters whose gathering it overlaps.
        content, position = (bias.view(query.shape[-2:]) for bias in (self.content, self.position))
        return query + content, query + position


class RelativeAttention(SelfAttention):
    """Causal self attention with Transformer-XL's scores, over a memory and a segment.

    The score of query q, key k and projected distance encoding r is (q + u) k + (q + v) r, scaled. These are the terms
    (a) + (c) and (b) + (d) of arXiv 1901.02860, section 3.3. Each layer has its own u, v and projection.

    The core attention must accept an ``attention_bias``, as `megatron_patch.attention.SDPAttention` does.

    Attributes:
        memory: normalized hidden states before the segment [M, B, D], or a slice of them under sequence parallelism.
            None without memory. `RecurrentLayer` sets it.
    """

    memory: Tensor | None = None

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        plain = copy.copy(config)
        plain.sequence_parallel = False  # every rank has the encodings of all distances
        self.linear_position = ColumnParallelLinear(
            config.hidden_size,
            self.query_projection_size,
            config=plain,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            disable_grad_reduce=True,  # the encodings have no gradient
            tp_group=self.pg_collection.tp,
        )
        self.biases = PositionBiases(config, self.hidden_size_per_attention_head)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map normalized hidden states [S, B, D] to the output of attention and its bias.

        Args:
            attention_mask: [B, 1, S, S], True where a query must not see a key of the segment. Later keys are always
                hidden, memory never.
            options: other arguments of Megatron-core's attention, which must be None.

        Raises:
            UserError: an option is not None, such as ``inference_context`` or ``packed_seq_params``.
        """
        for name, value in options.items():
            if value is not None:
                raise UserError(
                    f"{name} is not supported with the relative positions of Transformer-XL: pass {name}=None"
                )
        query, key, value = self.get_query_key_value_tensors(hidden_states)[:3]
        if self.memory is not None:
            _, old_key, old_value = self.get_query_key_value_tensors(self.memory)[:3]
            key = torch.cat([old_key, key])
            value = torch.cat([old_value, value])
        length, _, heads, width = query.shape
        count = len(key)
        hidden = torch.ones(length, count, dtype=torch.bool, device=query.device).triu(1 + count - length)
        hidden = hidden[None, None]
        if attention_mask is not None:
            hidden = hidden | nn.functional.pad(attention_mask, (count - length, 0))
        for_contents, for_distances = self.biases(query)
        encodings = sinusoids(count, self.config.hidden_size, query.device).to(query.dtype)
        distances, _ = self.linear_position(encodings.unsqueeze(1))
        distances_AWK = distances.view(count, heads, width).permute(1, 2, 0)
        scores = relative_shift(for_distances.permute(1, 2, 0, 3) @ distances_AWK)
        out = self.core_attention(
            for_contents,
            key,
            value,
            hidden,
            attn_mask_type=self.attn_mask_type,
            attention_bias=scores * self.core_attention.softmax_scale,
        )
        return self.linear_proj(out)


class RecurrentLayer(TransformerLayer):
    """Transformer layer that attends to a memory of earlier inputs, and keeps its input for the next segment.

    Attributes:
        memory_length: number of hidden states to keep.
        past: hidden states before the segment [M, B, D]; None without memory.
        present: the last ``memory_length`` hidden states of memory and segment, after a forward pass.
    """

    memory_length = 0
    past: Tensor | None = None
    present: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Run the layer on hidden states [S, B, D]; arguments and result as in `TransformerLayer`."""
        attention: Any = self.self_attention
        past = self.past
        if self.memory_length:
            with torch.no_grad():
                states = hidden_states.detach()
                if self.config.sequence_parallel:
                    states = gather_from_sequence_parallel_region(states)
                if past is not None:
                    states = torch.cat([past, states])
                self.present = states[-self.memory_length :].clone()  # a view would hold all of them
        if past is not None and self.config.sequence_parallel:
            past = past.chunk(self.config.tensor_model_parallel_size)[parallel_state.get_tensor_model_parallel_rank()]
        # The weights of the norm get their gradient from memory and segment, as all weights of keys and values do.
        attention.memory = None if past is None else self.input_layernorm(past)
        try:
            return super().forward(hidden_states, *args, **options)
        finally:
            attention.memory = None


class StreamMemory:
    """Memory of several streams of text, which a model reads side by side, segment after segment.

    Sequences are numbered: sequence n is the next segment of stream ``n % streams``. A micro batch holds consecutive
    sequences. For every segment, the micro batches must begin with the same streams.

    Args:
        model: model, or pipeline chunk of it, with layers of type `RecurrentLayer`.
        length: hidden states per layer and stream.
        streams: number of streams.

    Attributes:
        states: memory of each layer [M, B, D], keyed by the first stream of a micro batch; empty before the first step.
    """

    def __init__(self, model: nn.Module, length: int, streams: int):
        self.layers = [module for module in model.modules() if isinstance(module, RecurrentLayer)]
        self.length = length
        self.streams = streams
        self.states: dict[int, list[Tensor]] = {}
        self._stream: int | None = None

    def enter(self, first: int, is_start: bool = False, size: int | None = None) -> None:
        """Give the layers the memory of a micro batch, until the next call or `leave`.

        The memory remains after the forward pass, because recomputation in the backward pass needs it.

        Args:
            first: number of the first sequence of the micro batch.
            is_start: restart the streams without memory.
            size: number of sequences of the micro batch; None if all micro batches have the same number.
        """
        self.leave()
        self._stream = first % self.streams
        past: Sequence[Tensor | None] = self.states.get(self._stream, ())
        if is_start or not past:
            past = [None] * len(self.layers)
        for layer, state in zip(self.layers, past, strict=True):
            layer.memory_length = self.length
            layer.present = None
            layer.past = None if state is None else state[:, :size]

    def leave(self) -> None:
        """Store the memory that the layers made since `enter`, and clear it in the layers."""
        if self._stream is None:
            return
        present = [layer.present for layer in self.layers if layer.present is not None]
        if len(present) == len(self.layers):  # unless an error ended the forward pass
            self.states[self._stream] = present
        for layer in self.layers:
            layer.memory_length = 0
            layer.past = layer.present = None
        self._stream = None
