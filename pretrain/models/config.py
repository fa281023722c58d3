"""Megatron-core's configuration of a recipe's model."""

import warnings
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import init_method_normal

from fmoe.experts import truncated_normal_
from fmoe.experts.ffn import ACTIVATIONS, GATED_ACTIVATIONS
from fmoe.kernels.glu import SwiGLUOAI
from megatron_patch.qk_norm import norm_all_heads
from pretrain.config import ModelConfig, Recipe
from pretrain.models.yarn import prepare_yarn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}


def transformer_config(recipe: Recipe, **options) -> TransformerConfig:
    """Return Megatron-core's configuration of the model, without its experts.

    Args:
        options: further fields of the configuration. ``num_layers`` replaces the recipe's.
    """
    model = recipe.model
    dtype = DTYPES[recipe.train.precision]
    with warnings.catch_warnings():
        # Megatron-core deprecates its own default for a field of CUDA graphs.
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        return _transformer_config(model, dtype, {**_split(recipe), **options})


def own_norms(layer_spec: ModuleSpec, model: ModelConfig) -> None:
    """Set the recipe's norms in a layer spec, in place.

    Args:
        layer_spec: a copy of one of Megatron-core's layer specs.
    """
    parts = layer_spec.submodules
    if model.norm == "rms":  # NVIDIA apex's norm, which Megatron-core prefers, is not RMSNorm
        for name in ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm"):
            if getattr(parts, name) is not IdentityOp:
                setattr(parts, name, WrappedTorchNorm)
    if model.attention.qk_norm and model.attention.qk_norm_over == "all":
        parts.self_attention.module = norm_all_heads(parts.self_attention.module)
    elif model.attention.qk_norm:
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = WrappedTorchNorm
    if model.attention.kv_lora_rank is not None:
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.kv_layernorm = WrappedTorchNorm


def norm_class(model: ModelConfig) -> type | None:
    """Return the class of norms outside of layers, such as the final norm; None for Megatron-core's choice."""
    return WrappedTorchNorm if model.norm == "rms" else None


def set_rope_theta(module: Any, recipe: Recipe) -> None:
    """Set the base of the rotary positions of a T5Model or BertModel, whose constructors have no ``rotary_base``."""
    model = recipe.model
    if model.position.encoding == "rope":
        module.rotary_pos_emb = RotaryEmbedding(
            kv_channels=model.head_width,
            rotary_percent=model.position.rotary_fraction,
            rotary_base=model.position.rope_theta,
            use_cpu_initialization=module.config.use_cpu_initialization,
        )


def _split(recipe: Recipe) -> dict:
    """Return the `TransformerConfig` fields that ``[parallel]`` sets, except those for expert parallelism."""
    parallel = recipe.parallel
    layout: dict[str, Any] = {}
    if not parallel.has_equal_stages:
        kinds = [["decoder"] * number for number in recipe.stage_layers]
        kinds[0].insert(0, "embedding")
        kinds[-1] += ["mtp"] * recipe.model.mtp_layers + ["loss"]
        layout["pipeline_model_parallel_layout"] = kinds
    recompute: dict[str, dict[str, Any]] = {
        "none": {},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    }
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.is_sequence_parallel,
        "context_parallel_size": parallel.context,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if parallel.model_chunks > 1 else None,
        # With batched messages, Megatron-core confuses forward and backward messages between the same two stages: if
        # there are only two stages, the next stage is also the previous one.
        "batch_p2p_comm": parallel.model_chunks == 1,
        "overlap_p2p_comm": parallel.model_chunks > 1,
        **recompute[parallel.recompute],
        **layout,
    }


def _latent_fields(model: ModelConfig) -> dict[str, Any]:
    attention = model.attention
    return {
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_head_dim": attention.qk_head_dim,
        "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "rope_type": "rope",
        "rotary_base": model.position.rope_theta,
        "rotary_scaling_factor": 1.0,
    }


def _local_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the `TransformerConfig` fields of attention windows, attention sinks and the activation ``swiglu_oai``."""
    fields: dict[str, Any] = {"softmax_type": "learnable"} if model.attention.sinks else {}
    if model.attention.sliding_window is not None:
        fields["window_size"] = (model.attention.sliding_window - 1, 0)
        fields["window_attn_skip_freq"] = [int(n in model.layers_with_window) for n in range(1, model.num_layers + 1)]
    if model.activation == "swiglu_oai":  # for layers without experts
        fields |= {"activation_func_clamp_value": SwiGLUOAI.limit, "glu_linear_offset": 1.0}
    return fields


def _transformer_config(model: ModelConfig, dtype: torch.dtype, options: dict) -> TransformerConfig:
    attention = model.attention
    is_latent = attention.kv_lora_rank is not None
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        num_layers=options.pop("num_layers", model.num_layers),
        hidden_size=model.hidden_size,
        num_attention_heads=attention.num_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_width,
        qk_layernorm=attention.qk_norm and attention.qk_norm_over == "head",  # see norm_all_heads
        softmax_scale=attention.scale,
        normalization=_NORMS[model.norm],
        layernorm_epsilon=model.norm_eps,
        # For the dense blocks; `pretrain.engine.model` sets the width of experts.
        ffn_hidden_size=model.dense_width,
        activation_func=(ACTIVATIONS | GATED_ACTIVATIONS)[model.activation],
        gated_linear_unit=model.gated,
        add_bias_linear=model.linear_bias,
        add_qkv_bias=attention.qkv_bias,
        mtp_num_layers=model.mtp_layers or None,
        mtp_loss_scaling_factor=model.mtp_loss,
        attention_dropout=model.dropout,
        hidden_dropout=model.dropout,
        init_method_std=model.init_std,
        # None for normal weights, which embeddings and output layer always have.
        init_method=truncated_normal_ if model.init == "switch" else None,
        output_layer_init_method=truncated_normal_ if model.init == "switch" else None,
        embedding_init_method=init_method_normal(model.init_std),
        # Initialize whole matrices, which ranks then slice: the same weights at every split and on every device.
        use_cpu_initialization=True,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_local_fields(model),
        **(_latent_fields(model) if is_latent else {}),
        **options,
    )
    if attention.sliding_stride is not None:
        config.window_stride = attention.sliding_stride  # for `SDPAttention`
    if model.position.rope_scaling is not None:
        prepare_yarn(config, model)
    return config
