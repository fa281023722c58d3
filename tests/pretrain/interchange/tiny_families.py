"""Configurations of tiny models of Hugging Face, a few per family, for `huggingface_folders.save_random`. No test."""

from typing import Any

import torch

VOCAB, LENGTH = 96, 32
Case = tuple[str, dict[str, Any], torch.dtype, dict[str, Any]]


def tiny(kind: str, values: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any) -> Case:
    """``options`` are those of ``save_pretrained``."""
    return kind, values, dtype, options


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
}
LOCAL = SIZES | {"num_local_experts": 4}
GROUPED = LOCAL | {"num_key_value_heads": 2}
OLMOE = SIZES | {"num_experts": 4, "pad_token_id": None, "num_key_value_heads": 2}
PHIMOE = GROUPED | {"bos_token_id": None, "eos_token_id": None, "router_jitter_noise": 0.3}
GPT_OSS = GROUPED | {
    "num_hidden_layers": 3,
    "head_dim": 12,
    "sliding_window": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
}
WIDE = SIZES | {"num_hidden_layers": 4, "intermediate_size": 40, "moe_intermediate_size": 24, "num_key_value_heads": 2}
QWEN2_MOE = WIDE | {"num_experts": 4, "shared_expert_intermediate_size": 20}
QWEN3_MOE = WIDE | {"num_experts": 4, "head_dim": 12}
ROUTED = WIDE | {"num_hidden_layers": 3, "num_experts_per_tok": 3, "n_routed_experts": 8}
GLM = ROUTED | {"head_dim": 12, "num_mtp_layers": 0}
ERNIE = WIDE | {"num_hidden_layers": 3, "moe_k": 3, "moe_num_experts": 8}
del ERNIE["num_experts_per_tok"]
LATENT = ROUTED | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK_V3 = LATENT | {"num_mtp_layers": 0}
GROUPS = {"n_group": 4, "topk_group": 2}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 16,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "n_positions": LENGTH,
}
SWITCH = T5 | {"num_experts": 4, "expert_capacity": 2 * LENGTH, "num_layers": 4}
# Of 32 tokens; in 8 tokens, the first pair of elements of a head turns once, and the last ones seldom.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2.0}
YARN |= {"beta_slow": 1.0, "rope_theta": 50.0}
SCALED = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
UNTRUNCATED = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
UNTRUNCATED |= {"truncate": False, "original_max_position_embeddings": 8}
STACKED = {"save_original_format": False}  # experts in one tensor


def rope(theta: float, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, **values}}


CASES: dict[str, Case] = {
    "mixtral": tiny("MixtralConfig", GROUPED | {"head_dim": 12} | rope(500.0)),
    "mixtral, window": tiny("MixtralConfig", GROUPED | {"sliding_window": 7}),
    "mixtral tied, bf16": tiny(
        "MixtralConfig",
        LOCAL | {"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        torch.bfloat16,
        max_shard_size="20KB",
    ),
    "mixtral, one expert a token, experts in one tensor": tiny(
        "MixtralConfig", LOCAL | {"num_key_value_heads": 1, "num_experts_per_tok": 1}, **STACKED
    ),
    "qwen3_moe": tiny(
        "Qwen3MoeConfig",
        QWEN3_MOE | {"norm_topk_prob": True} | rope(1e6, rope_type="default"),
        max_shard_size="40KB",
    ),
    "qwen3_moe, dense layers, weights as they are": tiny(
        "Qwen3MoeConfig",
        QWEN3_MOE | {"mlp_only_layers": [0, 3], "norm_topk_prob": False, "tie_word_embeddings": True},
        torch.bfloat16,
    ),
    "qwen3_moe, every second layer, experts in one tensor": tiny(
        "Qwen3MoeConfig",
        QWEN3_MOE | {"decoder_sparse_step": 2, "norm_topk_prob": True, "head_dim": 16, "num_experts_per_tok": 3},
        **STACKED,
    ),
    "qwen2_moe, dense layers": tiny(
        "Qwen2MoeConfig", QWEN2_MOE | {"mlp_only_layers": [1]} | rope(1e6, rope_type="default")
    ),
    "qwen2_moe, without biases, experts in one tensor": tiny(
        "Qwen2MoeConfig",
        QWEN2_MOE | {"qkv_bias": False, "norm_topk_prob": True, "tie_word_embeddings": True},
        torch.bfloat16,
        **STACKED,
    ),
    "granitemoe": tiny(
        "GraniteMoeConfig",
        GROUPED
        | {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "granitemoe, other names": tiny(
        "GraniteMoeConfig",
        LOCAL | {"attention_multiplier": 8**-0.5, "residual_multiplier": 0.5, "num_experts_per_tok": 3},
        torch.bfloat16,
        **STACKED,
    ),
    "olmoe": tiny("OlmoeConfig", OLMOE),
    "olmoe tied, experts in one tensor": tiny(
        "OlmoeConfig",
        OLMOE | {"num_key_value_heads": 4, "norm_topk_prob": True, "tie_word_embeddings": True} | rope(5e5),
        torch.bfloat16,
        **STACKED,
    ),
    "gpt_oss": tiny("GptOssConfig", GPT_OSS),
    "gpt_oss, other layers, bf16": tiny(
        "GptOssConfig",
        GPT_OSS
        | {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": UNTRUNCATED,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "num_experts_per_tok": 1,
        },
        torch.bfloat16,
        max_shard_size="40KB",
    ),
    "phimoe": tiny("PhimoeConfig", PHIMOE | {"attention_bias": True, "lm_head_bias": True} | rope(500.0)),
    "phimoe, without biases, a window, tied, experts in one tensor": tiny(
        "PhimoeConfig",
        PHIMOE | {"tie_word_embeddings": True, "head_dim": 12, "sliding_window": 5},
        torch.bfloat16,
        **STACKED,
    ),
    "deepseek_v2": tiny("DeepseekV2Config", LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1} | rope(500.0)),
    "deepseek_v2, groups, compressed queries, bf16": tiny(
        "DeepseekV2Config",
        LATENT
        | GROUPS
        | {
            "num_hidden_layers": 2,
            "q_lora_rank": 18,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 1,
            "routed_scaling_factor": 16.0,
        },
        torch.bfloat16,
        max_shard_size="60KB",
    ),
    "deepseek_v3": tiny(
        "DeepseekV3Config", DEEPSEEK_V3 | GROUPS | {"q_lora_rank": 18, "first_k_dense_replace": 1}, torch.bfloat16
    ),
    "deepseek_v3, all groups, weights as they are, experts in one tensor": tiny(
        "DeepseekV3Config",
        DEEPSEEK_V3
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
        **STACKED,
    ),
    "glm4_moe": tiny(
        "Glm4MoeConfig",
        GLM | {"attention_bias": True, "use_qk_norm": True, "n_group": 2} | rope(500.0, partial_rotary_factor=0.5),
        torch.bfloat16,
    ),
    "glm4_moe, no biases, no norms, whole heads, experts in one tensor": tiny(
        "Glm4MoeConfig",
        GLM
        | {
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": True,
        }
        | rope(10000.0, partial_rotary_factor=1.0),
        **STACKED,
    ),
    "ernie4_5_moe": tiny(
        "Ernie4_5_MoeConfig", ERNIE | {"moe_layer_start_index": 1, "moe_layer_end_index": 2} | rope(500.0)
    ),
    "ernie4_5_moe, every second layer, no shared experts, bf16": tiny(
        "Ernie4_5_MoeConfig",
        ERNIE
        | {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
        torch.bfloat16,
    ),
    "ernie4_5_moe, every layer, experts in one tensor": tiny(
        "Ernie4_5_MoeConfig",
        ERNIE
        | {
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": -1,
        },
        **STACKED,
    ),
    "deepseek_v2, yarn": tiny(
        "DeepseekV2Config", LATENT | {"qk_rope_head_dim": 8, "q_lora_rank": None, "rope_parameters": SCALED}
    ),
    "deepseek_v2, yarn, one factor, bf16": tiny(
        "DeepseekV2Config",
        LATENT | {"qk_rope_head_dim": 8, "q_lora_rank": 18, "rope_parameters": YARN},
        torch.bfloat16,
    ),
    "deepseek_v3, yarn": tiny(
        "DeepseekV3Config",
        DEEPSEEK_V3
        | GROUPS
        | {"qk_rope_head_dim": 8, "q_lora_rank": 18, "first_k_dense_replace": 1}
        | {"rope_parameters": SCALED | {"mscale_all_dim": 1.0, "beta_slow": 0.25}},
    ),
    "mixtral, yarn": tiny("MixtralConfig", GROUPED | {"head_dim": 12, "rope_parameters": YARN | {"truncate": False}}),
    "qwen3_moe, yarn": tiny("Qwen3MoeConfig", WIDE | {"num_experts": 4, "rope_parameters": YARN}),
    "qwen2_moe, yarn": tiny("Qwen2MoeConfig", QWEN2_MOE | {"rope_parameters": YARN}),
    "olmoe, yarn": tiny("OlmoeConfig", OLMOE | {"rope_parameters": YARN}),
    "granitemoe, yarn": tiny("GraniteMoeConfig", GROUPED | {"attention_multiplier": 0.3, "rope_parameters": YARN}),
    "glm4_moe, yarn on half of a head": tiny(
        "Glm4MoeConfig", GLM | {"head_dim": 16, "rope_parameters": SCALED | {"partial_rotary_factor": 0.5}}
    ),
    "ernie4_5_moe, yarn": tiny(
        "Ernie4_5_MoeConfig", ERNIE | {"head_dim": 16, "eos_token_id": None, "rope_parameters": YARN}
    ),
    "t5": tiny("T5Config", T5),
    "t5, version 1.1": tiny("T5Config", T5 | {"feed_forward_proj": "gated-gelu", "untied": True}, torch.bfloat16),
    "t5, tied without a scale": tiny(
        "T5Config", T5 | {"feed_forward_proj": "gated-gelu_python", "tie_word_embeddings": False, "d_kv": 4}
    ),
    "t5, heads of another width": tiny("T5Config", T5 | {"d_kv": 8, "feed_forward_proj": "gated-silu"}, torch.float16),
    "switch_transformers, wide heads": tiny("SwitchTransformersConfig", SWITCH | {"d_kv": 32}, torch.bfloat16),
    "switch_transformers": tiny(
        "SwitchTransformersConfig", SWITCH | {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 3}
    ),
    "switch_transformers, bf16": tiny(
        "SwitchTransformersConfig",
        SWITCH | {"num_decoder_layers": 4, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
        torch.bfloat16,
    ),
    "switch_transformers, experts in the encoder alone": tiny(
        "SwitchTransformersConfig",
        SWITCH | {"encoder_sparse_step": 3, "decoder_sparse_step": 0, "dense_act_fn": "gelu_new"},
    ),
    "megatron-bert": tiny("MegatronBertConfig", SIZES | {"intermediate_size": 40}),
    "megatron-bert, one segment, bf16": tiny(
        "MegatronBertConfig", SIZES | {"intermediate_size": 40, "type_vocab_size": 1}, torch.bfloat16
    ),
}
