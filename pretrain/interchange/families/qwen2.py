"""Qwen2-MoE (Qwen1.5-MoE): biases of queries, keys and values, and a gated shared expert (arXiv 2407.10671)."""

from pretrain.interchange.families.llama import (
    COMMON,
    DENSE,
    EXPERT_WIDTH,
    EXPERTS,
    FIXED,
    KEYS,
    LAYER,
    ONLY,
    OUR_LAYER,
    QKV_BIAS,
    SHARED,
    SOFTMAX,
    STACKED,
    norm_and_rope,
    read_qwen_moe,
    shared_entries,
    write_qwen_moe,
)
from pretrain.interchange.family import Family, KeyPair
from pretrain.interchange.rope import YARN
from pretrain.interchange.tensors import Entry

_TABLE = (
    *COMMON,
    QKV_BIAS,
    *DENSE,
    *shared_entries("shared_expert"),
    Entry("moe", f"{OUR_LAYER}.mlp.shared.output_gate.weight", {f"{LAYER}.mlp.shared_expert_gate.weight": "1 D"}),
)


QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    tables=((*_TABLE, *EXPERTS), (*_TABLE, *STACKED)),
    keys=(
        *KEYS,
        KeyPair("num_experts", "moe.num_experts", int),
        EXPERT_WIDTH,
        # The shared experts are one block as wide as all of them together.
        KeyPair("shared_expert_intermediate_size", "moe.shared_ffn_hidden_size", int, value=lambda m: m.shared_width),
        KeyPair("qkv_bias", "attention.qkv_bias", bool, True),
        *norm_and_rope(1e-6, 1e4),
    ),
    fixed=FIXED | {"moe.shared_expert_gate": True},
    demands=(*SOFTMAX, SHARED),
    varies=("attention.head_dim", "moe.normalize", "moe.layers", "moe.every", *YARN),
    constants={"use_sliding_window": False, "sliding_window": None},
    only=ONLY,
    read=lambda config: read_qwen_moe(config) | {"moe.num_shared_experts": 1},
    write=write_qwen_moe,
)
