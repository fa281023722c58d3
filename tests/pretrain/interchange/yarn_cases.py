"""Tiny models of Hugging Face with rotary positions scaled by YaRN, for `huggingface_folders.CASES`. No test."""

from typing import Any

import torch
from deepseek_cases import COMMON, ERNIE, LATENT

# Of 32 tokens; in 8 tokens, the first pair of elements of a head turns once, and the last ones seldom.
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2.0}
YARN |= {"beta_slow": 1.0, "rope_theta": 50.0}
BOTH = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
LATENT = LATENT | {"qk_rope_head_dim": 8}
DEEPSEEK = {key: value for key, value in COMMON.items() if key != "n_routed_experts"}
LLAMA = {key: value for key, value in DEEPSEEK.items() if key != "moe_intermediate_size"}
LLAMA |= {"num_hidden_layers": 2, "num_key_value_heads": 2}
YARN_CASES = {
    "deepseek_v2, yarn": (
        "DeepseekV2Config",
        COMMON | LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": BOTH},
        torch.float32,
        {},
    ),
    "deepseek_v2, yarn, one factor, bf16": (
        "DeepseekV2Config",
        COMMON | LATENT | {"q_lora_rank": 18, "n_group": 1, "topk_group": 1, "rope_parameters": YARN},
        torch.bfloat16,
        {},
    ),
    "deepseek_v3, yarn": (
        "DeepseekV3Config",
        COMMON
        | LATENT
        | {"q_lora_rank": 18, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0}
        | {"rope_parameters": BOTH | {"mscale_all_dim": 1.0, "beta_slow": 0.25}},
        torch.float32,
        {},
    ),
    "mixtral, yarn": (
        "MixtralConfig",
        LLAMA | {"num_local_experts": 4, "head_dim": 12, "rope_parameters": YARN | {"truncate": False}},
        torch.float32,
        {},
    ),
    "qwen3_moe, yarn": (
        "Qwen3MoeConfig",
        DEEPSEEK | {"num_experts": 4, "num_key_value_heads": 2, "rope_parameters": YARN},
        torch.float32,
        {},
    ),
    "qwen2_moe, yarn": (
        "Qwen2MoeConfig",
        DEEPSEEK
        | {"num_experts": 4, "num_key_value_heads": 2, "shared_expert_intermediate_size": 20, "rope_parameters": YARN},
        torch.float32,
        {},
    ),
    "olmoe, yarn": (
        "OlmoeConfig",
        LLAMA | {"num_experts": 4, "pad_token_id": None, "rope_parameters": YARN},
        torch.float32,
        {},
    ),
    "granitemoe, yarn": (
        "GraniteMoeConfig",
        LLAMA | {"num_local_experts": 4, "attention_multiplier": 0.3, "rope_parameters": YARN},
        torch.float32,
        {},
    ),
    "glm4_moe, yarn on half of a head": (
        "Glm4MoeConfig",
        COMMON
        | {"num_key_value_heads": 2, "head_dim": 16, "num_mtp_layers": 0}
        | {"rope_parameters": BOTH | {"partial_rotary_factor": 0.5}},
        torch.float32,
        {},
    ),
    "ernie4_5_moe, yarn": (
        "Ernie4_5_MoeConfig",
        ERNIE | {"num_key_value_heads": 2, "head_dim": 16, "eos_token_id": None, "rope_parameters": YARN},
        torch.float32,
        {},
    ),
}
