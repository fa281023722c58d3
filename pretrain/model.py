"""From a recipe to a Megatron-core GPT whose feed-forward blocks are experts."""

import logging
import warnings

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_patch import fmoefy
from megatron_patch.attention import SDPAttention
from pretrain.config import ModelConfig, Recipe
from pretrain.gate import exchange_options, gate_options

_ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


def transformer_config(recipe: Recipe, **options) -> TransformerConfig:
    """Megatron-core's description of the same model, dense; ``options`` are further fields of it."""
    model = recipe.model
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[recipe.train.precision]
    with warnings.catch_warnings():
        # Its own default for a field of CUDA graphs is deprecated in 0.16.1.
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        return _transformer_config(model, dtype, options)


def _transformer_config(model: ModelConfig, dtype: torch.dtype, options: dict) -> TransformerConfig:
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        activation_func=_ACTIVATIONS[model.activation],
        gated_linear_unit=model.gated,
        add_bias_linear=False,
        attention_dropout=model.dropout,
        hidden_dropout=model.dropout,
        init_method_std=model.init_std,
        use_cpu_initialization=not torch.cuda.is_available(),
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **options,
    )


def build_gpt(recipe: Recipe, config: TransformerConfig, layer_spec: ModuleSpec) -> GPTModel:
    """Embedding, layers of the spec with torch's fused attention, output layer."""
    layer_spec.submodules.self_attention.submodules.core_attention = SDPAttention
    return GPTModel(
        config,
        layer_spec,
        vocab_size=recipe.model.vocab_size,
        max_sequence_length=recipe.model.sequence_length,
        share_embeddings_and_output_weights=recipe.model.tie_embeddings,
        position_embedding_type=recipe.model.position,
    )


def build_model(recipe: Recipe) -> GPTModel:
    """The model, on the device it trains on, not yet wrapped for data parallelism."""
    model = recipe.model
    # Megatron-core warns about every module that it does not know.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
    gpt = build_gpt(recipe, transformer_config(recipe), get_gpt_layer_local_spec())
    if model.num_experts:
        fmoefy(
            gpt,
            model.num_experts,
            layers=model.layers_with_experts,
            top_k=model.top_k,
            gate=model.gate,
            gate_options=gate_options(model),
            loss_weights={"balance": model.balance_loss, "z": model.z_loss},
            group_size=model.group_size,
            exchange=recipe.parallel.exchange,
            exchange_options=exchange_options(recipe.parallel),
            seed=recipe.train.seed,
        )
    return gpt.cuda() if torch.cuda.is_available() else gpt
