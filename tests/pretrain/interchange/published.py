"""Published models by their config.json on the hub, in the form of transformers 4. No test."""

QWEN1_5_MOE_A2_7B = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2_57B_A14B = QWEN1_5_MOE_A2_7B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "moe_intermediate_size": 2560,
    "num_attention_heads": 28,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 20480,
    "sliding_window": 65536,
}
# Name: configuration, parameters, active parameters, number of tensors.
MORE = {
    "Qwen1.5-MoE-A2.7B": (QWEN1_5_MOE_A2_7B, 14.3e9, 2.7e9, 4659),
    "Qwen2-57B-A14B": (QWEN2_57B_A14B, 57.4e9, 14.2e9, 5771),
}
# Keys whose values have no effect, or are written in another form.
NOT_WRITTEN = {"bos_token_id", "eos_token_id", "max_window_layers", "intermediate_size", "sliding_window"}
