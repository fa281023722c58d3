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
            "num_hidden_layers": 2,
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

# As on the hub, but for YaRN (rope_scaling) and the quantization of DeepSeek-V3.
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V2 = DEEPSEEK_V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "ep_size": 1,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 0,  # 1 on the hub, which the published number of parameters does not count
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# Parameters in all and of a token, with the embedding (2.4 and 21 billion are published without it), and tensors.
DEEPSEEK_PUBLISHED = {
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 15.7e9, 2.66e9, 5291),
    "DeepSeek-V2": (DEEPSEEK_V2, 236e9, 21.4e9, 29102),
    "DeepSeek-V3": (DEEPSEEK_V3, 671e9, 37.6e9, 45395),
}
