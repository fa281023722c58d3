"""Models of recipes with ``kind = "gpt"`` as classes of Hugging Face transformers, without Megatron-core.

``fmoe export --format fmoe`` copies this file into the exported folder. Importing
``pretrain.interchange.modeling_fmoe`` registers the model with `AutoModelForCausalLM`.

Shape letters: B sequences, S tokens of each, P past tokens (in the cache), K = P + S keys, D hidden size, H heads, G
heads of keys and values, d width of a head, r rotated elements of a head, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
)
from transformers import PreTrainedModel as TransformersModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from fmoe import collect_losses
from fmoe.errors import UserError
from fmoe.experts import FFNExperts, truncated_normal_
from fmoe.experts.ffn import ACTIVATIONS, GATED_ACTIVATIONS
from fmoe.gates import ExpertChoiceRouter, Router
from fmoe.kernels import glu
from fmoe.kernels.attention import causal_attention, relative_shift, sinusoids, visible
from fmoe.random import key
from fmoe.runtime.versions import warn_untested
from pretrain.config import ModelConfig, Recipe, build_recipe
from pretrain.config.layer import build_layer
from pretrain.config.yarn import rotary_factor, rotary_frequencies, score_factor

Rotary = tuple[Tensor, Tensor]  # cosines and sines of the positions, [B, S, 1, r]
warn_untested("transformers")
# Name of the cache in the outputs of the installed transformers, which renamed it in version 5.24.
CACHE = "cache" if "cache" in MoeCausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class FMoEConfig(PretrainedConfig):
    """Configuration of `FMoEForCausalLM`.

    Args:
        model: the section ``[model]`` of a recipe; missing keys have the recipe's defaults.
        vocab_size: replaces ``vocab_size`` of ``model``, for `resize_token_embeddings`.
        use_cache: whether forward passes outside of training return a cache by default.
        options: arguments of transformers' base class. Attributes that ``model`` determines, such as ``hidden_size``,
            must have its values.

    Raises:
        UserError: an unknown key or an invalid value in ``model``; an option that is unknown, or contradicts ``model``.
    """

    model_type = "fmoe"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 - Trainer adds a list

    def __init__(
        self,
        model: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
        use_cache: bool = True,
        **options: Any,
    ):
        self.model = dict(model or {})
        if vocab_size is not None:
            self.model["vocab_size"] = vocab_size
        Recipe(model=self.recipe_model).check()
        derived = self.derived()
        self.refuse_contradictions(options)
        for name, value in options.items():
            if name not in derived and name not in _base_options() and not name.startswith("_"):
                raise UserError(f"{name}={value!r} is not an option of FMoEConfig; recipe keys belong in model={{...}}")
        super().__init__(**{**options, **derived})
        self.use_cache = use_cache

    @property
    def recipe_model(self) -> ModelConfig:
        """The model's sections of the recipe."""
        model = self.model
        if "vocab_size" in vars(self):  # resize_token_embeddings changes it
            model = {**model, "vocab_size": self.vocab_size}
        return build_recipe({"model": model}).model

    def derived(self) -> dict[str, Any]:
        """Return the attributes that ``model`` determines, which transformers and its tools read."""
        recipe = self.recipe_model
        return {
            "vocab_size": recipe.vocab_size,
            "hidden_size": recipe.hidden_size,
            "num_hidden_layers": recipe.num_layers,
            "num_attention_heads": recipe.attention.num_heads,
            "num_key_value_heads": recipe.query_groups,
            "head_dim": recipe.head_width,
            "max_position_embeddings": recipe.sequence_length,
            "initializer_range": recipe.init_std,
            "tie_word_embeddings": recipe.tie_embeddings,
        }

    def refuse_contradictions(self, values: Mapping[str, Any]) -> None:
        """Raise UserError if ``values`` has another value of an attribute that ``model`` determines."""
        for name, value in self.derived().items():
            if values.get(name, value) != value:
                raise UserError(f"{name}={values[name]!r} contradicts model, by which it is {value!r}: change model")


@functools.cache
def _base_options() -> set[str]:
    """Return the names of attributes that transformers defines for every configuration, or reads from config.json."""
    names = {"attn_implementation", "auto_map", "experts_implementation", "quantization_config", "tokenizer_class"}
    names |= {*dir(PretrainedConfig()), *dir(GenerationConfig())}
    keys = {name.rpartition(".")[2] for name in ModelConfig().values()}
    return names - keys  # such as top_k, also a setting of generation


def _norm(model: ModelConfig, width: int) -> nn.Module:
    norm = nn.LayerNorm if model.norm == "layer" else nn.RMSNorm
    return norm(width, eps=model.norm_eps)


def _init_methods(model: ModelConfig) -> tuple[Callable[[Tensor], object], Callable[[Tensor], object]]:
    """Return two initializers: for most matrices, and for the output matrices of attention, MLPs and experts."""
    if model.init == "switch":
        return truncated_normal_, truncated_normal_
    output_std = model.init_std / (2 * model.num_layers) ** 0.5
    return functools.partial(nn.init.normal_, std=model.init_std), functools.partial(nn.init.normal_, std=output_std)


class _Linear(nn.Linear):
    """A linear layer whose weights have the recipe's initial distribution."""

    def __init__(self, model: ModelConfig, inputs: int, outputs: int, *, bias: bool = False, is_output: bool = False):
        super().__init__(inputs, outputs, bias=bias)
        self.init_method = _init_methods(model)[is_output]


class _Attention(nn.Module):
    """Causal attention. Subclasses compute queries [B, S, H, d], keys [B, S, G, d] and values [B, S, G, ...]."""

    def __init__(self, model: ModelConfig, index: int):
        super().__init__()
        self.index = index
        self.dropout = model.dropout
        attention = model.attention
        self.scale = model.head_width**-0.5 if attention.scale is None else attention.scale
        self.scale *= score_factor(model)
        width = attention.num_heads * model.value_width
        self.linear_proj = _Linear(model, width, model.hidden_size, bias=attention.output_bias, is_output=True)
        self.window = attention.sliding_window if index + 1 in model.layers_with_window else None
        self.stride = attention.sliding_stride
        sinks = {"softmax_offset": nn.Parameter(torch.zeros(attention.num_heads))} if attention.sinks else {}
        self.core_attention = nn.ParameterDict(sinks)  # named as in a checkpoint

    def project(self, x_BSD: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def project_all(self, x_BSD: Tensor, rotary: Rotary | None, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H, S, d], and keys and values of cached and new tokens [B, G, K, ...]."""
        query, keys, values = (x.transpose(1, 2) for x in self.project(x_BSD, rotary))
        if cache is None:
            return query, keys, values
        count = cache.get_seq_length(self.index) + keys.shape[2]
        keys, values = cache.update(keys, values, self.index)
        if keys.shape[2] != count:
            raise UserError(
                f"{type(cache).__name__} kept {keys.shape[2]} of {count} tokens, but the model needs all: "
                "use DynamicCache(config=model.config)"
            )
        return query, keys, values

    def forward(self, x_BSD: Tensor, rotary: Rotary | None, mask: Tensor | None, cache: Cache | None) -> Tensor:
        """Return the output of attention, [B, S, D].

        Args:
            mask: bool [B or 1, 1, S, K], True where a query sees a key; None for causal attention.
        """
        query, keys, values = self.project_all(x_BSD, rotary, cache)
        y = causal_attention(
            query,
            keys,
            values,
            scale=self.scale,
            window=self.window,
            stride=self.stride,
            sinks_H=self.core_attention.get("softmax_offset"),
            seen=mask,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.linear_proj(y.transpose(1, 2).flatten(2))


class GroupedQueryAttention(_Attention):
    """Grouped-query attention.

    The rows of ``linear_qkv`` are ordered by key/value head: the head's queries, its key, its value.
    """

    def __init__(self, model: ModelConfig, index: int):
        super().__init__(model, index)
        self.width = model.head_width
        self.groups = model.query_groups
        self.queries = model.attention.num_heads // self.groups
        num_rows = (model.attention.num_heads + 2 * self.groups) * self.width
        self.linear_qkv = _Linear(model, model.hidden_size, num_rows, bias=model.attention.qkv_bias)
        self.norms_all = model.attention.qk_norm_over == "all"
        self.q_layernorm: nn.Module = nn.Identity()
        self.k_layernorm: nn.Module = nn.Identity()
        if model.attention.qk_norm:
            self.q_layernorm = _norm(model, self.width * (model.attention.num_heads if self.norms_all else 1))
            self.k_layernorm = _norm(model, self.width * (self.groups if self.norms_all else 1))

    def project(self, x_BSD: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.linear_qkv(x_BSD).unflatten(-1, (self.groups, self.queries + 2, self.width))
        query, keys, values = (part.flatten(2, 3) for part in rows.split([self.queries, 1, 1], dim=3))
        if self.norms_all:
            query = self.q_layernorm(query.flatten(2)).unflatten(-1, (-1, self.width))
            keys = self.k_layernorm(keys.flatten(2)).unflatten(-1, (-1, self.width))
        else:
            query = self.q_layernorm(query)
            keys = self.k_layernorm(keys)
        return _rotated(query, rotary), _rotated(keys, rotary), values


class MultiLatentAttention(_Attention):
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1).

    The cache holds each head's keys and values, not the compressed ones.
    """

    def __init__(self, model: ModelConfig, index: int):
        super().__init__(model, index)
        attention = model.attention
        assert (
            attention.kv_lora_rank is not None
            and attention.qk_rope_head_dim is not None
            and attention.qk_head_dim is not None
        )
        self.heads = attention.num_heads
        self.rank = attention.kv_lora_rank
        self.widths = attention.qk_head_dim, attention.qk_rope_head_dim, model.value_width
        self.has_query_rank = attention.q_lora_rank is not None
        width = model.hidden_size
        if attention.q_lora_rank is None:
            self.linear_q_proj = _Linear(model, width, self.heads * model.head_width)
        else:
            self.linear_q_down_proj = _Linear(model, width, attention.q_lora_rank)
            self.q_layernorm = _norm(model, attention.q_lora_rank)
            self.linear_q_up_proj = _Linear(model, attention.q_lora_rank, self.heads * model.head_width)
        self.linear_kv_down_proj = _Linear(model, width, self.rank + attention.qk_rope_head_dim)
        self.kv_layernorm = _norm(model, self.rank)
        self.linear_kv_up_proj = _Linear(model, self.rank, self.heads * (attention.qk_head_dim + model.value_width))

    def project(self, x_BSD: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        plain, rope, value = self.widths
        if self.has_query_rank:
            query = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(x_BSD)))
        else:
            query = self.linear_q_proj(x_BSD)
        q_plain, q_rope = query.unflatten(-1, (self.heads, plain + rope)).split([plain, rope], dim=-1)
        latent, k_rope = self.linear_kv_down_proj(x_BSD).split([self.rank, rope], dim=-1)
        both = self.linear_kv_up_proj(self.kv_layernorm(latent)).unflatten(-1, (self.heads, plain + value))
        k_plain, values = both.split([plain, value], dim=-1)
        q_rope = _rotated(_pairs_apart(q_rope), rotary)
        k_rope = _rotated(_pairs_apart(k_rope.unsqueeze(2)), rotary).expand(-1, -1, self.heads, -1)
        return torch.cat([q_plain, q_rope], dim=-1), torch.cat([k_plain, k_rope], dim=-1), values


class QueryBiases(nn.Module):
    """Transformer-XL's biases of queries: u (``content``) and v (``position``), [H * d] each."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.std = model.init_std
        self.shape = model.attention.num_heads, 1, model.head_width
        self.content = nn.Parameter(torch.empty(model.attention.num_heads * model.head_width))
        self.position = nn.Parameter(torch.empty(model.attention.num_heads * model.head_width))

    def reset_parameters(self) -> None:
        for bias in self.parameters():
            nn.init.normal_(bias, std=self.std)

    def forward(self, query_BHSd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries plus Transformer-XL's bias u, for content scores, and plus v, for distance scores."""
        content, position = (bias.to(query_BHSd.dtype).view(self.shape) for bias in (self.content, self.position))
        return query_BHSd + content, query_BHSd + position


class TransformerXLAttention(GroupedQueryAttention):
    """Attention with Transformer-XL's scores (arXiv 1901.02860 section 3.3).

    The input is one segment. With ``memory_length``, queries see their segment and the last ``memory_length`` cached
    positions.

    The cache holds keys and values, where Transformer-XL's memory holds hidden states. The results are equal, because
    keys and values are computed from each position alone.
    """

    def __init__(self, model: ModelConfig, index: int):
        super().__init__(model, index)
        self.memory_length = model.position.memory_length
        self.linear_position = _Linear(model, model.hidden_size, model.attention.num_heads * model.head_width)
        self.biases = QueryBiases(model)

    def forward(self, x_BSD: Tensor, rotary: Rotary | None, mask: Tensor | None, cache: Cache | None) -> Tensor:
        query, keys, values = self.project_all(x_BSD, rotary, cache)
        length = query.shape[2]
        if self.memory_length:
            keys, values = (x[:, :, -self.memory_length - length :] for x in (keys, values))
        count = keys.shape[2]
        seen = visible(length, count, None, x_BSD.device) if mask is None else mask[..., -count:]
        for_contents, for_distances = self.biases(query)
        encodings_KD = sinusoids(count, x_BSD.shape[2], x_BSD.device).to(x_BSD.dtype)
        distances_HdK = self.linear_position(encodings_KD).unflatten(1, (-1, self.width)).permute(1, 2, 0)
        scores = relative_shift(for_distances @ distances_HdK) * self.scale
        y = F.scaled_dot_product_attention(
            for_contents,
            keys,
            values,
            attn_mask=scores.masked_fill(~seen, -torch.inf),
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            enable_gqa=for_contents.shape[1] != keys.shape[1],
        )
        return self.linear_proj(y.transpose(1, 2).flatten(2))


def _rotated(x_BSHd: Tensor, rotary: Rotary | None) -> Tensor:
    """Apply rotary positions to the first r elements of each head, in pairs (i, i + r / 2)."""
    if rotary is None:
        return x_BSHd
    cos, sin = (part.to(x_BSHd.dtype) for part in rotary)
    width = cos.shape[-1]
    x = x_BSHd[..., :width]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([x * cos + torch.cat([-second, first], dim=-1) * sin, x_BSHd[..., width:]], dim=-1)


def _pairs_apart(x: Tensor) -> Tensor:
    """Move elements 2 i and 2 i + 1 of the last axis, of length d, to i and i + d / 2, where `_rotated` pairs them."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


class DenseMLP(nn.Module):
    """Feed-forward block of a layer without experts. In ``linear_fc1``, a gated block has the gate's rows first."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.activation = (ACTIVATIONS | GATED_ACTIVATIONS)[model.activation]
        self.gated = model.gated
        self.linear_fc1 = _Linear(model, model.hidden_size, model.dense_width * (1 + model.gated))
        self.linear_fc2 = _Linear(model, model.dense_width, model.hidden_size, is_output=True)

    def forward(self, x_BSD: Tensor, mask_BS: Tensor | None = None) -> Tensor:
        hidden = self.linear_fc1(x_BSD)
        return self.linear_fc2(glu.gate(self.activation, hidden) if self.gated else self.activation(hidden))


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: attention, then experts or a dense feed-forward block."""

    def __init__(self, model: ModelConfig, number: int):
        super().__init__()
        attention: type[_Attention] = GroupedQueryAttention
        if model.attention.kv_lora_rank is not None:
            attention = MultiLatentAttention
        elif model.position.encoding == "transformer_xl":
            attention = TransformerXLAttention
        self.dropout = nn.Dropout(model.dropout)
        self.scale = model.residual_scale
        self.input_layernorm = _norm(model, model.hidden_size)
        self.self_attention = attention(model, number - 1)
        self.pre_mlp_layernorm = _norm(model, model.hidden_size)
        self.mlp: nn.Module
        if number in model.layers_with_experts:
            self.mlp = build_layer(
                model,
                init_methods=_init_methods(model),
                aux_loss="manual",
                name=f"layer {number}",
                seed=key("layer", 0, number),
            )
        else:
            self.mlp = DenseMLP(model)

    def forward(
        self, x_BSD: Tensor, rotary: Rotary | None, mask: Tensor | None, cache: Cache | None, valid_BS: Tensor | None
    ) -> Tensor:
        attended = self.self_attention(self.input_layernorm(x_BSD), rotary, mask, cache)
        x_BSD = x_BSD + self.dropout(attended * self.scale)
        return x_BSD + self.dropout(self.mlp(self.pre_mlp_layernorm(x_BSD), valid_BS) * self.scale)


class FMoEForCausalLM(TransformersModel, GenerationMixin):
    """A GPT with the same logits as in ``fmoe evaluate`` and the same greedy texts as from ``fmoe generate``.

    `generate` lifts the limit of ``eval_capacity_factor``, as ``fmoe generate`` does. With the limit, the output for a
    token would depend on later tokens.

    In training mode, the loss includes the recipe's balance loss and z-loss. Noise and dropout have the recipe's
    strength. Unlike in ``fmoe train``, their random numbers are not derived from step and token.
    """

    decoder: Any  # the type of nn.ModuleDict lacks its modules' types
    config_class = FMoEConfig
    accepts_loss_kwargs = False  # Trainer divides the loss, with its balance losses, by the accumulation steps
    _supports_sdpa = True
    _skip_keys_device_placement = ("cache", "past_key_values")
    _no_split_modules = ("DecoderLayer",)
    _keep_in_fp32_modules_strict = ("expert_bias_E",)
    _tied_weights_keys = {"output_layer.weight": "embedding.word_embeddings.weight"}  # noqa: RUF012 - transformers' form

    def __init__(self, config: FMoEConfig):
        config.refuse_contradictions(vars(config))  # such as an argument of from_pretrained
        super().__init__(config)
        model = config.recipe_model
        self.recipe_model = model
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(model.vocab_size, model.hidden_size)})
        if model.position.encoding == "learned_absolute":
            self.embedding["position_embeddings"] = nn.Embedding(model.sequence_length, model.hidden_size)
        self.dropout = nn.Dropout(model.dropout)
        self.decoder = nn.ModuleDict(
            {
                "layers": nn.ModuleList(DecoderLayer(model, n + 1) for n in range(model.num_layers)),
                "final_layernorm": _norm(model, model.hidden_size),
            }
        )
        self.output_layer = nn.Linear(model.hidden_size, model.vocab_size, bias=model.output_bias)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        if isinstance(module, Router | FFNExperts | QueryBiases):
            module.reset_parameters()
        elif isinstance(module, _Linear):
            module.init_method(module.weight)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.ParameterDict):
            for value in module.values():
                value.zero_()
        else:
            super()._init_weights(module)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        past_key_values: Cache | None = None,
    ) -> MoeCausalLMOutputWithPast:
        """Return logits [B, S, V], and the loss if there are labels.

        Args:
            input_ids: [B, S].
            attention_mask: [B, K], 0 for padding, which is neither seen nor routed. Padding may be on either side.
            position_ids: [B, S]; by default, the number of earlier tokens that are not padding. Only learned and rotary
                positions use them. Positions must increase: a row holds one document.
            cache: transformers' `DynamicCache`; caches of fixed length are not supported. With ``memory_length``, the
                input is a segment, and the last positions of the cache are its memory.
            inputs_embeds: [B, S, D], in place of ``input_ids``.
            labels: [B, S], not shifted: usually ``input_ids``. A label of -100 is left out of the loss.
            use_cache: return a cache. None for the configuration's value, except that there is no cache in training
                mode or if a token's output depends on later tokens.
            logits_to_keep: number of last positions whose logits are returned; 0 for all.
            output_hidden_states: return the input of each layer and the last layer's output after the final norm. None
                for the configuration's value.
            output_attentions: not supported; must be None or False.
            past_key_values: the name of ``cache`` before transformers 5.24.

        Raises:
            UserError: both names of the cache are given. Both or none of ``input_ids`` and ``inputs_embeds`` are given.
                The cache is of another kind than `DynamicCache`. A cache is used although `looks_ahead` names a
                setting. A cache is used in training, and ``memory_length`` is set. ``attention_mask`` has another
                shape. ``attention_mask`` has padding between tokens, and positions are relative. There are more tokens
                than learned positions. An argument that has no effect does not have its default.
        """
        cache = _one_cache(cache, past_key_values)
        past = self._check_inputs(input_ids, inputs_embeds, cache, output_attentions)
        x_BSD = self.embedding["word_embeddings"](input_ids) if inputs_embeds is None else inputs_embeds
        batch, length = x_BSD.shape[:2]
        cache = self._cache_to_use(cache, past, use_cache)
        if attention_mask is not None and attention_mask.shape != (batch, past + length):
            shape = tuple(attention_mask.shape)
            raise UserError(f"attention_mask has shape {shape}; it must be [B, K]={(batch, past + length)}")
        seen_BK = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        position_BS = self._positions(position_ids, seen_BK, past, length, x_BSD.device)

        x_BSD = x_BSD * self.recipe_model.embedding_scale
        if "position_embeddings" in self.embedding:
            x_BSD = x_BSD + self.embedding["position_embeddings"](position_BS)
        x_BSD = self.dropout(x_BSD)
        rotary = None
        if self.recipe_model.position.encoding == "rope":
            angles = position_BS.float().unsqueeze(-1) * rotary_frequencies(self.recipe_model, position_BS.device)
            angles = torch.cat([angles, angles], dim=-1).unsqueeze(2)
            factor = rotary_factor(self.recipe_model)
            rotary = (angles.cos() * factor, angles.sin() * factor)
        needs_mask = seen_BK is not None or (past > 0 and length > 1)
        mask = _mask(seen_BK, past, length, x_BSD.device) if needs_mask else None
        valid_BS = None if seen_BK is None else seen_BK[:, past:]
        states = []
        for layer in self.decoder["layers"]:
            states.append(x_BSD)
            x_BSD = layer(x_BSD, rotary, mask, cache, valid_BS)
        x_BSD = self.decoder["final_layernorm"](x_BSD) / self.recipe_model.logit_divisor
        logits = self.output_layer(x_BSD[:, -logits_to_keep:] if logits_to_keep else x_BSD)

        aux_loss = collect_losses(self) if self.training else None
        loss = None if labels is None else _loss(logits, labels)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return MoeCausalLMOutputWithPast(
            loss=loss if loss is None or aux_loss is None else loss + aux_loss,
            aux_loss=aux_loss,
            logits=logits,
            hidden_states=(*states, x_BSD) if wants_states else None,
            **{CACHE: cache},
        )

    def _check_inputs(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        cache: Cache | None,
        output_attentions: bool | None,
    ) -> int:
        """Return the number of cached tokens."""
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("input_ids and inputs_embeds: pass exactly one of them")
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise UserError("output_attentions=True is not supported: attention weights are not computed")
        if cache is None:
            return 0
        if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache) or cache.is_compileable:
            raise UserError(f"{type(cache).__name__} is not supported: use transformers' DynamicCache")
        return int(cache.get_seq_length())

    def _cache_to_use(self, cache: Cache | None, past: int, use_cache: bool | None) -> Cache | None:
        """Return the given cache or a new one; None to use none."""
        reason = self.looks_ahead()
        if reason and (cache is not None or use_cache):
            raise UserError(
                f"a cache is not supported with {reason}: pass use_cache=False and {CACHE}=None; generate() ignores "
                "eval_capacity_factor"
            )
        if past and self.recipe_model.position.memory_length and self.training and torch.is_grad_enabled():
            # The memory has no gradient, but the weights of its keys and values have.
            raise UserError(f"training with a cache is not supported with {self._memory}: use {CACHE}=None")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return DynamicCache(config=self.config) if cache is None and use_cache and not reason else cache

    def _positions(
        self, position_BS: Tensor | None, seen_BK: Tensor | None, past: int, length: int, device: torch.device
    ) -> Tensor:
        """Return the positions of tokens [B or 1, S]: ``position_BS`` if it is not None, after a check.

        On a GPU, each check waits for the result, so there is at most one per argument.
        """
        is_relative = self.recipe_model.position.encoding == "transformer_xl"
        if seen_BK is None:
            counted_BS = torch.arange(past, past + length, device=device, dtype=torch.int64).unsqueeze(0)
        else:
            counted_BS = (seen_BK.long().cumsum(1) - 1).clamp(min=0)[:, past:]
            if is_relative and ((seen_BK & ~F.pad(seen_BK, (1, -1))).sum(1) > 1).any():
                raise UserError(
                    "attention_mask has padding between tokens, which is not supported with "
                    "position.encoding=transformer_xl: pad on the left"
                )
        if position_BS is not None:
            valid_BS = torch.ones_like(position_BS, dtype=torch.bool) if seen_BK is None else seen_BK[:, past:]
            if is_relative:
                if ((position_BS != counted_BS) & valid_BS).any():
                    raise UserError("position_ids have no effect with position.encoding=transformer_xl: omit them")
            elif length > 1 and ((position_BS.diff(dim=1) <= 0) & valid_BS[:, 1:] & valid_BS[:, :-1]).any():
                raise UserError("position_ids must increase: several documents in one row are not supported")
        else:
            position_BS = counted_BS
        limit = self.config.max_position_embeddings
        if "position_embeddings" in self.embedding and past + length > limit:
            last = int(position_BS.max())
            if last >= limit:
                raise UserError(
                    f"position {last} exceeds the model's last learned position, {limit - 1}: use fewer tokens"
                )
        return position_BS

    def generate(
        self, *args: Any, cache: Cache | None = None, past_key_values: Cache | None = None, **options: Any
    ) -> Any:
        """Generate as transformers does, without the experts' capacity limit.

        Args:
            cache, past_key_values: two names of the cache, as in `forward`.

        Raises:
            UserError: the gate is ``expert_choice``, which chooses among all tokens of a sequence; with
                ``memory_length``, generation is assisted or reads the prompt in chunks; both names of the cache are
                given.
        """
        cache = _one_cache(cache, past_key_values)
        if cache is not None:
            options[CACHE] = cache
        with self._without_limits():
            reason = self.looks_ahead()
            if reason:
                raise UserError(f"token-by-token generation is not supported with {reason}")
            return super().generate(*args, **options)

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # transformers reads the names of its arguments
    def prepare_inputs_for_generation(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the arguments of the next forward pass, as transformers does.

        Raises:
            UserError: ``memory_length`` is set and there is no cache: the whole text would be one segment.
        """
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **options)
        inputs.pop("cache_position", None)  # of transformers before 5.4; `forward` computes it
        has_cache = inputs.get(CACHE) is not None or inputs.get("use_cache")  # the first pass may create it
        if self.recipe_model.position.memory_length and not has_cache:
            raise UserError(f"generation with use_cache=False is not supported with {self._memory}")
        return inputs

    def _validate_generation_mode(self, mode: Any, settings: GenerationConfig, options: dict[str, Any]) -> None:
        super()._validate_generation_mode(mode, settings, options)
        in_segments = settings.prefill_chunk_size or mode == "assisted_generation"
        if in_segments and self.recipe_model.position.memory_length:  # a segment sees more of itself than of the memory
            raise UserError(f"prefill_chunk_size and assisted generation are not supported with {self._memory}")

    @property
    def _memory(self) -> str:
        return f"position.memory_length={self.recipe_model.position.memory_length}"

    def looks_ahead(self) -> str:
        """Return the setting by which a token's output depends on later tokens; empty if there is none."""
        for gate in self._gates():
            if isinstance(gate, ExpertChoiceRouter):
                return "gate=expert_choice"
            factor = gate.eval_capacity_factor
            if not self.training and factor is not None and factor * gate.top_k < gate.num_experts:
                return f"eval_capacity_factor={factor}, which drops tokens"
        return ""

    @contextlib.contextmanager
    def _without_limits(self) -> Iterator[None]:
        limited = [gate for gate in self._gates() if not isinstance(gate, ExpertChoiceRouter)]
        factors = [gate.eval_capacity_factor for gate in limited]
        try:
            for gate in limited:
                gate.eval_capacity_factor = None
            yield
        finally:
            for gate, factor in zip(limited, factors, strict=True):
                gate.eval_capacity_factor = factor

    def _gates(self) -> list[Router]:
        return [module for module in self.decoder.modules() if isinstance(module, Router)]

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding["word_embeddings"]

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding["word_embeddings"] = value

    def get_output_embeddings(self) -> nn.Module:
        return self.output_layer

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.output_layer = new_embeddings


def _one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    if cache is not None and past_key_values is not None:
        raise UserError("cache and past_key_values are two names of one argument: pass one of them")
    return past_key_values if cache is None else cache


def _mask(seen_BK: Tensor | None, past: int, length: int, device: torch.device) -> Tensor:
    """Return the attention mask, bool [B or 1, 1, S, K], True where a query sees a key."""
    query_S1 = torch.arange(past, past + length, device=device, dtype=torch.int64).unsqueeze(1)
    key_K = torch.arange(past + length, device=device, dtype=torch.int64)
    causal_SK = key_K <= query_S1
    if seen_BK is None:
        return causal_SK[None, None]
    # Every query sees itself, because padding that sees nothing would give NaN.
    return ((causal_SK & seen_BK.unsqueeze(1)) | (key_K == query_S1)).unsqueeze(1)


def _loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    targets = labels_BS[:, 1:].to(logits_BSV.device).flatten()
    return F.cross_entropy(logits_BSV[:, :-1].float().flatten(0, 1), targets, ignore_index=-100)


if __name__ == "pretrain.interchange.modeling_fmoe":  # not in a copy, which a config.json names
    AutoConfig.register("fmoe", FMoEConfig)
    AutoModelForCausalLM.register(FMoEConfig, FMoEForCausalLM)
    FMoEConfig.register_for_auto_class()  # save_pretrained copies this file
    FMoEForCausalLM.register_for_auto_class("AutoModelForCausalLM")
