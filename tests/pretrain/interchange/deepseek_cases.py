"""Tiny models of DeepSeek's architectures and their relatives, for `huggingface_folders.CASES`. No test."""

import torch

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 3,
    "initializer_range": 0.2,
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
DEEPSEEK_CASES = {
    "deepseek_v2": (
        "DeepseekV2Config",
        COMMON
        | LATENT
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {"rope_theta": 500.0},
        },
        torch.float32,
        {},
    ),
    "deepseek_v2, groups, compressed queries, bf16": (
        "DeepseekV2Config",
        COMMON
        | LATENT
        | {
            "q_lora_rank": 18,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "routed_scaling_factor": 16.0,
        },
        torch.bfloat16,
        {"max_shard_size": "60KB"},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        COMMON
        | LATENT
        | {"q_lora_rank": 18, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0},
        torch.bfloat16,
        {},
    ),
    "deepseek_v3, all groups, weights as they are, experts in one tensor": (
        "DeepseekV3Config",
        COMMON
        | LATENT
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "num_mtp_layers": 0,
        },
        torch.float32,
        {"save_original_format": False},
    ),
}
